"""Isolation of a model in a child process: a crash of the model ends that process, not the server.

`isolated_session` is the session in the server, which starts the process again when it crashes. `process_main` is the
program of the process, which runs the real session. Calls of the model to the server go through `call_relay`. These
know no runtime: the server sends the function that opens the session. `batch_session` runs the requests of one batch by
a runtime that computes batches. May import core, errors and `backends.base`, `custom_metrics`, `deadlock_check`,
`running_batch` and `runtime_errors`.
"""
