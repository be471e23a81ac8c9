"""Backends for PyTorch, TensorFlow, TensorFlow Lite, JAX, forests of decision trees and C libraries.

One file or folder for each, with a function `make(name) -> Backend`. A runtime is here if it needs nothing of a server
but the interface `backends.base`. ONNX Runtime and OpenVINO are in `backends/`, because the core alone serves with
them. TensorRT has a plugin of its own, because it builds engines in the background; Python models and language models
have theirs, because they bring more than a backend.
"""
