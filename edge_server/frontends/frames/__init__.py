"""The frame stream: camera frames in, perception out, the newest first.

Imports core, config, telemetry, vision, the service and protocol.frame_codec; of
frontends/grpc the interface of a call alone.
A frame enters through `rpc`, waits in the mailbox of its `stream`, is chosen, as late as possible, by a worker of its
model's `lane`, is fitted, run and read by the lane's `engine`, and leaves through its stream, in order.
"""
