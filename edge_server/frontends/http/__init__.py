"""The HTTP/REST front end and the metrics endpoint, on aiohttp. Only `server` imports from here.

A request enters at `frontend`, is led by `routes` to `inference` or `control`, and leaves through `InferenceService`;
its answer comes home to the event loop by `homecoming` and leaves by `reply`.
"""
