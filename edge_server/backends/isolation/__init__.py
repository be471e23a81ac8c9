"""Child processes: what crashes or hangs in one ends that process, not the server. Most hold a model.

`isolated_session` is the session in the server, which starts the process again when it crashes. `process_main` is the
program of the process, which runs the real session. Calls of the model to the server go through `call_relay`. These
know no runtime: the server sends the function that opens the session. `batch_session` runs the requests of one batch by
a runtime that computes batches. `json_child_process` starts any other child process of the program, which does one job
and says so in lines of JSON (`json_child_side`). May import core, errors and `backends.base`, `custom_metrics`,
`deadlock_check`, `running_batch` and `runtime_errors`.
"""
