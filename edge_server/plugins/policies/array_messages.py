"""MessagePack messages with arrays, in the forms of openpi's and GR00T's clients: reads them within limits, and writes
them.

An array of openpi is a map {b"__ndarray__": true, b"data": bytes, b"dtype": str, b"shape": [...]}, a number of numpy
{b"__npgeneric__": true, b"data": number, b"dtype": str} (openpi-client 0.1.2, msgpack_numpy.py). GR00T has two forms:
{"__ndarray_class__": true, "as_npy": a file of numpy.save}, and that of the package msgpack-numpy 0.4.8: {b"nd": true,
b"type": str, b"kind": b"", b"shape": [...], b"data": bytes}, a number {b"nd": false, b"type": str, b"data": bytes}.
Only the types b, i, u and f are read: nothing is unpickled.
"""

from __future__ import annotations

import functools
import io
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.policies.connections.message_memory import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_VALUES = 200_000
"""Maximum number of values in all lists and maps of a message: each takes 8 bytes and more here, and one in it."""

_EMPTY_BYTES = sys.getsizeof(b"")

_MAX_LIST = 65_536
_MAX_TEXT_BYTES = 1 << 20
_MAX_NAME_BYTES = 4096
_MAX_RANK = 8
_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|[\x02\x03]\x00....)"
    rb"\{'descr': '(?P<dtype>[^']{2,4})', 'fortran_order': (?P<order>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,12}(?:, ?\d{1,12}){0,8},?)?)\),? ?\} *\n",
    re.DOTALL,
)
"""Head of a file of numpy.save (numpy's documentation of its module numpy.lib.format, versions 1 to 3)."""
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


