"""Module `triton_python_backend_utils` (pb_utils), which Python models import, with Triton's names and meanings."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.tensor import BY_CONFIG_NAME, DType
from edge_server.plugins.python_models.auto_complete_config import ModelConfig
from edge_server.plugins.python_models.bls_calls import ResponseIterator, is_model_ready, load_model, unload_model
from edge_server.plugins.python_models.error_translation import TritonError, TritonErrorCode, TritonModelException
from edge_server.plugins.python_models.metrics import Metric, MetricFamily
from edge_server.plugins.python_models.metrics import PbMetricKind as MetricKind
from edge_server.plugins.python_models.model_context import Logger, LogLevel, get_model_dir
from edge_server.plugins.python_models.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
)
from edge_server.plugins.python_models.response import COMPLETE_FINAL, InferenceResponse, ResponseSender
from edge_server.plugins.python_models.tensor import PbTensor as Tensor

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonErrorCode",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL = COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = PreferredMemory.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = PreferredMemory.TRITONSERVER_MEMORY_GPU

_NUMPY_TYPES: dict[DType, type] = {DType.BOOL: bool, DType.BYTES: np.object_}

TRITON_STRING_TO_NUMPY: dict[str, type] = {
    name: _NUMPY_TYPES.get(dtype, dtype.numpy.type) for name, dtype in BY_CONFIG_NAME.items() if dtype is not DType.BF16
}
"""Type name in config.pbtxt -> numpy type. Without BF16, which numpy lacks."""

_LENGTH = struct.Struct("<I")


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Return the numpy type of a name such as "TYPE_FP32". Raises KeyError for a name without one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Return the numpy type of a TRITONSERVER_DataType number, None if it has none."""
    for dtype in DType:
        if dtype.number == data_type and dtype is not DType.BF16:
            return np.bool_ if dtype is DType.BOOL else dtype.numpy.type
    return None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the TRITONSERVER_DataType number of a numpy type, None if it has none."""
    try:
        return DType.from_numpy(data_type).number
    except KeyError:
        return None


def serialize_byte_tensor(input_tensor: Array) -> bytes:
    """Return the strings of an array as bytes: each with its length in front as 4 little-endian bytes.

    Raises TritonModelException for an array of numbers.
    """
    if input_tensor.dtype.kind not in "OSTU":
        raise TritonModelException(f"strings can be serialized, not elements of type {input_tensor.dtype}")
    parts: list[bytes] = []
    for item in input_tensor.reshape(-1).tolist():
        data = item if isinstance(item, bytes) else str(item).encode()
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the strings that `serialize_byte_tensor` wrote, as a one-dimensional object array of bytes.

    Raises TritonModelException when the last string is cut off.
    """
    data = bytes(encoded_tensor)
    found: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + _LENGTH.size
        length = _LENGTH.unpack_from(data, position)[0] if start <= len(data) else len(data)
        position = start + length
        if position > len(data):
            raise TritonModelException(f"serialized strings are cut off: {position} bytes needed, {len(data)} given")
        found.append(data[start:position])
    array = np.empty(len(found), dtype=object)
    array[:] = found
    return array


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of the input with that name, None if there is none."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the configuration of the output with that name, None if there is none."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the model is decoupled: it sends any number of responses per request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(items: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((item for item in items if item.get("name") == name), None)
