"""HTTP/REST front end and metrics endpoint. Only `process/server` imports from here.

A `connection` reads a request: its head (`request_head`) and its body (`body_reader`). `frontend` finds the target for
the head: the `inference_route`, or an endpoint of `routes`. `inference_route.LoopDispatch` passes responses
from the serving threads to the event loop. `response` encodes them.
"""
