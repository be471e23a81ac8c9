"""ModelInferRequest from received bytes: the small fields through the message class, tensors as views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc.heads import Head, Heads, outline
from edge_server.frontends.grpc.wire import split
from edge_server.protocol.messages import message_class
from edge_server.records import dataclass

LEAST_SPLIT_BYTES = 32 << 10
"""Messages below this size are read by the message class alone: copying them costs less than walking over them."""

_INPUTS, _RAW_CONTENTS = 5, 7
_TENSOR_CONTENTS = 5


@dataclass(slots=True)
class InferMessage:
    """A ModelInferRequest as received.

    `message` holds every small field; `inputs` are its InferInputTensor messages, in order; `raw` its
    raw_input_contents. `contents` maps an input's position to its serialized InferTensorContents where those were cut
    out of the input message.
    """

    message: Any
    inputs: Sequence[Any]
    raw: Sequence[bytes | memoryview]
    contents: dict[int, memoryview] = field(default_factory=dict)
    learn: Callable[[Head], None] | None = None
    """Keeps what the head says, where it is one that can be kept."""


@dataclass(slots=True)
class KnownMessage:
    """A ModelInferRequest whose head was met before. `raws` are pairs of start and end in `data`."""

    head: Head
    request_id: str
    data: bytes
    raws: list[int]


class InferReader:
    """Reads ModelInferRequest messages. Holds the message classes; used by any thread."""

    def __init__(self) -> None:
        self._request = message_class("inference.ModelInferRequest")
        self._input = message_class("inference.ModelInferRequest.InferInputTensor")
        self._heads = Heads()

    def read(self, data: bytes) -> InferMessage | KnownMessage:
        """Return the message; its tensors are views of `data`, which must not change. Raises InvalidRequest."""
        plain = outline(data)
        if plain is not None and (head := self._heads.find(plain)) is not None:
            try:
                return KnownMessage(head, plain.request_id.decode(), data, plain.raws)
            except UnicodeDecodeError:
                # For the message class to say.
                plain = None
        try:
            found = self._read_whole(data) if len(data) < LEAST_SPLIT_BYTES else self._read_split(data)
        except DecodeError as error:
            raise InvalidRequest("the request is not a valid ModelInferRequest message") from error
        if plain is not None:
            found.learn = partial(self._heads.learn, plain)
        return found

    def _read_whole(self, data: bytes) -> InferMessage:
        message = self._request.FromString(data)
        return InferMessage(message, message.inputs, message.raw_input_contents)

    def _read_split(self, data: bytes) -> InferMessage:
        outer = split(data, _RAW_CONTENTS)
        if outer is None:
            return self._read_whole(data)
        if len(outer.rest) < LEAST_SPLIT_BYTES:
            message = self._request.FromString(bytes(outer.rest))
            return InferMessage(message, message.inputs, outer.payloads)
        inner = split(outer.rest, _INPUTS)
        if inner is None:
            return self._read_whole(data)
        found = InferMessage(self._request.FromString(bytes(inner.rest)), [], outer.payloads)
        found.inputs = [self._read_input(found, position, payload) for position, payload in enumerate(inner.payloads)]
        return found

    def _read_input(self, found: InferMessage, position: int, data: memoryview) -> Any:
        parts = split(data, _TENSOR_CONTENTS) if len(data) >= LEAST_SPLIT_BYTES else None
        # A sub-message given twice is merged by protobuf's rules, which the message class knows.
        if parts is None or len(parts.payloads) != 1:
            return self._input.FromString(bytes(data))
        found.contents[position] = parts.payloads[0]
        return self._input.FromString(bytes(parts.rest))
