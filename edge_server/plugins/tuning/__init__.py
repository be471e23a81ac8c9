"""Measurement and tuning of models from outside the server: load tests of a running server (`load`), and comparison of
runtimes and precisions (`trial`).

`perf`, `analyze` and `optimize` are the commands. They talk to a server over HTTP and gRPC.
"""
