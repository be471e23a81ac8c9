"""Network interfaces of cameras: the gRPC service of frame streams, and HTTP handlers, also for video recorders.

`frame_service` opens the calls of the RPC `edge.frames.v1.FrameService/Stream`; `stream_call` decodes the frames of one
call, passes them to a stream of `streams/`, and sends the stream's results. `routes` are those of HTTP: reports
of the streams, their pictures, and DeepStack's API, by which video recorders ask.
"""
