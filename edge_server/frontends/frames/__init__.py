"""gRPC wire of the camera frame streams: the RPC `edge.frames.v1.FrameService/Stream`.

`frame_service` opens the calls. `stream_call` decodes the frames of one call, passes them to a stream of
`edge_server/streams`, and sends the stream's results. Imports config, core, telemetry, streams, the service and
protocol.frame_codec; of frontends/grpc only `call`.
"""
