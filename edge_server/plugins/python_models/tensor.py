"""Class pb_utils.Tensor of Python models, and functions that copy values which the model may still change."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.tensor import DType
from edge_server.core.tensor import Tensor as CoreTensor
from edge_server.plugins.python_models import dlpack
from edge_server.plugins.python_models.error_translation import TritonModelException

_BFLOAT16 = "bfloat16"
"""Name of the numpy type of ml_dtypes, which JAX and others use."""

Value = TypeVar("Value", str, int, float)


def plain(value: Value) -> Value:
    """Return text or a number as an object of Python's own type.

    A subclass (an Enum with a mixed-in type, for example) may be defined by the model, and other processes cannot
    unpickle it.
    """
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, int):
        return value if type(value) in (int, bool) else int.__int__(value)
    return value if type(value) is float else float.__float__(value)


def exclusive_array(array: Array, known_references: int) -> Array:
    """Return the array if the caller has the only reference to it and to its memory; else a copy.

    Models keep output buffers, and answer with their inputs or with views of tables. A response is read later, on other
    threads. `known_references` is the number of the caller's references without local variables: pass the array as
    `exclusive_array(holder.attribute, 1)`.
    """
    is_sole = sys.getrefcount(array) - known_references <= _REFERENCES_TO_ARGUMENT
    link = array
    while is_sole and not link.flags.owndata:
        base = link.base
        if not isinstance(base, np.ndarray) or sys.getrefcount(base) > _REFERENCES_TO_BASE:
            is_sole = False
        else:
            link = base
        del base
    return array if is_sole else np.array(array, order="C")


def _measure_references() -> tuple[int, int]:
    """Return the reference counts that `owned` sees in this interpreter for an argument and for a base of its own."""

    class Holder:
        array: Array

    def count_argument(array: Array, known_references: int) -> int:
        return sys.getrefcount(array) - known_references

    holder = Holder()
    holder.array = np.zeros(1)
    of_argument = count_argument(holder.array, 1)
    view = np.zeros((2, 2))[1:]
    base = view.base
    return of_argument, sys.getrefcount(base)


_REFERENCES_TO_ARGUMENT, _REFERENCES_TO_BASE = _measure_references()


class PbTensor:
    """A named array. Models create it from any numpy array, without a copy, and receive it as input of a request.

    A model may write into the result of `as_numpy`, as under Triton. Other models and threads may share the memory of a
    request, so `as_numpy` and DLPack copy such an array the first time, unless the model sets `read_only_inputs`.
    """

    __slots__ = ("_array", "_dtype", "_is_lent", "_is_seen", "_name")

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, got {type(name).__name__}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"tensor '{name}': expected a numpy array, got {type(array).__name__}")
        self._name = plain(name)
        self._is_lent = self._is_seen = False
        if type(array) is not np.ndarray:
            # A subclass may be defined by the model, and other processes cannot unpickle it.
            array = array.view(np.ndarray)
        self._array: Array
        self._array = array
        known = _TYPES.get(array.dtype)
        if known is not None:
            self._dtype = known
        elif array.dtype.name == _BFLOAT16:
            self._dtype, self._array = DType.BF16, array.view(np.uint16)
        else:
            # Strings of fixed length, and numbers of the other byte order.
            try:
                self._dtype = DType.from_numpy(array.dtype)
            except KeyError:
                raise TritonModelException(f"tensor '{name}': no tensor type for numpy type {array.dtype}") from None

    @classmethod
    def received(cls, name: str, dtype: DType, array: Array, *, is_lent: bool) -> PbTensor:
        """Return a tensor of a request or a response. `is_lent`: its memory must not be written to."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._dtype, tensor._array, tensor._is_lent = name, dtype, array, is_lent
        tensor._is_seen = False
        return tensor

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> PbTensor:
        """Return a tensor over the memory of a DLPack capsule, or of an object that has `__dlpack__`. A tensor in GPU
        memory is copied to the host."""
        if isinstance(source, np.ndarray):
            return cls(name, source)
        array, dtype = dlpack.import_tensor(source)
        return cls.received(name, dtype, array, is_lent=not array.flags.writeable)

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        """Return the size of each dimension as a list, as in Triton: models may append to it."""
        return list(self._array.shape)

    def triton_dtype(self) -> int:
        """Return the number of TRITONSERVER_DataType."""
        return self._dtype.number

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Array:
        """Return the array; strings are an object array of bytes. Raises TritonModelException for BF16."""
        if self._dtype is DType.BF16:
            raise TritonModelException(f"tensor '{self._name}' is BF16, which numpy has not; use to_dlpack()")
        return self._owned()

    def to_dlpack(self) -> object:
        """Return a DLPack capsule over the tensor's memory."""
        return dlpack.export_tensor(self._owned(), self._dtype)

    def __dlpack__(self, *, stream: Any = None, **version: Any) -> object:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def _owned(self) -> Array:
        if self._is_lent:
            self._array = np.array(self._array, order="C")
            self._is_lent = False
        self._is_seen = True
        return self._array

    @property
    def dtype(self) -> DType:
        """The element type. Of the server, not of Triton's API."""
        return self._dtype

    def wire_array(self) -> Array:
        """Return the array in the server's form: contiguous, little-endian, strings as objects of type bytes.

        Raises ValueError for elements that are neither bytes nor text.
        """
        if self._dtype is DType.BYTES:
            return _byte_strings(self._array)
        array = self._array
        if not array.flags.c_contiguous or array.dtype != self._dtype.numpy:
            return np.array(array, self._dtype.numpy, order="C")
        return array

    def take(self) -> Array:
        """Return `wire_array` as an array that nothing else can change. Copies it unless this is certain."""
        array = self.wire_array()
        if array is not self._array:
            return array
        del array
        if self._is_lent or self._is_seen:
            return np.array(self._array)
        return exclusive_array(self._array, 1)

    def to_server_tensor(self) -> CoreTensor:
        """Convert it to an input of a request. Raises ValueError as `wire_array` does."""
        return CoreTensor(self._name, self._dtype, self.wire_array())


_TYPES: dict[np.dtype[np.generic], DType] = {dtype.numpy: dtype for dtype in DType if dtype is not DType.BF16}


def _byte_strings(array: Array) -> Array:
    """Return a new object array of bytes. Text becomes UTF-8; numpy's padding zeros are removed."""
    found = np.empty(array.shape, dtype=object)
    flat = found.reshape(-1)
    for index, item in enumerate(array.reshape(-1).tolist()):
        if isinstance(item, bytes):
            flat[index] = item
        elif isinstance(item, str):
            flat[index] = item.encode()
        elif isinstance(item, bytearray | memoryview):
            flat[index] = bytes(item)
        else:
            raise ValueError(f"element {index} is neither bytes nor text but {type(item).__name__}")
    return found
