"""Backend `onnxruntime`: runs ONNX models with ONNX Runtime. Only this folder imports onnxruntime.

`backend` opens ONNX files, `session` runs them. `options` reads the parameters of a model. `providers` chooses and
starts execution providers.
"""
