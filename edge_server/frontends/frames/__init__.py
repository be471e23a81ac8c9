"""gRPC wire of the camera frame streams (`edge.frames.v1.FrameService`). The streams themselves are in
`edge_server/streams`.

A call of the RPC is a `stream_call`. It passes frames to a camera stream of `frame_service`, and sends its results.
Imports core, config, telemetry, vision, the service and `protocol`; of frontends/grpc only the interface of a call.
"""
