"""TensorRT and TensorRT for RTX: runs engines (`backend`, `session`), and builds them (`running_plugin`, `builds`).

`library_adapter` is the only file that knows the differences of the two libraries and their versions. `engine_options`
reads the options of a build from a model's configuration. The CUDA driver is called through `backends.cuda`.
"""
