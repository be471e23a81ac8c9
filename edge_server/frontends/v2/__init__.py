"""KServe v2 protocol and Triton's extensions, shared by the HTTP and gRPC front ends. No aiohttp, no protobuf.

It holds: JSON codec, request parameters, requested outputs, version text, and the JSON of control responses. Front ends
decode a request here to `core.request_response.Request`, and encode the response.
"""
