"""Frame streams of cameras, independent of the transport: each keeps a few waiting frames, and worker threads run the
models. The newest frame wins.

A frame enters through `stream_registry` and `camera_stream`. `frame_pipeline` runs the model. The result leaves
through the stream. Nothing here imports an endpoint.
"""
