"""TensorRT and TensorRT for RTX: `backend` and `session` run engines, `engine_build` builds them in a child process.

`adapter` is the only file that knows how the two libraries and their versions differ, `cuda` the only one that decides
how the CUDA driver is reached. What this folder needs to know of a model before an engine exists is in `order`.
"""
