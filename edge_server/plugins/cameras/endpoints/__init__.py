"""Network interfaces of cameras: the gRPC service of frame streams, HTTP handlers, and the protocols of video
recorders.

`frame_service` opens the calls of the RPC `edge.frames.v1.FrameService/Stream`; `stream_call` decodes the frames of one
call, passes them to a stream of `streams/`, and sends the stream's results. `routes` are those of HTTP: reports
of the streams, their pictures, and DeepStack's API. `deepstack_endpoints` and `zmq_detector` answer video recorders.
"""
