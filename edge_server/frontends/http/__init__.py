"""HTTP/REST front end and metrics endpoint. Only `process/` imports from here.

A `connection` reads a request: its head (`request_head`) and its body (`body_reader`). `frontend` finds the route of
the head: the `inference_route`, or a line of `routes` with a handler. `process/http_routes` passes it the lines of the
modules named `..._endpoints`. A handler gets an `HttpRequest` (`request`); `aiohttp_server` makes one from aiohttp's.
`response` encodes responses.
"""
