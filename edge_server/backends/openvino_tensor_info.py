"""Names, types and dims of an OpenVINO graph's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_server.backends.base import ModelFile
from edge_server.backends.runtime_library import file_title
from edge_server.core.tensor import DType
from edge_server.errors import LoadError

_TYPES = {
    "bf16": DType.BF16,
    "boolean": DType.BOOL,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "f64": DType.FP64,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "i8": DType.INT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "u8": DType.UINT8,
}
"""OpenVINO's element types. Its string tensors are left out: their memory is freed twice through the Python binding."""


def declared(file: ModelFile, role: str, port: Any) -> tuple[str, DType, tuple[int, ...]]:
    """Return name, type and dims (-1: any size) of one input or output as the file declares it. Raises LoadError."""
    name, kind = _names(port)[0], _type_name(port)
    if kind not in _TYPES:
        raise LoadError(f"{file_title(file)}: {role} '{name}' is of type {kind}, which this backend cannot carry")
    if port.get_partial_shape().rank.is_dynamic:
        raise LoadError(f"{file_title(file)}: {role} '{name}' has no fixed number of dimensions")
    return name, _TYPES[kind], dims(port)


def positions(ports: Sequence[Any]) -> dict[str, int]:
    """Return where each input or output stands, under all of its names."""
    return {name: index for index, port in enumerate(ports) for name in _names(port)}


def bf16_names(ports: Sequence[Any]) -> frozenset[str]:
    """Return all names of those whose elements numpy lacks, and which travel as bit patterns."""
    return frozenset(name for port in ports if _type_name(port) == "bf16" for name in _names(port))


def dims(port: Any) -> tuple[int, ...]:
    """Return the dims of one whose number of them is fixed, -1 for any size."""
    return tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())


def _type_name(port: Any) -> str:
    return str(port.get_element_type().get_type_name())


def _names(port: Any) -> list[str]:
    """Return all names of an input or output, the one for clients first; those without get their layer's name."""
    names = sorted(port.get_names())
    if names:
        return names
    node = port.get_node()
    if node.get_type_name() == "Result":
        node = node.input_value(0).get_node()
    return [str(node.get_friendly_name())]
