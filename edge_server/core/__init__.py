"""Data types and rules of serving, without I/O, threads or clock: tensors, requests, model specifications, batching,
sequences, ensembles.

Standard library and numpy only: no I/O, no threads, no asyncio, no clock (callers pass the time as `now`). All other
packages may import from here. This folder imports only `errors`. A request enters as `request_response.Request`, a
model version as `model_spec.ModelSpec`.
"""
