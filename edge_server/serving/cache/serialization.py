"""Encoder and decoder of cached responses as bytes, for external stores. Bytes that come back are checked.

    "EDGEANS1" | BLAKE2b-128 of all that follows | length of the head (4) | head, JSON | the tensors' bytes

The head is {"parameters": {...}, "outputs": [{"name", "datatype", "shape", "bytes"}, ...]}. Numbers are little-endian;
an element of BYTES is its length (4) and its bytes, as in KServe's binary extension.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np

from edge_server.core.request_response import Parameter, Response
from edge_server.core.tensor import BY_NAME, DType, Tensor, split_strings
from edge_server.serving.cache.cached_response import Array, CachedResponse, CorruptEntry, size_of

_MAGIC = b"EDGEANS1"
_SUM_BYTES = 16
_LENGTH = struct.Struct("<I")
_BODY_AT = len(_MAGIC) + _SUM_BYTES


def pack(answer: CachedResponse) -> bytes:
    """Return the answer as bytes that `unpack` reads."""
    parts = [_packed(item) for item in answer.outputs]
    head = {
        "parameters": dict(answer.parameters),
        "outputs": [
            {"name": item.name, "datatype": item.dtype.value, "shape": item.array.shape, "bytes": len(part)}
            for item, part in zip(answer.outputs, parts, strict=True)
        ],
    }
    text = json.dumps(head).encode("ascii")
    body = b"".join([_LENGTH.pack(len(text)), text, *parts])
    return b"".join([_MAGIC, _sum(body), body])


def unpack(data: bytes) -> CachedResponse:
    """Return the packed response. Raises CorruptEntry for anything else."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise CorruptEntry("it does not begin as an answer does")
    body = memoryview(data)[_BODY_AT:]
    if len(body) < _LENGTH.size or _sum(body) != data[len(_MAGIC) : _BODY_AT]:
        raise CorruptEntry("its checksum is wrong")
    (length,) = _LENGTH.unpack_from(body)
    if length > len(body) - _LENGTH.size:
        raise CorruptEntry("its head is cut off")
    try:
        head = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
        outputs = tuple(_unpacked_all(head["outputs"], body[_LENGTH.size + length :]))
        parameters = _checked_parameters(head["parameters"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptEntry(f"{type(error).__name__}: {error}") from error
    return CachedResponse(outputs, parameters, size_of(Response("", 0, "", outputs, parameters)))


def _sum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_SUM_BYTES).digest()


def _packed(tensor: Tensor) -> bytes:
    if tensor.dtype is DType.BYTES:
        return b"".join(
            [part for item in tensor.array.reshape(-1).tolist() for part in (_LENGTH.pack(len(item)), item)]
        )
    return tensor.array.tobytes()


def _unpacked_all(items: list[dict[str, Any]], rest: memoryview) -> list[Tensor]:
    tensors = []
    for item in items:
        name, shape, count = item["name"], item["shape"], item["bytes"]
        numbers = [count, *shape]
        if not isinstance(name, str) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a tensor's name, shape or length is none")
        if count > len(rest):
            raise ValueError(f"output '{name}' is cut off")
        tensors.append(_unpacked(name, BY_NAME[item["datatype"]], shape, rest[:count]))
        rest = rest[count:]
    if len(rest):
        raise ValueError("there is more than its head says")
    return tensors


def _unpacked(name: str, dtype: DType, shape: list[int], data: memoryview) -> Tensor:
    array: Array
    if dtype is DType.BYTES:
        if math.prod(shape) > len(data) // _LENGTH.size:
            raise ValueError(f"output '{name}' of shape {shape} is cut off")
        elements = list(split_strings(data))
        if len(elements) != math.prod(shape):
            raise ValueError(f"output '{name}' has {len(elements)} elements, its shape is {shape}")
        array = np.empty(shape, object)
        array.reshape(-1)[:] = elements
    else:
        # A copy: views of the received bytes would keep all of them in memory, at unaligned addresses.
        array = np.frombuffer(data, dtype.numpy).reshape(shape).copy()
        if dtype is DType.BOOL and array.size and array.view(np.uint8).max() > 1:
            raise ValueError(f"output '{name}' holds what is no BOOL")
    array.flags.writeable = False
    return Tensor(name, dtype, array)


def _checked_parameters(given: Any) -> dict[str, Parameter]:
    if not isinstance(given, dict):
        raise ValueError("the parameters are none")
    for name, value in given.items():
        if not isinstance(value, str | int | float | bool):
            raise ValueError(f"parameter '{name}' is of no known type")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError(f"parameter '{name}' does not fit into 64 bits")
    return given
