"""Backend for TensorRT and TensorRT for RTX: runs engines (`backend`, `session`) and builds them in a child process.

`library_adapter` is the only file that knows the differences of the two libraries and their versions. `cuda_driver`
decides how the CUDA driver is called. `engine_options` reads the options of a build from a model's configuration.
"""
