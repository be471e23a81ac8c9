"""ctypes declarations of the structs in edge_backend.h, and the encoding of string tensors. Used by `c_library`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from edge_server.backends.base import Array

ABI_VERSION = 1
"""EDGE_BACKEND_ABI_VERSION of the header."""

_LENGTH_BYTES = 4


class CText(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("capacity", ctypes.c_size_t))


class OpenArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("model_name", ctypes.c_char_p),
        ("version", ctypes.c_int64),
        ("version_dir", ctypes.c_char_p),
        ("instance_name", ctypes.c_char_p),
        ("device_id", ctypes.c_int32),
        ("parameter_count", ctypes.c_uint32),
        ("parameter_keys", ctypes.POINTER(ctypes.c_char_p)),
        ("parameter_values", ctypes.POINTER(ctypes.c_char_p)),
    )


class Spec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("datatype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class CTensor(ctypes.Structure):
    _fields_ = (*Spec._fields_, ("data", ctypes.c_void_p), ("byte_size", ctypes.c_uint64))


Allocate = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64),
    ctypes.c_uint64,
)  # fmt: skip


class RunArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("input_count", ctypes.c_uint32),
        ("inputs", ctypes.POINTER(CTensor)),
        ("output_count", ctypes.c_uint32),
        ("output_names", ctypes.POINTER(ctypes.c_char_p)),
        ("allocate", Allocate),
        ("context", ctypes.c_void_p),
    )


def c_strings(texts: Iterable[str]) -> Any:
    """Return an array of char*, with at least one element."""
    found = [text.encode() for text in texts]
    return (ctypes.c_char_p * max(1, len(found)))(*found)


def pack_strings(array: Array) -> Array:
    """Return the elements as bytes, each with its length in front."""
    values: list[Any] = array.reshape(-1).tolist()
    parts = [bytes(value) for value in values]
    return np.frombuffer(b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts), np.uint8)


def unpack_strings(name: str, memory: Array, shape: tuple[int, ...]) -> Array:
    """Return the strings that follow their lengths. Raises ValueError if their number does not match the shape."""
    content = memory.tobytes()
    count = math.prod(shape)
    # The library chose the count, so it is checked before memory for it is allocated.
    found = np.empty(count if count * _LENGTH_BYTES <= len(content) else 0, dtype=object)
    position = 0
    for place in range(len(found)):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(content[start - _LENGTH_BYTES : start], "little")
        if position > len(content):
            break
        found[place] = content[start:position]
    else:
        if position == len(content) and len(found) == count:
            return found.reshape(shape)
    raise ValueError(f"the {len(content)} bytes of output '{name}' are not the {count} strings of its dims")
