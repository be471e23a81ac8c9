"""HTTP/REST front end and metrics endpoint. Only `process/server` imports from here.

A `connection` reads a request: its head (`request_head`), for which `frontend` finds the target, and its body
(`body_reader`). The target is the `inference_route`, or an endpoint of `endpoint_table`. Responses come from the
serving threads to the event loop by `inference_route.LoopDispatch`, and leave as bytes made in `response`.
"""
