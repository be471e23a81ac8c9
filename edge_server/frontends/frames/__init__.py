"""gRPC wire of the camera frame streams (`edge.frames.v1.FrameService`). The streams themselves are in
`edge_server/streams`.

Imports core, config, telemetry, vision, the service and protocol.frame_codec; of
frontends/grpc the interface of a call alone.
A frame enters through `rpc`, waits in the mailbox of its `stream`, is chosen, as late as possible, by a worker of its
model's `lane`, is fitted, run and read by the lane's `engine`, and leaves through its stream, in order.
"""
