"""Tensors whose elements lie on a GPU, in memory that a client registered.

Whoever knows nothing of them reads `tensor.array` and gets an array of the host's, copied then and once. What takes
device memory reads `tensor.elements`, and copies nothing. Ordinary tensors are no part of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from edge_server.core.tensor import DType, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"


class DevicePiece(Protocol):
    """Bytes on a GPU that stay where they are until the request that they belong to ends."""

    @property
    def device_id(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def byte_size(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """A copy of the bytes in the host's memory, made when it is first asked for, and kept. Raises ServingFault."""

    def is_at(self, other: object) -> bool:
        """Return whether another piece begins at the same place of the same region."""

    def copy_from(self, device_id: int, address: int, byte_count: int) -> None:
        """Copy memory of a GPU to the start of the piece, and wait for it. Raises ServingFault."""


class DeviceArray:
    """Elements on GPUs in place of a numpy array: row-major, of one piece, or of several parts joined along the rows,
    of which some may be arrays of the host's. Not to be changed once made."""

    __slots__ = ("dtype", "parts", "shape")

    def __init__(
        self, dtype: np.dtype[np.generic], shape: Sequence[int], parts: tuple[DevicePiece | Array, ...]
    ) -> None:
        """The parts hold together as many bytes as the shape has, or a lone piece more than that."""
        self.dtype = dtype
        self.shape = tuple(shape)
        self.parts = parts

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def piece(self) -> DevicePiece | None:
        """The memory that holds it all; None where it lies in several parts."""
        first = self.parts[0]
        return None if len(self.parts) != 1 or isinstance(first, np.ndarray) else first

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the same elements in another shape, of as many elements."""
        assert math.prod(shape) == self.size, f"{self.shape} has not as many elements as {tuple(shape)}"
        return DeviceArray(self.dtype, shape, self.parts)

    def host(self) -> Array:
        """Return a read-only array of the host's. Raises ServingFault."""
        flat = [part.reshape(-1) if isinstance(part, np.ndarray) else _numbers(part, self.dtype) for part in self.parts]
        whole: Array = flat[0] if len(flat) == 1 else np.concatenate(flat)
        array = whole[: self.size].reshape(self.shape)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.host()
        return array if dtype is None and not copy else np.array(array, dtype)


def _numbers(piece: DevicePiece, dtype: np.dtype[np.generic]) -> Array:
    view = piece.view
    return np.frombuffer(view[: view.nbytes - view.nbytes % dtype.itemsize], dtype)


class DeviceTensor(Tensor):
    """A tensor in a region of CUDA shared memory. `elements` is where; `array` brings it to the host."""

    __slots__ = ("elements",)

    def __init__(self, name: str, dtype: DType, elements: DeviceArray) -> None:
        self.name = name
        self.dtype = dtype
        self.elements = elements

    @property
    def array(self) -> Array:  # type: ignore[override]  # elsewhere a plain attribute, which nobody sets once made
        """The elements in the host's memory; a piece is copied when this is first read. Raises ServingFault."""
        return self.elements.host()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        """An address means nothing to another process: there it is a tensor of the host's."""
        return Tensor, (self.name, self.dtype, np.array(self.array))


def join_rows(tensors: Sequence[Tensor]) -> Array | DeviceArray:
    """Return the elements of one input of several requests, one after the other, each where it lies."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.elements if isinstance(first, DeviceTensor) else first.array
    if not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
        return np.concatenate([tensor.array for tensor in tensors])
    parts: list[DevicePiece | Array] = []
    for tensor in tensors:
        parts += tensor.elements.parts if isinstance(tensor, DeviceTensor) else (tensor.array,)
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return DeviceArray(first.dtype.numpy, shape, tuple(parts))


def to_host_array(array: Array | DeviceArray) -> Array:
    return array.host() if isinstance(array, DeviceArray) else array


def with_device_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors with those whose array is a DeviceArray as DeviceTensor."""
    return tuple(
        DeviceTensor(item.name, item.dtype, item.array) if isinstance(item.array, DeviceArray) else item
        for item in tensors
    )
