"""Conversion of typed tensor contents (InferTensorContents, packed protobuf fields) to arrays, without a Python loop.

protobuf writes the numbers of a repeated field as one packed payload: floats as IEEE values, integers as varints. So
the payload of floating-point contents is the tensor itself, and only varints need decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol.messages import message_class
from edge_server.protocol.raw_fields import split
from edge_server.protocol.raw_tensors import byte_size_mismatch, element_count, tensor_from_raw

if TYPE_CHECKING:
    import numpy.typing as npt

FIELDS: dict[DType, int] = {
    DType.BOOL: 1,
    DType.INT8: 2,
    DType.INT16: 2,
    DType.INT32: 2,
    DType.INT64: 3,
    DType.UINT8: 4,
    DType.UINT16: 4,
    DType.UINT32: 4,
    DType.UINT64: 5,
    DType.FP32: 6,
    DType.FP64: 7,
    DType.BYTES: 8,
}
"""Field number in InferTensorContents for each data type. FP16 and BF16 have none: they are sent as raw contents."""

_CHUNK_BYTES = 1 << 20
_MAX_VARINT_BYTES = 10


def tensor_from_contents(
    name: str, dtype: DType, shape: Sequence[int], contents: bytes | memoryview, *, model: str
) -> Tensor:
    """Return the tensor of a serialized InferTensorContents; floating-point tensors are views of it.

    Raises InvalidRequest if the contents are malformed, are not of `dtype`, or do not match the shape.
    """
    if dtype not in FIELDS:
        raise InvalidRequest(
            f"receiving {dtype.value} data as typed contents is not supported. Please use raw_input_contents for input "
            f"'{name}' for model '{model}'"
        )
    count = element_count(name, shape, model=model)
    payloads = _payloads(contents, FIELDS[dtype])
    if dtype is DType.BYTES:
        return Tensor(name, dtype, _strings(name, count, payloads, model).reshape(tuple(shape)))
    payload = payloads[0] if payloads else memoryview(b"")
    if dtype in (DType.FP32, DType.FP64):
        return tensor_from_raw(name, dtype, shape, payload, model=model)
    octets = np.frombuffer(payload, np.uint8)
    given = int(np.count_nonzero(octets < 0x80))
    if given != count:
        raise byte_size_mismatch(name, model, count * dtype.itemsize, given * dtype.itemsize)
    return Tensor(name, dtype, _numbers(name, dtype, octets, count, model).reshape(tuple(shape)))


def _payloads(contents: bytes | memoryview, field: int) -> list[memoryview]:
    """Return the payloads of one field: one packed payload for numbers, or one per element of bytes_contents."""
    found = split(contents, field)
    if found is None or len(found.rest) or (len(found.payloads) > 1 and field != FIELDS[DType.BYTES]):
        # Unpacked numbers, several packed payloads, other fields or damage: the message class parses them all, and
        # serializes the numbers as one packed payload.
        found = split(_normalised(contents), field)
    return found.payloads if found is not None else []


def _normalised(contents: bytes | memoryview) -> bytes:
    try:
        message = message_class("inference.InferTensorContents").FromString(bytes(contents))
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("contents of an input tensor are not a valid InferTensorContents message") from error
    serialized: bytes = message.SerializeToString()
    return serialized


def _strings(name: str, count: int, payloads: list[memoryview], model: str) -> npt.NDArray[np.object_]:
    if len(payloads) != count:
        raise InvalidRequest(
            f"expected {count} string elements for inference input '{name}' for model '{model}', got {len(payloads)}"
        )
    array = np.empty(count, dtype=object)
    array[:] = [bytes(payload) for payload in payloads]
    return array


def _numbers(name: str, dtype: DType, octets: npt.NDArray[np.uint8], count: int, model: str) -> npt.NDArray[np.generic]:
    """Decode the `count` varints in `octets`, in chunks so that temporaries stay small."""
    if len(octets) and octets[-1] >= 0x80:
        raise InvalidRequest(f"typed contents of input '{name}' for model '{model}' end within a number")
    result = np.empty(count, dtype.numpy)
    if len(octets) == count:
        # Every number is one octet, 0 to 127, and fits every type.
        result[:] = octets
        return result
    start = done = 0
    while start < len(octets):
        stop = _chunk_end(octets, start)
        values = decode_varints(octets[start:stop])
        if values is None:
            raise InvalidRequest(f"typed contents of input '{name}' for model '{model}' hold a malformed number")
        result[done : done + len(values)] = _fit(name, dtype, values, model)
        start, done = stop, done + len(values)
    return result


def _chunk_end(octets: npt.NDArray[np.uint8], start: int) -> int:
    """Return the end of the chunk that begins at `start`: after a complete number."""
    stop = min(start + _CHUNK_BYTES, len(octets))
    while octets[stop - 1] >= 0x80:
        stop += 1
    return stop


def decode_varints(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64] | None:
    """Return the numbers in `octets`, or None if one exceeds 64 bits. `octets` must end with a complete number."""
    ends = np.flatnonzero(octets < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    longest = int(sizes.max(initial=0))
    if longest > _MAX_VARINT_BYTES:
        return None
    values = (octets[starts] & 0x7F).astype(np.uint64)
    for index in range(1, longest):
        longer = np.flatnonzero(sizes > index)
        part = octets[starts[longer] + index]
        if index == _MAX_VARINT_BYTES - 1 and part.max(initial=0) > 1:
            return None
        values[longer] |= (part & 0x7F).astype(np.uint64) << np.uint64(7 * index)
    return values


def _fit(name: str, dtype: DType, values: npt.NDArray[np.uint64], model: str) -> npt.NDArray[np.generic]:
    """Convert 64-bit patterns to the type: first to int32 or uint32, as protobuf does, then to the type itself.

    Raises InvalidRequest if a number does not fit into the type.
    """
    if dtype is DType.BOOL:
        return np.not_equal(values, 0)
    if dtype in (DType.INT64, DType.UINT64):
        return values.view(dtype.numpy)
    wide = values.astype(np.uint32).view(np.int32 if FIELDS[dtype] == FIELDS[DType.INT32] else np.uint32)
    narrow = wide.astype(dtype.numpy)
    if not np.array_equal(narrow, wide):
        raise InvalidRequest(
            f"typed contents of input '{name}' for model '{model}' hold numbers that do not fit into {dtype.value}"
        )
    return narrow
