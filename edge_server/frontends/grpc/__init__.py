"""The gRPC front end: Triton's GRPCInferenceService, health checking and reflection on one port.

A request enters as received bytes in `infer` (unary) or `stream`, becomes core nouns through `wire`, `request` and
`contents`, and leaves through `encode`. `server` builds and binds the whole. grpc and protobuf are imported in this
folder and, of the front ends, nowhere else; only the composition root imports this package.
"""
