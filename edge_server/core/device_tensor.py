"""Tensors whose elements are in GPU memory that a client registered (CUDA shared memory), and their copies to the host.

Code that does not know device memory reads `tensor.array`: the elements are copied to the host once, at the first
read. Code that accepts device memory reads `tensor.elements`, without a copy.
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
    """Bytes on a GPU. They stay valid until their request ends."""

    @property
    def device_id(self) -> int: ...

    @property
    def address(self) -> int: ...

    @property
    def byte_size(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """A copy of the bytes in host memory, made at the first read and then kept. Raises ServingFault."""

    def is_at(self, other: object) -> bool:
        """Return whether the other piece begins at the same address of the same region."""

    def copy_from(self, device_id: int, address: int, byte_count: int) -> None:
        """Copy GPU memory to the start of the piece, and wait for the copy. Raises ServingFault."""


class DeviceArray:
    """Elements on GPUs instead of a numpy array, row-major. They are one piece, or several parts joined along the rows.
    Some parts may be host arrays. Do not change it after it is made."""

    __slots__ = ("dtype", "parts", "shape")

    def __init__(
        self, dtype: np.dtype[np.generic], shape: Sequence[int], parts: tuple[DevicePiece | Array, ...]
    ) -> None:
        """The parts together hold exactly the bytes of the shape. A single piece may hold more."""
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
        """The GPU memory that holds all elements; None if there are several parts."""
        first = self.parts[0]
        return None if len(self.parts) != 1 or isinstance(first, np.ndarray) else first

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the same elements in another shape with the same number of elements."""
        assert math.prod(shape) == self.size, f"{self.shape} has not as many elements as {tuple(shape)}"
        return DeviceArray(self.dtype, shape, self.parts)

    def host(self) -> Array:
        """Return a read-only array in host memory. Raises ServingFault."""
        flat: list[Array] = []
        for part in self.parts:
            if isinstance(part, np.ndarray):
                flat.append(part.reshape(-1))
            else:
                view = part.view
                flat.append(np.frombuffer(view[: view.nbytes - view.nbytes % self.dtype.itemsize], self.dtype))
        whole: Array = flat[0] if len(flat) == 1 else np.concatenate(flat)
        array = whole[: self.size].reshape(self.shape)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.host()
        return array if dtype is None and not copy else np.array(array, dtype)


class DeviceTensor(Tensor):
    """A tensor in CUDA shared memory. `elements` names the memory; `array` copies it to the host."""

    __slots__ = ("elements",)

    def __init__(self, name: str, dtype: DType, elements: DeviceArray) -> None:
        self.name = name
        self.dtype = dtype
        self.elements = elements

    @property
    def array(self) -> Array:  # type: ignore[override]  # the base class has a plain attribute, never set again
        """The elements in host memory, copied at the first read. Raises ServingFault."""
        return self.elements.host()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a host tensor: the address is not valid in another process."""
        return Tensor, (self.name, self.dtype, np.array(self.array))


def join_rows(tensors: Sequence[Tensor]) -> Array | DeviceArray:
    """Return one input of several requests, joined along the rows. Elements on a GPU stay there."""
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
    """Return the tensors; those whose array is a DeviceArray become DeviceTensors."""
    return tuple(
        DeviceTensor(item.name, item.dtype, item.array) if isinstance(item.array, DeviceArray) else item
        for item in tensors
    )
