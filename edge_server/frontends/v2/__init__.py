"""KServe's v2 protocol with Triton's extensions: the JSON and the rules that the HTTP and gRPC front ends share. No
aiohttp, no protobuf.

It holds: JSON codec, request parameters, requested outputs, version text, and the JSON of control responses. Front ends
decode a request here to `core.request_response.Request`, and encode the response.
"""
