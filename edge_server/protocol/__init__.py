"""Protobuf definitions of the server's protocols: .proto files, compiled descriptors, message classes, and codecs.

`frontends/grpc` sends these messages; `repository` reads config.pbtxt with ModelConfig. Start at `messages`. Frame
streams have `frame_messages` of plain Python, and `frame_codec` to and from the wire. The descriptors use a separate
pool: model code in this process may import tritonclient, whose generated code registers files of the same names in
protobuf's default pool.
"""
