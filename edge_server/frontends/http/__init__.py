"""The HTTP/REST front end and the metrics endpoint. Only `server` imports from here.

A `connection` reads a request: its head (`request_head`), for which `frontend` finds the target that answers it, and
its body (`body_reader`). The target is `inference`, or one of the endpoints of `routes`. Responses of the serving
threads come to the event loop by `loop_dispatch`, and leave as bytes made in `response`.
"""
