"""Cameras: receives camera pictures from clients as frame streams, or opens cameras itself, runs models on them, and
passes on the results.

`streams/` runs the frames of all cameras through models; the newest frame wins. `endpoints/` opens streams over gRPC,
shows them over HTTP, and speaks the protocols of video recorders. `sources/` are cameras that the server opens,
`zones/` counts objects in parts of their pictures, and `sinks/` are receivers of their results; `server_cameras`
connects the three. `onvif/` finds cameras. `commands/` are `edge-server stream`, `view` and `cameras`. Of other plugins
only `fleet` imports from here: `sinks/mqtt_connection`.
"""
