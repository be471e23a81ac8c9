"""Front ends, the network side of the server: HTTP, gRPC, and what both share. They translate wire formats to core
objects and back.

Front ends call the server only through `service.InferenceService`; `process/server` starts and stops them. A request
arrives as bytes in `http/` or `grpc/`, and leaves to the core as `core.request_response.Request`.
"""
