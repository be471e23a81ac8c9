"""Backend `openvino`: runs ONNX, OpenVINO IR, TensorFlow Lite and SavedModel files with OpenVINO. Only this folder
imports openvino; language models use its `lean_import`.

`backend` opens models, `session` runs them, and `model_reader` reads files of all its formats. `options` reads the
parameters of a model, `devices` those that name a device. `lean_import` imports the library without its converters.
"""
