"""gRPC front end: Triton's GRPCInferenceService, health checking, reflection and services of plugins on one port.

Start at `call`, the interface between a transport and the RPCs. `http2_transport` (the default) and `grpcio_transport`
are the transports. `rpc_table` lists the RPCs: `unary_inference`, `stream_inference`, `control_rpcs`,
`health_and_reflection`. `unary_inference` parses requests and encodes responses; `infer_message`, `infer_request` and
`typed_contents` parse requests with a new header. `server` assembles the parts. Only `grpcio_transport` imports grpcio.
Only `process` imports this package, and plugins with services of their own `call` and `rpc_table`.
"""
