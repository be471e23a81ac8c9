"""Protobuf definitions of the wire: .proto files, compiled descriptors, and message classes made from them.

`frontends/grpc` speaks these messages on the wire; `repository` reads config.pbtxt with ModelConfig. Start at
`messages`. The descriptors live in a pool of our own: model code in this process may import tritonclient, whose
generated code registers files of the same names in protobuf's default pool.
"""
