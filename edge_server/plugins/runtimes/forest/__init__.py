"""Backends `forest` and `fil`: `backend` reads and runs forests, `onnx_conversion` makes tree ensembles of them."""
