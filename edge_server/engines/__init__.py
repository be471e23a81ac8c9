"""TensorRT engine builds: another runtime serves a model while a low-priority process builds its engine.

`works` keeps the orders and works them off one at a time; `child` runs the process that builds, `samples` asks the
serving runtime what is right, `cache` keeps what was verified under a `key` of everything that an engine depends on,
`box` says what of that is the box's. Made by the composition root alone, where there is a GPU and a TensorRT. A version
enters when the TensorRT backend finds no engine for it, and leaves when it is loaded anew with one.
"""
