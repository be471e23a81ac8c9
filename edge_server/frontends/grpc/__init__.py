"""The gRPC front end: Triton's GRPCInferenceService, health checking, reflection and frame streams on one port.

Start at `call`: the line between a transport and the RPCs. `over_http2` (the default) and `over_grpcio` are the
transports; `methods` lists the RPCs: `infer` (unary), `stream`, `control`, `discovery`. A request becomes core nouns in
`header_cache`, by `message`, `request` and `contents` where its head is new, and leaves through `encode`. `server` puts
all together. grpcio is imported in `over_grpcio` alone; only the composition root imports this package, and the frame
streams its `call`.
"""