def read_message(data: bytes | memoryview, charge: Callable[[int], None] | None = None) -> dict[Any, Any]:
    """Return the map that a message is. Arrays are read-only.

    `charge(nbytes)` is told the memory of its values, and as much for what is made of them, while they are made. The
    content of byte strings and arrays is not counted: it is a part of the message. Raises InvalidRequest, and what
    `charge` raises.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, given {len(data)}")
    left = MAX_VALUES

    def count(values: Any, keys: Any = ()) -> Any:
        nonlocal left
        left -= len(values)
        if left < 0:
            raise InvalidRequest(f"the message has more than {MAX_VALUES} values in lists and maps")
        if charge is not None:
            own = (_EMPTY_BYTES if type(item) is bytes else sys.getsizeof(item) for item in (*keys, *values))
            charge(2 * sum(own))  # an input of a model may be made of each
        return values

    def read_map(found: dict[Any, Any]) -> Any:
        count(found.values(), found.keys())
        if b"__ndarray__" in found:
            return read_array(found)
        if b"__npgeneric__" in found:
            return _read_number(found)
        if "__ndarray_class__" in found:
            return _read_npy(found.get("as_npy"))
        if b"nd" in found:
            shape = found.get(b"shape") if found[b"nd"] else []
            array = make_array(found.get(b"data"), read_dtype(found.get(b"type")), shape)
            return array if found[b"nd"] else array[()]
        return found

    try:
        message = msgpack.unpackb(
            data,
            object_hook=read_map,
            list_hook=count,
            strict_map_key=True,
            max_array_len=_MAX_LIST,
            max_map_len=_MAX_LIST,
            max_str_len=_MAX_TEXT_BYTES,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise _no_message(error) from None
    if not isinstance(message, dict):
        raise InvalidRequest(f"expected a map in MessagePack, given a value of type {type(message).__name__}")
    if charge is not None:
        charge(sys.getsizeof(message))
    return message


def find_text(data: memoryview, name: str) -> str | None:
    """Return the text that a message has under a name, or None. All its other values are passed over, and none is made.

    The message is copied once. Raises InvalidRequest for bytes that are no message.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES, max_str_len=_MAX_NAME_BYTES)
    found = None
    try:
        unpacker.feed(data)
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack() if _is_text(data[unpacker.tell()]) else unpacker.skip()
            if key == name and _is_text(data[unpacker.tell()]):
                found = unpacker.unpack()
            else:
                unpacker.skip()
    except (ValueError, IndexError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise _no_message(error) from None
    return found


def _is_text(kind: int) -> bool:
    """Return whether a value with this first byte is a text (MessagePack's specification, fixstr and str 8 to 32)."""
    return 0xA0 <= kind <= 0xBF or 0xD9 <= kind <= 0xDB


def _no_message(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"expected a message in MessagePack: {str(error)[:200] or type(error).__name__}")


def read_array(found: Mapping[bytes, Any]) -> npt.NDArray[np.generic]:
    """Return the array that a map describes. Raises InvalidRequest."""
    return make_array(found.get(b"data"), read_dtype(found.get(b"dtype")), found.get(b"shape"))


def _read_npy(file: object) -> npt.NDArray[np.generic]:
    """Return the array of a file of numpy.save. Its header is read here, because numpy's reader runs it as Python."""
    found = _NPY.match(file) if isinstance(file, bytes) else None
    if found is None:
        raise InvalidRequest(
            "expected an array of numbers as a file of numpy.save; texts are sent as strings, not arrays"
        )
    assert isinstance(file, bytes)
    shape = [int(length) for length in found["shape"].replace(b" ", b"").split(b",") if length]
    is_fortran = found["order"] == b"True"
    content = memoryview(file)[found.end() :]
    array = make_array(content, read_dtype(found["dtype"]), shape[::-1] if is_fortran else shape)
    return array.transpose() if is_fortran else array


def make_array(data: object, dtype: np.dtype[np.generic], shape: object) -> npt.NDArray[np.generic]:
    lengths = shape if isinstance(shape, (list, tuple)) else [-1]
    if len(lengths) > _MAX_RANK or not all(type(length) is int and length >= 0 for length in lengths):
        raise InvalidRequest(f"expected the shape of an array, at most {_MAX_RANK} numbers, given {str(shape)[:60]}")
    size = math.prod(lengths) * dtype.itemsize
    given_bytes = len(data) if isinstance(data, (bytes, memoryview)) else -1
    if not isinstance(data, (bytes, memoryview)) or given_bytes != size:
        given = f"{given_bytes} bytes" if given_bytes >= 0 else f"a value of type {type(data).__name__}"
        raise InvalidRequest(f"expected {size} bytes for an array {list(lengths)} of {dtype.name}, given {given}")
    array = np.frombuffer(data, dtype).reshape(lengths)
    return array if dtype.isnative and array.flags.aligned else array.astype(dtype.newbyteorder("="))


def _read_number(found: Mapping[bytes, Any]) -> np.generic:
    dtype, value = read_dtype(found.get(b"dtype")), found.get(b"data")
    if isinstance(value, (bool, int, float)):
        try:
            number: np.generic = dtype.type(value)
        except (OverflowError, ValueError):
            pass
        else:
            return number
    raise InvalidRequest(f"expected a number that {dtype.name} holds, given {str(value)[:60]}")


def read_dtype(text: object) -> np.dtype[np.generic]:
    text = text.decode("ascii", "replace") if isinstance(text, bytes) else text
    if not isinstance(text, str) or _DTYPE.fullmatch(text) is None:
        raise InvalidRequest(
            f"expected the type of numbers, as '<f4' or '|u1', given {str(text)[:60]!r}; "
            "texts are sent as strings, not arrays"
        )
    return np.dtype(text)


def _pack_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"cannot write a value of type {type(value).__name__}")


write_message = functools.partial(msgpack.packb, default=_pack_array)
"""Return the message of a map of texts, numbers, lists, maps and arrays, as openpi's client reads it."""


def _pack_groot_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        both: dict[object, object] = {
            "__ndarray_class__": True, "as_npy": file.getvalue(),
            b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes(),
        }  # fmt: skip
        return both
    raise TypeError(f"cannot write a value of type {type(value).__name__}")


write_groot_message = functools.partial(msgpack.packb, default=_pack_groot_array)
"""Return the message of a map or list of texts, numbers, lists, maps and arrays, as GR00T's clients read it: each array
has both forms, as no form is known to all versions."""
