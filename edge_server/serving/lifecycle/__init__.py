"""Models as they come and go: their states and the desired state, loading and unloading, and the routes of requests to
the versions that serve.

A version enters as a new desired state in `manager`. `loader` opens it and warms it up, then `router` sends requests to
it. It is closed after its last request was answered.
"""
