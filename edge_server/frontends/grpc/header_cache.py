"""Cache of parsed heads of ModelInferRequests, found again by their bytes: clients repeat them from request to request.

A client's requests to a model differ in their id and in their tensors' bytes. The rest of a message, its head, is
therefore read by the message class once. Heads that mean something else each time (a deadline, a step of a sequence) or
carry data are not kept. Format: ModelInferRequest of grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.message import Parameter, RequestMemo
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.grpc.call import Message
from edge_server.frontends.v2.outputs import RequestedOutput
from edge_server.frontends.v2.regions import RegionRef
from edge_server.protocol.raw import tensor_from_raw
from edge_server.protocol.wire import DELIMITED, read_varint
from edge_server.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_HEADS = 256
MOST_HEAD_BYTES = 2048
"""Bounds of what is kept, whatever clients send: more of them, or longer ones, are read anew each time."""

_SMALL_BYTES = 4096
"""Data of up to this is copied to where it is aligned, which costs less than finding out whether it is."""

_ID = 3 << 3 | DELIMITED
_RAW = 7 << 3 | DELIMITED
_PLAIN = frozenset(number << 3 | DELIMITED for number in (1, 2, 3, 4, 5, 6))
"""Tags of model_name, model_version, id, parameters, inputs and outputs: all that a head may consist of."""

Outline: TypeAlias = "tuple[bytes, bytes, list[int]]"
"""Parts of a serialized ModelInferRequest: its head without the id, the id, and pairs of start and end of each of its
raw_input_contents."""


@dataclass(slots=True)
class Slot:
    """One input as a head declares it. `size` is how many bytes its data has to have, -1 where that alone does not make
    it right. `region` is None where the data follows in raw_input_contents."""

    name: str
    dtype: DType
    numpy: np.dtype[np.generic]
    shape: tuple[int, ...]
    size: int
    region: RegionRef | None

    def tensor(self, data: Message, start: int, end: int, model: str) -> Tensor:
        """Return the input over data[start:end]. Raises InvalidRequest when the size does not fit the shape."""
        size = end - start
        if size != self.size:
            return tensor_from_raw(self.name, self.dtype, self.shape, memoryview(data)[start:end], model=model)
        if size <= _SMALL_BYTES:
            return Tensor(self.name, self.dtype, np.ndarray(self.shape, self.numpy, bytes(data[start:end])))
        array: npt.NDArray[np.generic] = np.ndarray(self.shape, self.numpy, data, start)
        return Tensor(self.name, self.dtype, array if array.flags.aligned else array.copy())


@dataclass(slots=True)
class Head:
    """What a head says. Shared by requests: not to be changed. `given` are all its parameters, `custom` those among
    them that the model sees. `memo` is what the server keeps with it."""

    model: str
    version_text: str
    version: int | None
    outputs: tuple[str, ...]
    special: Mapping[str, RequestedOutput]
    slots: tuple[Slot, ...]
    raw_count: int
    given: Mapping[str, object]
    custom: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    wants_empty_final: bool
    memo: RequestMemo = field(default_factory=RequestMemo)


def outline(data: Message) -> Outline | None:
    """Walk over a serialized message; None for one that is not plain, or not whole."""
    position = 0
    end = len(data)
    id_start = id_end = 0
    request_id = b""
    raws: list[int] = []
    try:
        while position < end:
            tag = data[position]
            if tag != _RAW and (tag not in _PLAIN or raws):
                return None
            size = data[position + 1]
            body = position + 2
            if size >= 0x80:
                size, body = read_varint(data, position + 1)
            stop = body + size
            if tag == _RAW:
                if not raws:
                    head_end = position
                raws.append(body)
                raws.append(stop)
            elif tag == _ID:
                if id_end:
                    return None
                id_start, id_end, request_id = position, stop, bytes(data[body:stop])
            position = stop
    except (IndexError, ValueError):
        return None
    if position != end:
        return None
    if not raws:
        head_end = end
    if head_end - (id_end - id_start) > MOST_HEAD_BYTES:
        return None
    head = bytes(data[:id_start]) + bytes(data[id_end:head_end]) if id_end else bytes(data[:head_end])
    return head, request_id, raws


class HeaderCache:
    """The heads met so far. Used by several threads."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def find(self, found: Outline) -> Head | None:
        """Return the parsed head of a message, if it is kept and data of all its inputs follows."""
        head = self._heads.get(found[0])
        return head if head is not None and 2 * head.raw_count == len(found[2]) else None

    def keep(self, found: Outline, head: Head) -> None:
        if len(self._heads) >= MOST_HEADS:
            # Nobody has so many models in use: a client varies what it asks for, and order among them means nothing.
            self._heads.clear()
        self._heads[found[0]] = head


def slot_of(tensor: Tensor, region: RegionRef | None) -> Slot:
    """Return how the head declared an input that came out as this tensor."""
    shape = tuple(map(int, tensor.shape))
    size = -1 if tensor.dtype in (DType.BYTES, DType.BOOL) or 0 in shape else tensor.nbytes
    return Slot(tensor.name, tensor.dtype, tensor.dtype.numpy, shape, size, region)
