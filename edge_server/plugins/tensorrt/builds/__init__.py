"""TensorRT engine builds: another runtime serves a model while a low-priority process builds its engine.

`build_queue` takes orders and runs one build at a time, `build_process` runs the child process, `builder` compares its
answers with the serving runtime's, and `engine_cache` stores verified engines under an `engine_key`. Used only on a
machine with a GPU and a TensorRT. A version enters when the TensorRT backend finds no engine for it, and leaves when it
is loaded again with one. `trial_engines` finds or builds engines for trials, outside of a server.
"""
