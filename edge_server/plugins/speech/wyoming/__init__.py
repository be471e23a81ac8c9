"""The Wyoming protocol, over which Home Assistant's Assist reaches speech services: a TCP port of its own.

`port` accepts the connections and passes each event to the service that takes its type. `event_stream` reads and writes
events. A service is a file of its own, such as `speech_to_text`; only the plugin makes the port and the services.
"""
