"""Cached response: the outputs of one response, without its request id and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from edge_server.core.request_response import Parameter, Response
from edge_server.core.tensor import DType, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"

_ENTRY_BYTES = 640
"""What an entry takes beside its tensors: the key, its place in the order, the answer's own objects."""

_TENSOR_BYTES = 320
"""What a tensor takes beside its elements: its name, the array's head and its shape."""

_ELEMENT_BYTES = 48
"""What an element of BYTES takes beside its own bytes: the reference to it, and the head of a `bytes` object."""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """Never changed: the arrays are read-only, and nobody else's. `size_bytes` is what it takes in memory, about."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Parameter]
    size_bytes: int


class AnswerStore(Protocol):
    """Where answers are kept. Thread-safe.

    `is_remote`: `get` and `put` may wait for another process, but no longer than `limit_s` in all. An answer of more
    than `entry_limit_bytes` is never put. `capacity_bytes` 0: not this side's to say.
    """

    is_remote: bool
    entry_limit_bytes: int
    capacity_bytes: int
    limit_s: float

    def is_there(self) -> bool:
        """Return at once whether asking is worth while."""

    def get(self, key: bytes) -> CachedAnswer | None:
        """Return the response stored under the key. Raises StoreUnreachable, CorruptEntry."""

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        """Keep the answer, in place of others if need be. Raises StoreUnreachable."""

    def contents(self) -> tuple[int, int, int]:
        """Return how many entries there are, their bytes, and how many had to leave; zeros where others know that."""

    def close(self) -> None: ...


class StoreUnreachable(Exception):
    """The store could not be asked, or did not answer in time."""


class CorruptEntry(Exception):
    """What was kept under a key is not what was put there."""


def size_of(response: Response) -> int:
    """Return about how many bytes of memory the response takes once it is kept."""
    texts = sum(len(key) + len(str(value)) + _ELEMENT_BYTES for key, value in response.parameters.items())
    return _ENTRY_BYTES + texts + sum(_TENSOR_BYTES + _size_of_array(item) for item in response.outputs)


def kept(response: Response) -> CachedAnswer:
    """Return a copy of the response's tensors that shares nothing with it: outputs are often views of a batch's."""
    outputs = tuple([Tensor(item.name, item.dtype, read_only_copy(item)) for item in response.outputs])
    return CachedAnswer(outputs, dict(response.parameters), size_of(response))


def read_only_copy(tensor: Tensor) -> Array:
    """Return a compact, read-only copy of a tensor's array."""
    copy: Array
    if tensor.dtype is DType.BYTES:
        # Element by element: a kind of bytes that can be changed, or is a view, must not be kept.
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
