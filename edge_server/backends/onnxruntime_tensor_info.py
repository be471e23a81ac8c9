"""Names, types and dims of an ONNX model's inputs and outputs."""

from __future__ import annotations

from typing import Any

from edge_server.backends.base import ModelFile
from edge_server.backends.runtime_library import file_title
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

TYPES = {
    "tensor(bfloat16)": DType.BF16,
    "tensor(bool)": DType.BOOL,
    "tensor(double)": DType.FP64,
    "tensor(float)": DType.FP32,
    "tensor(float16)": DType.FP16,
    "tensor(int16)": DType.INT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
    "tensor(int8)": DType.INT8,
    "tensor(string)": DType.BYTES,
    "tensor(uint16)": DType.UINT16,
    "tensor(uint32)": DType.UINT32,
    "tensor(uint64)": DType.UINT64,
    "tensor(uint8)": DType.UINT8,
}
"""onnxruntime's name of what an input or output holds -> the element type."""


def declared(file: ModelFile, role: str, node: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims (-1: any size) of one input or output as the file declares it. Raises LoadError."""
    if node.type not in TYPES:
        hint = "; export the model without ZipMap" if "map" in node.type else ""
        raise LoadError(f"{file_title(file)}: {role} '{node.name}' is a {node.type}, which requests cannot carry{hint}")
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape or ())
    return node.name, TYPES[node.type], dims
