"""ONNX files for which OpenVINO may give other answers than the ONNX standard says, where a comparison of a few answers
can miss it.

All of them were seen with OpenVINO 2026.4 on a CPU, beside ONNX Runtime and the expected values of the package `onnx`.
Other differences, such as those of integer arithmetic, show in each comparison. Types that it computes in fewer bits
are in `model_reader.wide_tensors`.
"""

from __future__ import annotations

from pathlib import Path

from edge_server.backends import onnx_file_info

_OPERATORS = {
    b"Attention": "it computes windows and completely masked rows differently",
    b"BitShift": "it shifts in another width",
    b"TopK": "it orders equal values differently",
    b"Tile": "with repeats that an input gives, its answer is memory that nothing was written to",
}
"""Operator -> what OpenVINO does. https://onnx.ai/onnx/operators/ has the definitions."""


def known_difference(path: Path) -> str:
    """Return why OpenVINO may give other answers for an ONNX file, "" if nothing is known. Raises OSError, and
    ValueError for another file."""
    for operator, reason in _OPERATORS.items():
        if onnx_file_info.has_operator(path, frozenset((operator,))):
            return f"operator {operator.decode()}: {reason}"
    return ""
