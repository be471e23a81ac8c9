"""Backends `forest` and `fil`: run forests of decision trees with ONNX Runtime or treelite.

`backend` reads and runs forests, `onnx_conversion` makes ONNX tree ensembles of them.
"""
