"""Tensor data as JSON arrays: strict conversion from a client's list to a tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.frontends.json_number_arrays import ArrayText
from edge_server.frontends.json_text import (
    check_structure,
    format_numbers,
    json_type,
    parse_json,
    parse_numbers,
    to_json,
)
from edge_server.protocol.raw_tensors import element_count

if TYPE_CHECKING:
    import numpy.typing as npt

FLOATS = (DType.FP32, DType.FP64)
LARGEST_FP32 = (2.0 - 2.0**-23) * 2.0**127
MAX_ONE_THREAD_LENGTH = 4096
"""Length up to which numpy's dot product starts no other threads."""
_WITHOUT_JSON = (DType.FP16, DType.BF16)


class OtherElementCount(InvalidRequest):
    """The data has more or fewer elements than the shape."""


def tensor_from_json(name: str, dtype: DType, shape: Sequence[int], data: object, *, model: str) -> Tensor:
    """Return the tensor of a `data` member: row-major, flat or nested in any way.

    Integers must be JSON integers within the range of the type, BOOL true or false, BYTES strings (kept as UTF-8); FP32
    and FP64 accept any number, including NaN and infinities. Raises InvalidRequest.
    """
    if dtype in _WITHOUT_JSON:
        raise InvalidRequest(
            f"receiving {dtype.value} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    count = element_count(name, shape, model=model)
    if isinstance(data, ArrayText):
        return Tensor(name, dtype, _array_from_text(name, dtype, count, data, model).reshape(tuple(shape)))
    flat, _ = _flatten(name, data, model)
    if len(flat) != count:
        raise _other_count(name, count, len(flat), model)
    _check_types(name, dtype, flat, model)
    return Tensor(name, dtype, array_from_list(name, dtype, flat, model).reshape(tuple(shape)))


def json_from_tensor(tensor: Tensor) -> list[object]:
    """Return the elements, flat and row-major. Raises InvalidRequest for FP16, BF16, and BYTES that are not UTF-8."""
    if tensor.dtype in _WITHOUT_JSON:
        raise InvalidRequest(
            f"sending {tensor.dtype.value} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    elements: list[Any] = tensor.array.reshape(-1).tolist()
    if tensor.dtype is not DType.BYTES:
        return elements
    try:
        return [element.decode("utf-8") for element in elements]
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output '{tensor.name}' holds bytes that are not UTF-8 and cannot be sent via JSON. "
            f"Please use the binary data format for output {tensor.name}"
        ) from None


def json_text_from_tensor(tensor: Tensor) -> str:
    """Return the elements as JSON text. Raises as `json_from_tensor` does."""
    elements = json_from_tensor(tensor)
    if tensor.dtype in (DType.BOOL, DType.BYTES):
        return to_json(elements).decode("ascii")
    text = format_numbers(elements)
    return to_json(elements).decode("ascii") if "n" in text else text


def _array_from_text(name: str, dtype: DType, count: int, data: ArrayText, model: str) -> npt.NDArray[np.generic]:
    """Return the `count` elements of a large array, parsed in pieces to save memory."""
    most, is_exact = data.count()
    if count > most or (is_exact and count != most):
        raise _other_count(name, count, most, model)
    array: npt.NDArray[np.generic] = np.empty(count, dtype.numpy)
    filled, depth = 0, -1
    for piece in data.pieces():
        check_structure(piece)
        try:
            flat, levels = _flatten(name, parse_numbers(piece), model)
        except ValueError:
            flat, levels = _flatten(name, parse_json(piece), model)
        if dtype not in FLOATS and float in set(map(type, flat)):
            # It may be an integer of more than 64 bits: json keeps it, for the right error message.
            flat, levels = _flatten(name, parse_json(piece), model)
        if depth not in (-1, levels):
            raise _mixed(name, model)
        depth = levels
        _check_types(name, dtype, flat, model)
        if filled + len(flat) > count:
            raise _other_count(name, count, most, model)
        array[filled : filled + len(flat)] = array_from_list(name, dtype, flat, model)
        filled += len(flat)
    if filled != count:
        raise _other_count(name, count, filled, model)
    return array


def _other_count(name: str, count: int, found: int, model: str) -> OtherElementCount:
    return OtherElementCount(
        f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' for model "
        f"'{model}' expected {count} elements, got {found}"
    )


def _mixed(name: str, model: str) -> InvalidRequest:
    return InvalidRequest(f"'data' of input '{name}' for model '{model}' mixes arrays and elements")


def _flatten(name: str, data: object, model: str) -> tuple[list[object], int]:
    """Return the elements as a flat list, and the depth of nesting."""
    if not isinstance(data, list):
        raise InvalidRequest(f"'data' of input '{name}' for model '{model}' must be an array, got {json_type(data)}")
    level: list[object] = data
    depth = 1
    # One loop per level of nesting; the parser limits the levels.
    while level and isinstance(level[0], list):
        if set(map(type, level)) != {list}:
            raise _mixed(name, model)
        level = list(chain.from_iterable(level))  # type: ignore[arg-type]
        depth += 1
    return level, depth


def _check_types(name: str, dtype: DType, flat: list[object], model: str) -> None:
    # Exact types, because bool is a subclass of int. `set` and `map` run in C: tensors of a million numbers are common.
    wrong = set(map(type, flat)) - _ALLOWED.get(dtype, {int})
    if wrong:
        found = json_type(next(element for element in flat if type(element) in wrong))
        raise InvalidRequest(
            f"'data' of input '{name}' for model '{model}' must be {_EXPECTED.get(dtype, 'integers')} "
            f"for {dtype.value}, got {found}"
        )


_ALLOWED: dict[DType, set[type]] = {
    DType.BOOL: {bool},
    DType.BYTES: {str},
    DType.FP32: {int, float},
    DType.FP64: {int, float},
}
_EXPECTED = {DType.BOOL: "true or false", DType.BYTES: "strings", DType.FP32: "numbers", DType.FP64: "numbers"}


def array_from_list(name: str, dtype: DType, flat: list[object], model: str) -> npt.NDArray[np.generic]:
    """Return elements of the right types as an array. Raises InvalidRequest for a number out of range."""
    if dtype is DType.BYTES:
        array = np.empty(len(flat), dtype=object)
        array[:] = [str(element).encode("utf-8") for element in flat]
        return array
    if dtype in FLOATS:
        return _float_array(name, dtype, flat, model)
    if dtype is not DType.BOOL and flat:
        lowest, highest = integer_range(dtype)
        if min(flat) < lowest or max(flat) > highest:  # type: ignore[type-var, operator]
            raise _out_of_range(name, dtype, model)
    return np.array(flat, dtype=dtype.numpy)


def integer_range(dtype: DType) -> tuple[int, int]:
    """Return the lowest and the highest value of an integer type."""
    bits = 8 * dtype.itemsize
    return (0, 2**bits - 1) if dtype.numpy.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _float_array(name: str, dtype: DType, flat: list[object], model: str) -> npt.NDArray[np.generic]:
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError:
        raise _out_of_range(name, dtype, model) from None
    if dtype is DType.FP64:
        return wide
    # If the sum of squares is in range, each number is. The comparison fails for infinities and NaN.
    if len(flat) <= MAX_ONE_THREAD_LENGTH and wide.dot(wide) < LARGEST_FP32**2:
        return wide.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    # An infinity is valid, but a finite number must not become one.
    if np.isinf(narrow).any() and not np.array_equal(np.isinf(narrow), np.isinf(wide)):
        raise _out_of_range(name, dtype, model)
    return narrow


def _out_of_range(name: str, dtype: DType, model: str) -> InvalidRequest:
    return InvalidRequest(f"'data' of input '{name}' for model '{model}' has a number out of range for {dtype.value}")
