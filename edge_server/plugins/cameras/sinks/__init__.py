"""Sinks, the receivers of results of the server's cameras: MQTT brokers, webhooks, files of JSON lines, folders of
pictures.

One module per kind. Results enter through `sink_set`; `sink_runner` makes the sink of a URL, paces
them and sends them on a thread of its own, so a slow receiver costs only its own messages. `result_json` is also the
format of `edge-server stream --json`; boxes of a fleet report over `mqtt_connection` too. Imports no
source and no endpoint.
"""
