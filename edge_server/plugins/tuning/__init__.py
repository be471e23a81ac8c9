"""Measurement and tuning of models: load tests of a running server (folder `load`), and comparison of runtimes and
precisions without one (in `plugins/trials`).

`perf`, `analyze` and `optimize` are the commands. They talk to a server over HTTP and gRPC.
"""
