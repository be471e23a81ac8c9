"""Protobuf definitions of the wire protocol: .proto files, compiled descriptors, and message classes made from them.

`frontends/grpc` sends these messages; `repository` reads config.pbtxt with ModelConfig. Start at `messages`. Frame
streams have `frame_messages` of plain Python, and `frame_codec` to and from the wire. The descriptors use a separate
pool: model code in this process may import tritonclient, whose generated code registers files of the same names in
protobuf's default pool.
"""
