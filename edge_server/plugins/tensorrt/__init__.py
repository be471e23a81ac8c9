"""Backends `tensorrt` and `tensorrt_rtx`: run TensorRT engines on NVIDIA GPUs, and build engines from ONNX files.

`backend` and `session` run engines. `running_plugin` and `builds` build them while another runtime serves the model,
which is why this runtime has a plugin of its own.

`library_adapter` is the only file that knows the differences of the two libraries and their versions. `engine_options`
reads the options of a build from a model's configuration. The CUDA driver is called through `backends.cuda`.
"""
