"""Data class of a cached response (outputs, without request id and times), and the interface of the stores that hold
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from edge_server.core.request_response import Parameter, Response
from edge_server.core.tensor import DType, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"

_ENTRY_BYTES = 640
"""Memory of an entry beside its tensors: the key, its place in the order, the answer's own objects."""

_TENSOR_BYTES = 320
"""Memory of a tensor beside its elements: its name, the array object and its shape."""

_ELEMENT_BYTES = 48
"""Memory of an element of BYTES beside its own bytes: the reference to it, and the header of a `bytes` object."""


class CachedResponse(NamedTuple):
    """Immutable: the arrays are read-only and shared with nothing else. `size_bytes` is its approximate memory."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Parameter]
    size_bytes: int


class ResponseStore(Protocol):
    """Store of answers. Thread-safe.

    `is_remote`: `get` and `put` may wait for another process, at most `limit_s` in all. Answers larger than
    `entry_limit_bytes` are never put. `capacity_bytes` 0: the other process decides.
    """

    is_remote: bool
    entry_limit_bytes: int
    capacity_bytes: int
    limit_s: float

    def is_available(self) -> bool:
        """Return whether the store is expected to answer. Returns at once."""

    def get(self, key: bytes) -> CachedResponse | None:
        """Return the response stored under the key. Raises StoreUnreachable, CorruptEntry."""

    def put(self, key: bytes, answer: CachedResponse) -> None:
        """Store the answer; it may replace others. Raises StoreUnreachable."""

    def contents(self) -> tuple[int, int, int]:
        """Return the numbers of entries, their bytes, and evictions; zeros if only the other process knows them."""

    def close(self) -> None: ...


class StoreUnreachable(Exception):
    """The store could not be asked, or did not answer in time."""


class CorruptEntry(Exception):
    """The stored bytes of a key are not those that were put there."""


def size_of(response: Response) -> int:
    """Return the approximate memory of the response once it is stored, in bytes."""
    texts = sum(len(key) + len(str(value)) + _ELEMENT_BYTES for key, value in response.parameters.items())
    return _ENTRY_BYTES + texts + sum(_TENSOR_BYTES + _size_of_array(item) for item in response.outputs)


def to_cached_response(response: Response) -> CachedResponse:
    """Return a copy of the response's tensors that shares no memory with it: outputs are often views of a batch."""
    outputs = tuple([Tensor(item.name, item.dtype, read_only_copy(item)) for item in response.outputs])
    return CachedResponse(outputs, dict(response.parameters), size_of(response))


def read_only_copy(tensor: Tensor) -> Array:
    """Return a compact, read-only copy of a tensor's array."""
    copy: Array
    if tensor.dtype is DType.BYTES:
        # Element by element: a mutable kind of bytes, or a view, must not be stored.
        copy = np.empty(tensor.array.shape, object)
        copy.reshape(-1)[:] = [bytes(item) for item in tensor.array.reshape(-1).tolist()]
    else:
        copy = np.array(tensor.array, order="C", copy=True)
    copy.flags.writeable = False
    return copy


def _size_of_array(tensor: Tensor) -> int:
    if tensor.dtype is DType.BYTES:
        return sum(_ELEMENT_BYTES + len(item) for item in tensor.array.reshape(-1).tolist())
    return tensor.array.nbytes
