"""Transport-independent camera frame streams: terms, mailboxes, worker threads, counters. The newest frame wins.

A frame enters through `stream_registry` and `camera_stream`. `frame_pipeline` runs the model. The result leaves
through the stream. Nothing here imports an endpoint.
"""
