"""Zones and lines in the picture of a camera that the server opens: counts the objects in them and the crossings.

`zone_settings` reads them from the sources file. A `zone_monitor` gets the tracked objects of each frame from the
camera's frame stream, and returns what the sinks send. `zone_geometry` is its mathematics. `zone_store` keeps changes
that come over HTTP. Nothing here imports a stream, a source or a sink.
"""
