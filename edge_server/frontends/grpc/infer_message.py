"""Parser of ModelInferRequest bytes: large tensors become views of the received bytes, and protobuf parses the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc.call import Message
from edge_server.protocol.messages import message_class
from edge_server.protocol.raw_fields import split
from edge_server.record import record

MIN_SPLIT_BYTES = 32 << 10
"""Messages below this size are parsed by the message class alone: copying them costs less than scanning them."""

_INPUTS, _RAW_CONTENTS = 5, 7
_TENSOR_CONTENTS = 5


class Outline(NamedTuple):
    """Parts of a serialized ModelInferRequest: `header` is all but id and raw contents. `raws` are start and end offset
    of each of its raw_input_contents. `id_end` is the end offset of the id, 0 without one."""

    header: bytes
    request_id: bytes
    raws: list[int]
    id_end: int


@record(slots=True)
class InferMessage:
    """A parsed ModelInferRequest.

    `message` holds the small fields, `inputs` the InferInputTensor messages in order, and `raw` the raw_input_contents.
    `contents` maps an input's position to its serialized InferTensorContents, if they are large and were split from the
    input message. `outline` is not None if the header may be cached.
    """

    message: Any
    inputs: Sequence[Any]
    raw: Sequence[bytes | memoryview]
    contents: dict[int, memoryview] = field(default_factory=dict)
    outline: Outline | None = None


class MessageReader:
    """Parses ModelInferRequest messages. Thread-safe."""

    @cached_property
    def _request(self) -> Any:
        return message_class("inference.ModelInferRequest")

    @cached_property
    def _input(self) -> Any:
        return message_class("inference.ModelInferRequest.InferInputTensor")

    def read(self, data: Message) -> InferMessage:
        """Return the message; large tensors are views of `data`, which must not change. Raises InvalidRequest."""
        try:
            return self._read_whole(data) if len(data) < MIN_SPLIT_BYTES else self._read_split(data)
        except (DecodeError, UnicodeDecodeError) as error:
            # For text that is not UTF-8, protobuf's implementation in Python raises the latter.
            raise InvalidRequest("the request is not a valid ModelInferRequest message") from error

    def _read_whole(self, data: Message) -> InferMessage:
        message = self._request.FromString(bytes(data))
        return InferMessage(message, message.inputs, message.raw_input_contents)

    def _read_split(self, data: Message) -> InferMessage:
        outer = split(data, _RAW_CONTENTS)
        if outer is None:
            return self._read_whole(data)
        if len(outer.rest) < MIN_SPLIT_BYTES:
            message = self._request.FromString(bytes(outer.rest))
            return InferMessage(message, message.inputs, outer.payloads)
        inner = split(outer.rest, _INPUTS)
        if inner is None:
            return self._read_whole(data)
        found = InferMessage(self._request.FromString(bytes(inner.rest)), [], outer.payloads)
        found.inputs = [self._read_input(found, position, payload) for position, payload in enumerate(inner.payloads)]
        return found

    def _read_input(self, found: InferMessage, position: int, data: memoryview) -> Any:
        parts = split(data, _TENSOR_CONTENTS) if len(data) >= MIN_SPLIT_BYTES else None
        # The protobuf class merges repeated contents by protobuf's rules.
        if parts is None or len(parts.payloads) != 1:
            return self._input.FromString(bytes(data))
        found.contents[position] = parts.payloads[0]
        return self._input.FromString(bytes(parts.rest))
