"""HTTP front end: the server's own HTTP/1.1 implementation, its routes with their handlers, and the metrics port.
`process` imports it, and plugins with endpoints of their own.

`server` accepts connections. A `connection` reads a request: its head (`request_head`) and its body (`body_reader`).
`frontend` finds the target of the head: the `inference_route`, or a handler of `routes`. A route is a method, a path
and its handler; the handlers are in modules named `..._endpoints`. `process/http_routes` passes the routes to
`frontend`. A handler gets an `HttpRequest` (`request`); `aiohttp_adapter` makes one from aiohttp's. `response` encodes
responses.
"""
