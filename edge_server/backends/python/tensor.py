"""pb_utils.Tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.python import dlpack
from edge_server.backends.python.error_translation import TritonModelException
from edge_server.backends.python.ownership import owned
from edge_server.backends.python.plain_values import plain
from edge_server.core.tensor import DType
from edge_server.core.tensor import Tensor as CoreTensor

_BFLOAT16 = "bfloat16"
"""Name of ml_dtypes' numpy type, which JAX and others use."""


class PbTensor:
    """A named array. Made by models of any numpy array, without a copy; given to them as the inputs of a request.

    A model may write into what `as_numpy` returns, as under Triton. The memory of a request may be shared with other
    models and other threads, so `as_numpy` and DLPack copy such an array the first time, unless the model declares
    `read_only_inputs`.
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
            # A subclass may be the model's own, which no other process could read.
            array = array.view(np.ndarray)
        self._array: Array
        self._array = array
        known = _TYPES.get(array.dtype)
        if known is not None:
            self._dtype = known
        elif array.dtype.name == _BFLOAT16:
            self._dtype, self._array = DType.BF16, array.view(np.uint16)
        else:
            self._dtype = _unusual(name, array)

    @classmethod
    def received(cls, name: str, dtype: DType, array: Array, *, is_lent: bool) -> PbTensor:
        """Return a tensor of a request or a response. `is_lent`: its memory may be read only."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._dtype, tensor._array, tensor._is_lent = name, dtype, array, is_lent
        tensor._is_seen = False
        return tensor

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> PbTensor:
        """Return a tensor over the memory of a DLPack capsule, or of an object that has `__dlpack__`."""
        if isinstance(source, np.ndarray):
            return cls(name, source)
        array, dtype = dlpack.read(source)
        return cls.received(name, dtype, array, is_lent=False)

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        """Return the size along each dimension: a list, as in Triton, so that models may add to it."""
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
        return dlpack.export(self._owned(), self._dtype)

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
        """The type; of the server, not of Triton's API."""
        return self._dtype

    def wire_array(self) -> Array:
        """Return the array as the server carries it: contiguous, little-endian, strings as objects of bytes.

        Raises ValueError for elements that are neither bytes nor text.
        """
        if self._dtype is DType.BYTES:
            return _byte_strings(self._array)
        array = self._array
        if not array.flags.c_contiguous or array.dtype != self._dtype.numpy:
            return np.array(array, self._dtype.numpy, order="C")
        return array

    def take(self) -> Array:
        """Return the array of `wire_array` as one that nobody else will write to, copied where that is not sure."""
        array = self.wire_array()
        if array is not self._array:
            return array
        del array
        if self._is_lent or self._is_seen:
            return np.array(self._array)
        return owned(self._array, 1)

    def core(self) -> CoreTensor:
        """Return it as an input of a request. Raises ValueError as `wire_array` does."""
        return CoreTensor(self._name, self._dtype, self.wire_array())


_TYPES: dict[np.dtype[np.generic], DType] = {dtype.numpy: dtype for dtype in DType if dtype is not DType.BF16}


def _unusual(name: str, array: Array) -> DType:
    """Return the type of strings of fixed length, and of numbers of the other byte order."""
    try:
        return DType.from_numpy(array.dtype)
    except KeyError:
        raise TritonModelException(f"tensor '{name}': no tensor type for numpy type {array.dtype}") from None


def _byte_strings(array: Array) -> Array:
    """Return a new object array of bytes; text is written as UTF-8, numpy's own trailing zeros are kept off."""
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
