"""Codec of the frame stream's messages (edge_frames.proto), written by hand.

A generated class would copy every frame twice, and a client on a robot would have to install protobuf for these few
messages. Decoded `data` is a view of the message. Encoding copies it once. Safe from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from edge_server.core.frame import (
    ClassScore,
    ClientMessage,
    Credit,
    Delivery,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    RegionSlice,
    Returns,
    ServerMessage,
    StreamCounts,
    StreamOpened,
    StreamRequest,
)
from edge_server.core.tensor import BY_NAME, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol.hand_coding import Buffer, FieldKind, Message, MessageField, decode, encode
from edge_server.protocol.raw_tensors import MAX_RANK, raw_from_tensor, tensor_from_raw

STREAM_PATH = "/edge.frames.v1.FrameService/Stream"
"""HTTP/2 path of the only RPC."""

MAX_NAMES = 1024
"""Most output names in an opening message. Names take few bytes, so a message could otherwise create millions of
them."""


def encode_client_message(message: ClientMessage) -> bytes:
    """Return a ClientMessage. Raises InvalidRequest when a value does not fit its field."""
    is_frame = isinstance(message, Frame)
    return encode(_CLIENT, (None, message) if is_frame else (message, None))


def decode_client_message(data: Buffer) -> ClientMessage:
    """Return the decoded client message; `Frame.data` is a view of `data`. Raises InvalidRequest if it is malformed."""
    opening, frame = decode(_CLIENT, data)
    message = frame if opening is None else opening
    if message is None:
        raise InvalidRequest("a message of a frame stream must hold 'open' or 'frame', got neither")
    return message  # type: ignore[no-any-return]


def encode_server_message(message: ServerMessage, frames_allowed: int = 0) -> bytes:
    """Return a ServerMessage. Raises InvalidRequest when a value does not fit its field."""
    values = [message if isinstance(message, noun) else None for noun in _SERVER_NOUNS]
    return encode(_SERVER, (*values, frames_allowed))


def decode_server_message(data: Buffer) -> tuple[ServerMessage, int]:
    """Return the decoded server message, and `frames_allowed`; buffers and tensors are views of `data`.

    Unknown kinds of messages count as Credit. Raises InvalidRequest when the message is malformed.
    """
    *kinds, frames_allowed = decode(_SERVER, data)
    return next((kind for kind in kinds if kind is not None), Credit()), frames_allowed


# Message tables, in the order of edge_frames.proto. Fields are in the order of the constructors' arguments.


def _values(*values: Any) -> tuple[Any, ...]:
    return values


def _made_delivery(
    depth: int, max_age_ms: int, deadline_ms: int, max_fps: float, weight: float, *rest: Any
) -> Delivery:
    return Delivery(depth or 1, max_age_ms, deadline_ms, max_fps, weight or 1.0, *rest)


def _made_request(model: str, version: int, stream_id: str, *rest: Any) -> StreamRequest:
    returns, delivery, client = rest
    return StreamRequest(model, version, stream_id, returns or Returns(), delivery or Delivery(), client)


def _taken_request(request: StreamRequest) -> tuple[Any, ...]:
    returns = None if request.returns == Returns() else request.returns
    return (request.model, request.version, request.stream_id, returns, request.delivery, request.client)


def _made_frame(header: FrameHeader | None, *rest: Any) -> Frame:
    return Frame(header or FrameHeader(), *rest)


def _reason(number: int) -> DropReason:
    return _REASONS.get(number, DropReason.OTHER)


_REASONS = {reason.value: reason for reason in DropReason}


def _summed(pairs: Iterable[tuple[int, int]]) -> dict[DropReason, int]:
    """Count drops by reason. Unknown reasons count as OTHER, so that the sum stays right."""
    counts: dict[DropReason, int] = {}
    for number, count in pairs:
        reason = _reason(number)
        counts[reason] = counts.get(reason, 0) + count
    return counts


def _pairs(counts: Mapping[DropReason, int]) -> list[tuple[int, int]]:
    return [(reason.value, count) for reason, count in counts.items() if count]


def _made_counts(received: int, answered: int, dropped: Iterable[tuple[int, int]]) -> StreamCounts:
    return StreamCounts(received, answered, _summed(dropped))


def _taken_counts(counts: StreamCounts) -> tuple[Any, ...]:
    return (counts.received, counts.answered, _pairs(counts.dropped))


def _made_opened(
    stream_id: str,
    model: str,
    version: int,
    runtime: str,
    labels: tuple[str, ...],
    counts: StreamCounts | None,
    server: str,
) -> StreamOpened:
    return StreamOpened(stream_id, model, version, runtime, labels, counts or StreamCounts(), server)


def _made_result(header: FrameHeader | None, times: FrameTimes | None, *rest: Any) -> FrameResult:
    dropped, counts, *others = rest
    return FrameResult(
        header or FrameHeader(), times or FrameTimes(), _summed(dropped), counts or StreamCounts(), *others
    )


_take_plain_result = attrgetter(*(field.name for field in fields(FrameResult)))


def _taken_result(result: FrameResult) -> list[Any]:
    values = list(_take_plain_result(result))
    values[2] = _pairs(result.dropped)
    return values


def _made_tensor(name: str, datatype: str, shape: tuple[int, ...], data: Buffer) -> Tensor:
    dtype = BY_NAME.get(datatype)
    if dtype is None:
        raise InvalidRequest(f"tensor '{name}' of a result has the unknown datatype '{datatype}'")
    try:
        return tensor_from_raw(name, dtype, shape, data, model="")
    except InvalidRequest:
        raise InvalidRequest(
            f"tensor '{name}' of a result, {datatype}{list(shape[:MAX_RANK])}, does not fit its {len(data)} bytes"
        ) from None


def _taken_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.name, tensor.dtype.value, tensor.shape, raw_from_tensor(tensor))


def _made_dropped(header: FrameHeader | None, number: int, detail: str) -> FrameDropped:
    return FrameDropped(header or FrameHeader(), _reason(number), detail)


def _taken_dropped(dropped: FrameDropped) -> tuple[Any, ...]:
    return (dropped.header, dropped.reason.value, dropped.detail)


_U32, _U64, _I64, _BOOL, _FLOAT = FieldKind.UINT32, FieldKind.UINT64, FieldKind.INT64, FieldKind.BOOL, FieldKind.FLOAT
_STRING, _BYTES, _MESSAGE = FieldKind.STRING, FieldKind.BYTES, FieldKind.MESSAGE

_RETURNS = Message(
    "Returns", Returns,
    MessageField(1, "tensors", _STRING, is_repeated=True, limit=MAX_NAMES),
    MessageField(2, "top_k", _U32),
    MessageField(3, "has_detections", _BOOL),
    MessageField(4, "has_mask", _BOOL),
    MessageField(5, "has_annotated_jpeg", _BOOL),
    MessageField(6, "jpeg_quality", _U32),
)  # fmt: skip
_DELIVERY = Message(
    "Delivery", _made_delivery,
    MessageField(1, "depth", _U32),
    MessageField(2, "max_age_ms", _U32),
    MessageField(3, "deadline_ms", _U32),
    MessageField(4, "max_fps", _FLOAT),
    MessageField(5, "weight", _FLOAT),
    MessageField(6, "priority", _U32),
    MessageField(7, "notifies_drops", _BOOL),
)  # fmt: skip
_OPEN = Message(
    "Open", _made_request,
    MessageField(1, "model", _STRING),
    MessageField(2, "version", _I64),
    MessageField(3, "stream_id", _STRING),
    MessageField(4, "returns", _MESSAGE, _RETURNS),
    MessageField(5, "delivery", _MESSAGE, _DELIVERY),
    MessageField(6, "client", _STRING),
    take=_taken_request,
)  # fmt: skip
_HEADER = Message(
    "Header", FrameHeader,
    MessageField(1, "sec", _I64),
    MessageField(2, "nanosec", _U32),
    MessageField(3, "frame_id", _STRING),
    MessageField(4, "seq", _U64),
)  # fmt: skip
_REGION = Message(
    "Region",
    RegionSlice,
    MessageField(1, "name", _STRING),
    MessageField(2, "offset", _U64),
    MessageField(3, "byte_size", _U64),
)
_FRAME = Message(
    "Frame", _made_frame,
    MessageField(1, "header", _MESSAGE, _HEADER),
    MessageField(2, "height", _U32),
    MessageField(3, "width", _U32),
    MessageField(4, "encoding", _STRING),
    MessageField(5, "step", _U32),
    MessageField(6, "is_bigendian", _BOOL),
    MessageField(7, "format", _STRING),
    MessageField(8, "region", _MESSAGE, _REGION),
    MessageField(9, "age_us", _U32),
    MessageField(15, "data", _BYTES),
)  # fmt: skip
_DROP_COUNT = Message("DropCount", _values, MessageField(1, "reason", _U32), MessageField(2, "count", _U64), take=tuple)
_COUNTS = Message(
    "Counts", _made_counts,
    MessageField(1, "received", _U64),
    MessageField(2, "answered", _U64),
    MessageField(3, "dropped", _MESSAGE, _DROP_COUNT, is_repeated=True),
    take=_taken_counts,
)  # fmt: skip
_OPENED = Message(
    "Opened", _made_opened,
    MessageField(1, "stream_id", _STRING),
    MessageField(2, "model", _STRING),
    MessageField(3, "version", _I64),
    MessageField(4, "runtime", _STRING),
    MessageField(5, "labels", _STRING, is_repeated=True),
    MessageField(6, "counts", _MESSAGE, _COUNTS),
    MessageField(7, "server", _STRING),
)  # fmt: skip
_TIMES = Message(
    "Times", FrameTimes,
    MessageField(1, "received_unix_ns", _I64),
    MessageField(2, "taken_us", _U64),
    MessageField(3, "queued_us", _U64),
    MessageField(4, "started_us", _U64),
    MessageField(5, "finished_us", _U64),
)  # fmt: skip
_TENSOR = Message(
    "Tensor", _made_tensor,
    MessageField(1, "name", _STRING),
    MessageField(2, "datatype", _STRING),
    MessageField(3, "shape", FieldKind.NUMBERS, is_repeated=True),
    MessageField(15, "data", _BYTES),
    take=_taken_tensor,
)  # fmt: skip
_CLASS_SCORE = Message(
    "ClassScore",
    ClassScore,
    MessageField(1, "index", _U32),
    MessageField(2, "score", _FLOAT),
    MessageField(3, "label", _STRING),
)
_KEYPOINT = Message(
    "Keypoint", Keypoint, MessageField(1, "x", _FLOAT), MessageField(2, "y", _FLOAT), MessageField(3, "score", _FLOAT)
)
_DETECTION = Message(
    "Detection", Detection,
    MessageField(1, "x_min", _FLOAT),
    MessageField(2, "y_min", _FLOAT),
    MessageField(3, "x_max", _FLOAT),
    MessageField(4, "y_max", _FLOAT),
    MessageField(5, "score", _FLOAT),
    MessageField(6, "class_index", _U32),
    MessageField(7, "label", _STRING),
    MessageField(8, "keypoints", _MESSAGE, _KEYPOINT, is_repeated=True),
)  # fmt: skip
_MASK = Message(
    "Mask", Mask,
    MessageField(1, "height", _U32),
    MessageField(2, "width", _U32),
    MessageField(3, "encoding", _STRING),
    MessageField(4, "data", _BYTES),
    MessageField(5, "labels", _STRING, is_repeated=True),
)  # fmt: skip
_RESULT = Message(
    "Result", _made_result,
    MessageField(1, "header", _MESSAGE, _HEADER),
    MessageField(2, "times", _MESSAGE, _TIMES),
    MessageField(3, "dropped", _MESSAGE, _DROP_COUNT, is_repeated=True),
    MessageField(4, "counts", _MESSAGE, _COUNTS),
    MessageField(5, "model", _STRING),
    MessageField(6, "version", _I64),
    MessageField(7, "variant", _STRING),
    MessageField(8, "runtime", _STRING),
    MessageField(9, "governor", _STRING),
    MessageField(10, "governor_detail", _STRING),
    MessageField(11, "height", _U32),
    MessageField(12, "width", _U32),
    MessageField(13, "batch_size", _U32),
    MessageField(14, "tensors", _MESSAGE, _TENSOR, is_repeated=True),
    MessageField(15, "classes", _MESSAGE, _CLASS_SCORE, is_repeated=True),
    MessageField(16, "detections", _MESSAGE, _DETECTION, is_repeated=True),
    MessageField(17, "mask", _MESSAGE, _MASK),
    MessageField(18, "annotated_jpeg", _BYTES),
    MessageField(19, "error_code", _STRING),
    MessageField(20, "error", _STRING),
    take=_taken_result,
)  # fmt: skip
_DROPPED = Message(
    "Dropped", _made_dropped,
    MessageField(1, "header", _MESSAGE, _HEADER),
    MessageField(2, "reason", _U32),
    MessageField(3, "detail", _STRING),
    take=_taken_dropped,
)  # fmt: skip
_CREDIT = Message("Credit", Credit)

_CLIENT = Message(
    "ClientMessage", _values,
    MessageField(1, "open", _MESSAGE, _OPEN),
    MessageField(2, "frame", _MESSAGE, _FRAME),
    take=tuple, is_oneof=True,
)  # fmt: skip
_SERVER = Message(
    "ServerMessage", _values,
    MessageField(1, "opened", _MESSAGE, _OPENED),
    MessageField(2, "result", _MESSAGE, _RESULT),
    MessageField(3, "dropped", _MESSAGE, _DROPPED),
    MessageField(4, "credit", _MESSAGE, _CREDIT),
    MessageField(15, "frames_allowed", _U64),
    take=tuple, is_oneof=True,
)  # fmt: skip
_SERVER_NOUNS = (StreamOpened, FrameResult, FrameDropped, Credit)
