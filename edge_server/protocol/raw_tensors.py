"""Conversion between tensors and raw bytes, as HTTP bodies, gRPC messages and shared memory carry them (Triton's binary
format).

Format: Triton's binary tensor data extension, also used by gRPC's raw contents and by shared-memory regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_RANK = 32
"""Most dimensions of a tensor: numpy's limit before version 2, and far more than any runtime accepts."""

# numpy counts bytes in 63 bits. The largest elements here, and pointers to BYTES, have eight bytes.
_MAX_ELEMENTS = (2**63 - 1) // 8
_PREFIX_BYTES = 4


def element_count(name: str, shape: Sequence[int], *, model: str) -> int:
    """Return the number of elements of a client's `shape`. Raises InvalidRequest on an impossible shape."""
    if len(shape) > MAX_RANK:
        raise InvalidRequest(
            f"input '{name}' for model '{model}' has {len(shape)} dimensions, at most {MAX_RANK} allowed"
        )
    count = 1
    for dim in shape:
        if dim < 0:
            raise InvalidRequest(
                f"shape of input '{name}' for model '{model}' must not be negative, got {_text(shape)}"
            )
        # A zero makes the tensor empty, but numpy cannot address the other dimensions if they are too large.
        count *= dim or 1
        if count > _MAX_ELEMENTS:
            raise InvalidRequest(
                f"shape of input '{name}' for model '{model}' has too many elements, got {_text(shape)}"
            )
    return 0 if 0 in shape else count


def tensor_from_raw(name: str, dtype: DType, shape: Sequence[int], data: Buffer, *, model: str) -> Tensor:
    """Return a tensor over `data`: a read-only view if possible, else a copy.

    BYTES elements are copied, and so are numbers at an address that is not a multiple of their size. Raises
    InvalidRequest when shape and byte count do not match, before memory of the tensor's size is allocated.
    """
    count = element_count(name, shape, model=model)
    if dtype is DType.BYTES:
        return Tensor(name, dtype, _parse_strings(name, count, data, model).reshape(tuple(shape)))
    given = data.nbytes if isinstance(data, memoryview) else len(data)
    if given != count * dtype.itemsize:
        raise byte_size_mismatch(name, model, count * dtype.itemsize, given)
    return Tensor(name, dtype, _view_numbers(dtype, count, data).reshape(tuple(shape)))


def byte_size_mismatch(name: str, model: str, expected: int, given: int) -> InvalidRequest:
    return InvalidRequest(
        f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {given}"
    )


def _view_numbers(dtype: DType, count: int, data: Buffer) -> npt.NDArray[np.generic]:
    if count == 0:
        return np.empty(0, dtype.numpy)
    if dtype is DType.BOOL:
        octets = np.frombuffer(data, np.uint8)
        # C clients send any non-zero byte for true. numpy's bool has no defined meaning for bytes above 1.
        return octets.view(np.bool_) if octets.max() <= 1 else octets != 0
    array = np.frombuffer(data, dtype.numpy)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _parse_strings(name: str, count: int, data: Buffer, model: str) -> npt.NDArray[np.generic]:
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if count * _PREFIX_BYTES > size:
        raise _wrong_string_count(name, model, count, f"at most {size // _PREFIX_BYTES}")
    array = np.empty(count, dtype=object)
    # One copy of the whole makes each slice below a single step. A single element (an image) is copied only once.
    whole = memoryview(data) if count == 1 else bytes(data)
    array[:] = _split_strings(name, count, whole, size, model)
    return array


def _split_strings(name: str, count: int, data: bytes | memoryview, size: int, model: str) -> list[bytes]:
    elements: list[bytes] = []
    start = 0
    for _ in range(count):
        body = start + _PREFIX_BYTES
        if body > size:
            if start == size:
                raise _wrong_string_count(name, model, count, str(len(elements)))
            raise InvalidRequest(
                f"incomplete string length indicator for inference input '{name}' for model '{model}', "
                f"expecting {_PREFIX_BYTES} bytes but only {size - start} bytes available"
            )
        length = int.from_bytes(data[start:body], "little")
        start = body + length
        if start > size:
            raise InvalidRequest(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {length} but only {size - body} bytes available"
            )
        elements.append(bytes(data[body:start]))
    if start != size:
        raise _wrong_string_count(name, model, count, f"{size - start} bytes more")
    return elements


def _wrong_string_count(name: str, model: str, expected: int, given: str) -> InvalidRequest:
    return InvalidRequest(
        f"expected {expected} string elements for inference input '{name}' for model '{model}', got {given}"
    )


def _text(shape: Sequence[int]) -> str:
    """Return the shape in Triton's format. Dimensions of 2**64 and more, which may have any length, become "..."."""
    return "[" + ",".join(str(dim) if -(2**64) < dim < 2**64 else "..." for dim in shape) + "]"


def raw_from_tensor(tensor: Tensor) -> bytes | memoryview:
    """Return the wire bytes. For contiguous numbers it is a view, valid as long as the tensor's array."""
    if tensor.dtype is DType.BYTES:
        parts: list[bytes] = []
        for element in tensor.array.reshape(-1).tolist():
            parts.append(len(element).to_bytes(_PREFIX_BYTES, "little"))
            parts.append(element)
        return b"".join(parts)
    if tensor.array.size == 0:
        return b""
    return np.ascontiguousarray(tensor.array).data.cast("B")


def raw_size(tensor: Tensor) -> int:
    """Return the number of bytes that `raw_from_tensor` returns, without making them."""
    if tensor.dtype is not DType.BYTES:
        return math.prod(tensor.shape) * tensor.dtype.itemsize
    return sum(_PREFIX_BYTES + len(element) for element in tensor.array.reshape(-1).tolist())
