"""ONNX files that OpenVINO may compute otherwise than the ONNX standard says, where a comparison of a few answers can
miss it.

All of them were seen with OpenVINO 2026.4 on a CPU, beside ONNX Runtime and the expected values of the package `onnx`.
Other differences, such as those of integer arithmetic, show in each comparison.
"""

from __future__ import annotations

from pathlib import Path

from edge_server.backends import onnx_file_info

_OPERATORS = {
    b"Attention": "it computes windows and rows that are masked whole otherwise",
    b"BitShift": "it shifts in another width",
    b"TopK": "it orders equal values otherwise",
    b"Tile": "with repeats that an input gives, its answer is memory that nothing was written to",
}
"""Operator -> what OpenVINO does. https://onnx.ai/onnx/operators/ has the definitions."""

_TYPES = {
    11: "FP64",
    12: "UINT32",
    13: "UINT64",
}
"""TensorProto.DataType numbers of types that it computes in 32 bits. INT64 is not among them: its values are mostly
indices, and a comparison tries larger ones."""


def known_difference(path: Path) -> str:
    """Return why OpenVINO may answer otherwise with an ONNX file, "" if nothing is known. Raises OSError, and
    ValueError for another file."""
    inputs, outputs = onnx_file_info.declared(path)
    for tensor in (*inputs, *outputs):
        if tensor.element in _TYPES:
            return f"it computes '{tensor.name}' of type {_TYPES[tensor.element]} in 32 bits"
    for operator, reason in _OPERATORS.items():
        if onnx_file_info.has_operator(path, frozenset((operator,))):
            return f"operator {operator.decode()}: {reason}"
    return ""
