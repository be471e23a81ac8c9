"""Wires to core nouns and back: HTTP, gRPC, and what the two share.

Everything here asks the server through `service.InferenceService` only; `server` starts and stops the front ends. A
request enters as bytes in `http/` or `grpc/` and leaves towards the core as `message.Request`.
"""
