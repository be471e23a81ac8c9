"""Requests from received messages, by a cache of parsed heads: clients repeat them byte for byte.

A client's requests to a model differ in their id and in their tensors' bytes. The rest of a message, its head, is
therefore read by the message class once. Heads that mean something else each time (a deadline, a step of a sequence) or
carry data are not kept. Format: ModelInferRequest of grpc_service.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.message import Parameter, Request, RequestMemo
from edge_server.core.tensor import DType, Tensor
from edge_server.frontends.grpc.call import Message
from edge_server.frontends.grpc.message import InferMessage, MessageReader, Outline
from edge_server.frontends.grpc.request import LazyPins, Plan, parameter_values, pin_targets, request_of, set_parameters
from edge_server.frontends.v2.outputs import RequestedOutput
from edge_server.frontends.v2.parameters import region_reference
from edge_server.frontends.v2.regions import RegionRef, Regions
from edge_server.frontends.v2.version import parse_version
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

KnownMessage: TypeAlias = "tuple[Head, list[int]]"
"""A message whose head was met before: the head, and pairs of start and end of its raw_input_contents."""


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
    special: Mapping[str, RequestedOutput] | None
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


class RequestReader:
    """Reads requests; keeps the heads that it met. Used by any thread."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._messages = MessageReader()
        self._heads: dict[bytes, Head] = {}

    def is_quick(self, data: Message) -> bool:
        """Return whether reading a large message takes microseconds: its head is known, and no value is looked at."""
        parts = outline(data)
        head = self._heads.get(parts[0]) if parts is not None else None
        return head is not None and all(slot.size >= 0 for slot in head.slots)

    def find(self, data: Message, plan: Plan) -> KnownMessage | InferMessage:
        """Take a received message apart, and fill in its addressee in `plan`. Raises InvalidRequest."""
        parts = outline(data)
        head = self._heads.get(parts[0]) if parts is not None else None
        if parts is not None and head is not None and 2 * head.raw_count == len(parts[2]):
            try:
                plan.request_id = parts[1].decode()
            except UnicodeDecodeError:
                # For the message class to say.
                parts = None
            else:
                plan.model, plan.version_text, plan.version = head.model, head.version_text, head.version
                return head, parts[2]
        found = self._messages.read(data)
        found.outline = parts
        message = found.message
        plan.model, plan.version_text, plan.request_id = message.model_name, message.model_version, message.id
        plan.version = parse_version(plan.version_text)
        return found

    def request(
        self, data: Message, found: KnownMessage | InferMessage, plan: Plan, forwarded: Mapping[str, Parameter]
    ) -> Request:
        """Return the request; its tensors are views of the message or of pinned shared memory. Fill in the plan.

        `forwarded` are request headers that become parameters. Memory of inputs is given back by the request's
        `release`, that of outputs by the plan's.
        Raises InvalidRequest, and what the registry raises for a region; nothing stays pinned then.
        """
        if isinstance(found, InferMessage):
            request = request_of(found, plan, self._regions, forwarded)
            if found.outline is not None and not forwarded and (head := _head_of(found, plan, request)) is not None:
                self._keep(found.outline, head)
                request.memo = head.memo
            return request
        head, raws = found
        tensors: dict[str, Tensor] = {}
        request = Request(head.model, tensors, head.version, plan.request_id, head.outputs, head.custom, head.priority)
        request.timeout_us = head.timeout_us
        plan.wants_empty_final = head.wants_empty_final
        if forwarded:
            set_parameters(request, plan, {**forwarded, **head.given})
        else:
            request.memo = head.memo
        if head.special or head.raw_count != len(head.slots):
            plan.special = head.special
            self._pin_known(request, plan, head, data, raws)
            return request
        position = 0
        for slot in head.slots:
            tensors[slot.name] = slot.tensor(data, raws[position], raws[position + 1], head.model)
            position += 2
        return request

    def _pin_known(self, request: Request, plan: Plan, head: Head, data: Message, raws: list[int]) -> None:
        """Fill in the inputs and places of outputs of a known head that has some in shared memory."""
        pins = LazyPins(self._regions)
        tensors: dict[str, Tensor] = {}
        position = 0
        try:
            if plan.special:
                request.targets = pin_targets(plan, self._regions, pins)
            for slot in head.slots:
                if slot.region is None:
                    tensors[slot.name] = slot.tensor(data, raws[position], raws[position + 1], head.model)
                    position += 2
                else:
                    tensors[slot.name] = pins.pins().tensor(
                        slot.name, slot.dtype, slot.shape, slot.region, model=head.model
                    )
        except BaseException:
            pins.release()
            plan.release()
            raise
        request.inputs = tensors
        request.release = pins.made.release if pins.made is not None else None

    def _keep(self, found: Outline, head: Head) -> None:
        if len(self._heads) >= MOST_HEADS:
            # Nobody has so many models in use: a client varies what it asks for, and order among them means nothing.
            self._heads.clear()
        self._heads[found[0]] = head


def _head_of(found: InferMessage, plan: Plan, request: Request) -> Head | None:
    """Return what the head of a request said that was found right; None where it may mean something else next time."""
    if request.sequence is not None or request.deadline_ns:
        return None
    slots = []
    for position, given in enumerate(found.inputs):
        if position in found.contents or given.HasField("contents"):
            return None
        region = region_reference(parameter_values(given.parameters, {}), given.name) if given.parameters else None
        slots.append(slot_of(request.inputs[given.name], region))
    raw_count = sum(slot.region is None for slot in slots)
    if raw_count != len(found.raw):
        return None
    return Head(
        plan.model,
        plan.version_text,
        plan.version,
        request.outputs,
        plan.special,
        tuple(slots),
        raw_count,
        parameter_values(found.message.parameters, {}),
        request.parameters,
        request.priority,
        request.timeout_us,
        plan.wants_empty_final,
    )


def slot_of(tensor: Tensor, region: RegionRef | None) -> Slot:
    """Return how the head declared an input that came out as this tensor."""
    shape = tuple(map(int, tensor.shape))
    size = -1 if tensor.dtype in (DType.BYTES, DType.BOOL) or 0 in shape else tensor.nbytes
    return Slot(tensor.name, tensor.dtype, tensor.dtype.numpy, shape, size, region)
