"""What the HTTP and the gRPC front end share of KServe's v2 protocol and Triton's extensions. No aiohttp, no protobuf.

Raw tensor bytes, request parameters, requested outputs, version text and the shapes of answers that are not inferences.
A request passes through here on its way from a wire's own message to `message.Request`, a response on its way back.
"""
