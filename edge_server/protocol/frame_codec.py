"""Encoder and decoder of the messages of a frame stream (edge_frames.proto), without copies of large payloads.

A generated class copies `bytes` fields. So the pixels of a frame and the data of tensors are cut out, as views, before
a message is parsed, and are joined to the other fields when it is encoded: one copy. A message in which they cannot be
cut out is parsed as a whole, so that both ways always agree. Safe from any thread. The first message imports protobuf.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from edge_server.core.tensor import BY_NAME, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_messages import (
    ClassScore,
    ClientMessage,
    Credit,
    Delivery,
    DenseMap,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    ObjectMask,
    RegionSlice,
    Returns,
    RotatedBox,
    ServerMessage,
    StreamCounts,
    StreamOpened,
    StreamRequest,
)
from edge_server.protocol.protobuf_wire_format import encode_delimited_header, encode_number_field
from edge_server.protocol.raw_fields import split
from edge_server.protocol.raw_tensors import MAX_RANK, Buffer, raw_from_tensor, tensor_from_raw

if TYPE_CHECKING:
    from edge_server.protocol.messages import MessageClass

STREAM_PATH = "/edge.frames.v1.FrameService/Stream"
"""The HTTP/2 path of the one call."""

MAX_NAMES = 1024
"""Most output names in an opening message."""

_ATTRIBUTES = {
    ("Returns", "detections"): "has_detections",
    ("Returns", "mask"): "has_mask",
    ("Returns", "annotated_jpeg"): "has_annotated_jpeg",
    ("Returns", "map"): "has_map",
    ("Delivery", "notify_drops"): "notifies_drops",
}
"""(Message, field) -> the name in Python, where it differs."""

_SMALL_BYTES = 1024
"""Up to this size a message is parsed as a whole: to cut payloads out would cost more than to copy them."""

_FLOAT_LIMIT = 3.4028235677973366e38
"""Numbers from here on round to infinity in 32 bits."""

_FLOATS = tuple("<" + "f" * count for count in range(8))
"""Formats of struct for numbers of 32 bits."""

_REASONS = {reason.value: reason for reason in DropReason}

_AGE_FIELD = 9
"""Number of `age_us` of a frame."""

_Part: TypeAlias = bytes | memoryview
_Fields: TypeAlias = dict[str, Any]
"""Names and values of a message's fields."""


def encode_client_message(message: ClientMessage) -> bytes:
    """Return a ClientMessage. Raises InvalidRequest if a value does not fit its field."""
    if isinstance(message, StreamRequest):
        return _serialized("ClientMessage", open=_open_fields(message))
    return b"".join(frame_pieces(encode_frame(message)))


class EncodedFrame(NamedTuple):
    """A frame to send. `fields` are its encoded fields but for the age, which grows while it waits, and the data."""

    fields: bytes
    age_us: int
    data: Buffer


def encode_frame(frame: Frame) -> EncodedFrame:
    """Encode a frame for `frame_pieces`, without a copy of its data.

    Raises InvalidRequest if a value does not fit its field.
    """
    region = frame.region
    fields = _serialized(
        "Frame", header=_header_fields(frame.header), height=frame.height, width=frame.width, encoding=frame.encoding,
        step=frame.step, is_bigendian=frame.is_bigendian, format=frame.format,
        region=None if region is None else {
            "name": region.name, "offset": region.offset, "byte_size": region.byte_size
        },
    )  # fmt: skip
    return EncodedFrame(fields, int(_fitting("Frame", "age_us", frame.age_us)), frame.data)


def frame_pieces(frame: EncodedFrame) -> list[bytes | memoryview]:
    """Return a ClientMessage with a frame as its parts, of which one is a view of the frame's data.

    Raises InvalidRequest if the data are no bytes.
    """
    age = encode_number_field(_AGE_FIELD, frame.age_us) if frame.age_us else b""
    return _nested(2, [frame.fields + age, *_payload(15, "Frame", frame.data)])


def decode_client_message(data: Buffer) -> ClientMessage:
    """Return the decoded client message. Raises InvalidRequest if it is malformed.

    `Frame.data` is a view of `data` if that has more than _SMALL_BYTES.
    """
    cut = split(data, 2) if len(data) > _SMALL_BYTES else None
    if cut is not None and len(cut.payloads) == 1 and (
        not cut.rest or _parsed("ClientMessage", cut.rest).WhichOneof("kind") is None
    ):  # fmt: skip
        inner = split(cut.payloads[0], 15)
        if inner is not None and len(inner.payloads) <= 1:
            return _frame(_parsed("Frame", inner.rest), inner.payloads[0] if inner.payloads else b"")
    wire = _parsed("ClientMessage", data)
    kind = wire.WhichOneof("kind")
    if kind == "open":
        return _open(wire.open)
    if kind == "frame":
        _check_wire_types(wire.frame)
        return _frame(wire.frame, wire.frame.data)
    raise InvalidRequest("a message of a frame stream must hold 'open' or 'frame', got neither")


def encode_server_message(message: ServerMessage, frames_allowed: int = 0) -> bytes:
    """Return a ServerMessage. Raises InvalidRequest if a value does not fit its field."""
    if isinstance(message, FrameResult):
        allowed = encode_number_field(15, frames_allowed) if frames_allowed else b""
        return b"".join((*_nested(2, _result_parts(message)), allowed))
    fields: _Fields
    if isinstance(message, StreamOpened):
        fields = {
            "stream_id": message.stream_id, "model": message.model, "version": message.version,
            "runtime": message.runtime, "labels": message.labels, "counts": _counts_fields(message.counts),
            "server": message.server,
        }  # fmt: skip
        return _serialized("ServerMessage", opened=fields, frames_allowed=frames_allowed)
    if isinstance(message, FrameDropped):
        fields = {
            "header": _header_fields(message.header), "reason": message.reason.value, "detail": message.detail
        }  # fmt: skip
        return _serialized("ServerMessage", dropped=fields, frames_allowed=frames_allowed)
    return _serialized("ServerMessage", credit={}, frames_allowed=frames_allowed)


def decode_server_message(data: Buffer) -> tuple[ServerMessage, int]:
    """Return the decoded server message, and `frames_allowed`.

    The arrays of tensors are views of `data` if that has more than _SMALL_BYTES. A kind of message that this version
    does not know counts as Credit. Raises InvalidRequest if it is malformed.
    """
    cut = split(data, 2) if len(data) > _SMALL_BYTES else None
    if cut is not None and len(cut.payloads) == 1:
        rest = _parsed("ServerMessage", cut.rest)
        inner = split(cut.payloads[0], 14)
        if rest.WhichOneof("kind") is None and inner is not None:
            tensors = [split(payload, 15) for payload in inner.payloads]
            if all(tensor is not None and len(tensor.payloads) <= 1 for tensor in tensors):
                made = [
                    _tensor(_parsed("Tensor", tensor.rest), tensor.payloads[0] if tensor.payloads else b"")
                    for tensor in tensors
                    if tensor is not None
                ]
                return _result(_parsed("Result", inner.rest), made), rest.frames_allowed
    wire = _parsed("ServerMessage", data)
    kind = wire.WhichOneof("kind")
    message: ServerMessage = Credit()
    if kind == "result":
        for part in (wire.result, *wire.result.tensors):
            _check_wire_types(part)
        message = _result(wire.result, [_tensor(tensor, tensor.data) for tensor in wire.result.tensors])
    elif kind == "opened":
        opened = wire.opened
        message = StreamOpened(
            opened.stream_id, opened.model, opened.version, opened.runtime, tuple(opened.labels),
            _counts(opened.counts), opened.server,
        )  # fmt: skip
    elif kind == "dropped":
        dropped = wire.dropped
        message = FrameDropped(_header(dropped.header), _reason(dropped.reason), dropped.detail)
    return message, wire.frames_allowed


# -- nouns to the fields of messages


def _open_fields(request: StreamRequest) -> _Fields:
    returns, delivery = request.returns, request.delivery
    _check_floats("Delivery", max_fps=delivery.max_fps, weight=delivery.weight)
    return {
        "model": request.model, "version": request.version, "stream_id": request.stream_id, "client": request.client,
        "returns": None if returns == Returns() else {
            "tensors": returns.tensors, "top_k": returns.top_k, "detections": returns.has_detections,
            "mask": returns.has_mask, "annotated_jpeg": returns.has_annotated_jpeg,
            "jpeg_quality": returns.jpeg_quality, "map": returns.has_map,
        },
        "delivery": {
            "depth": delivery.depth, "max_age_ms": delivery.max_age_ms, "deadline_ms": delivery.deadline_ms,
            "max_fps": delivery.max_fps, "weight": delivery.weight, "priority": delivery.priority,
            "notify_drops": delivery.notifies_drops,
        },
    }  # fmt: skip


def _header_fields(header: FrameHeader) -> _Fields:
    return {"sec": header.sec, "nanosec": header.nanosec, "frame_id": header.frame_id, "seq": header.seq}


def _drops_fields(counts: Mapping[DropReason, int]) -> list[_Fields]:
    return [{"reason": reason.value, "count": count} for reason, count in counts.items() if count]


def _counts_fields(counts: StreamCounts) -> _Fields:
    return {
        "received": counts.received, "answered": counts.answered, "dropped": _drops_fields(counts.dropped),
        "late": counts.late,
    }  # fmt: skip


def _result_parts(result: FrameResult) -> list[_Part]:
    times = result.times
    fields = _serialized(
        "Result", header=_header_fields(result.header),
        times={
            "received_unix_ns": times.received_unix_ns, "taken_us": times.taken_us, "queued_us": times.queued_us,
            "started_us": times.started_us, "finished_us": times.finished_us,
        },
        dropped=_drops_fields(result.dropped), counts=_counts_fields(result.counts), model=result.model,
        version=result.version, variant=result.variant, runtime=result.runtime, governor=result.governor,
        governor_detail=result.governor_detail, height=result.height, width=result.width,
        batch_size=result.batch_size, classes=[_class_score_fields(item) for item in result.classes],
        detections=[_detection_fields(item) for item in result.detections], error_code=result.error_code,
        error=result.error, is_late=result.is_late,
    )  # fmt: skip
    parts: list[_Part] = [fields]
    for tensor in result.tensors:
        head = _serialized("Tensor", name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
        parts += _nested(14, [head, *_payload(15, "Tensor", raw_from_tensor(tensor))])
    if (mask := result.mask) is not None:
        head = _serialized("Mask", height=mask.height, width=mask.width, encoding=mask.encoding, labels=mask.labels)
        parts += _nested(17, [head, *_payload(4, "Mask", mask.data)])
    if (dense := result.dense_map) is not None:
        numbers = {"minimum": dense.minimum, "maximum": dense.maximum, "score": dense.score}
        _check_floats("DenseMap", **numbers)
        head = _serialized(
            "DenseMap", kind=dense.kind, height=dense.height, width=dense.width, encoding=dense.encoding, **numbers
        )
        parts += _nested(22, [head, *_payload(8, "DenseMap", dense.data)])
    return parts + _payload(18, "Result", result.annotated_jpeg)


def _class_score_fields(item: ClassScore) -> _Fields:
    _check_floats("ClassScore", score=item.score)
    return {"index": item.index, "score": item.score, "label": item.label}


def _detection_fields(item: Detection) -> _Fields:
    fields: _Fields = {
        "x_min": item.x_min, "y_min": item.y_min, "x_max": item.x_max, "y_max": item.y_max, "score": item.score,
        "text_score": item.text_score,
    }  # fmt: skip
    _check_floats("Detection", **fields)
    fields["class_index"], fields["label"], fields["track_id"] = item.class_index, item.label, item.track_id
    if item.keypoints:
        fields["keypoints"] = points = [{"x": one.x, "y": one.y, "score": one.score} for one in item.keypoints]
        for point in points:
            _check_floats("Keypoint", **point)
    if (box := item.rotated) is not None:
        rotated = {"x": box.x, "y": box.y, "width": box.width, "height": box.height, "angle": box.angle}
        _check_floats("RotatedBox", **rotated)
        fields["rotated"] = rotated
    if (mask := item.mask) is not None:
        fields["mask"] = {
            "x": mask.x, "y": mask.y, "width": mask.width, "height": mask.height, "data": bytes(mask.data)
        }  # fmt: skip
    if item.text:
        fields["text"] = item.text
    return fields


# -- messages to nouns


def _open(wire: Any) -> StreamRequest:
    for message in (wire, wire.returns, wire.delivery):
        _check_wire_types(message)
    returns, delivery = wire.returns, wire.delivery
    if len(returns.tensors) > MAX_NAMES:
        raise InvalidRequest(f"'tensors' of Returns must be at most {MAX_NAMES} names, got {len(returns.tensors)}")
    return StreamRequest(
        wire.model, wire.version, wire.stream_id,
        Returns(
            tuple(returns.tensors), returns.top_k, returns.detections, returns.mask, returns.annotated_jpeg,
            returns.jpeg_quality, returns.map,
        ),
        Delivery(
            delivery.depth or 1, delivery.max_age_ms, delivery.deadline_ms, delivery.max_fps, delivery.weight or 1.0,
            delivery.priority, delivery.notify_drops,
        ),
        wire.client,
    )  # fmt: skip


def _frame(wire: Any, data: Buffer) -> Frame:
    region = None
    if wire.HasField("region"):
        region = RegionSlice(wire.region.name, wire.region.offset, wire.region.byte_size)
    return Frame(
        _header(wire.header), wire.height, wire.width, wire.encoding, wire.step, wire.is_bigendian, wire.format,
        region, wire.age_us, data,
    )  # fmt: skip


def _header(wire: Any) -> FrameHeader:
    return FrameHeader(wire.sec, wire.nanosec, wire.frame_id, wire.seq)


def _reason(number: int) -> DropReason:
    return _REASONS.get(number, DropReason.OTHER)


def _drops(entries: Iterable[Any]) -> dict[DropReason, int]:
    """Reasons that this version does not know count as OTHER, so that the sum stays right."""
    counts: dict[DropReason, int] = {}
    for entry in entries:
        reason = _reason(entry.reason)
        counts[reason] = counts.get(reason, 0) + entry.count
    return counts


def _counts(wire: Any) -> StreamCounts:
    return StreamCounts(wire.received, wire.answered, _drops(wire.dropped), wire.late)


def _result(wire: Any, tensors: Sequence[Tensor]) -> FrameResult:
    times, mask = wire.times, wire.mask
    return FrameResult(
        _header(wire.header),
        FrameTimes(times.received_unix_ns, times.taken_us, times.queued_us, times.started_us, times.finished_us),
        _drops(wire.dropped), _counts(wire.counts), wire.model, wire.version, wire.variant, wire.runtime,
        wire.governor, wire.governor_detail, wire.height, wire.width, wire.batch_size, tuple(tensors),
        tuple(ClassScore(item.index, item.score, item.label) for item in wire.classes),
        tuple(
            Detection(
                item.x_min, item.y_min, item.x_max, item.y_max, item.score, item.class_index, item.label,
                tuple(Keypoint(point.x, point.y, point.score) for point in item.keypoints), item.track_id,
                _object_mask(item.mask) if item.HasField("mask") else None,
                _rotated_box(item.rotated) if item.HasField("rotated") else None,
                text=item.text, text_score=item.text_score,
            )
            for item in wire.detections
        ),
        Mask(mask.height, mask.width, mask.encoding, mask.data, tuple(mask.labels)) if wire.HasField("mask") else None,
        wire.annotated_jpeg, wire.error_code, wire.error, wire.is_late,
        dense_map=_dense_map(wire.map) if wire.HasField("map") else None,
    )  # fmt: skip


def _dense_map(wire: Any) -> DenseMap:
    return DenseMap(
        wire.kind, wire.height, wire.width, wire.encoding, wire.data, wire.minimum, wire.maximum, wire.score
    )


def _object_mask(wire: Any) -> ObjectMask:
    return ObjectMask(wire.x, wire.y, wire.width, wire.height, wire.data)


def _rotated_box(wire: Any) -> RotatedBox:
    return RotatedBox(wire.x, wire.y, wire.width, wire.height, wire.angle)


def _tensor(wire: Any, data: Buffer) -> Tensor:
    dtype = BY_NAME.get(wire.datatype)
    if dtype is None:
        raise InvalidRequest(f"tensor '{wire.name}' of a result has the unknown datatype '{wire.datatype}'")
    shape = tuple(wire.shape)
    try:
        return tensor_from_raw(wire.name, dtype, shape, data, model="")
    except InvalidRequest:
        raise InvalidRequest(
            f"tensor '{wire.name}' of a result, {wire.datatype}{list(shape[:MAX_RANK])}, does not fit its {len(data)} "
            "bytes"
        ) from None


# -- the wire


@functools.cache
def _protobuf() -> tuple[type[Exception], Any]:
    """Return protobuf's DecodeError and UnknownFieldSet. An import in each message would take longer than their use."""
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    return DecodeError, UnknownFieldSet


@functools.cache
def _class(name: str) -> MessageClass:
    from edge_server.protocol.messages import message_class

    return message_class(f"edge.frames.v1.{name}")


def _serialized(name: str, /, **values: Any) -> bytes:
    """Return a message; nested ones are given as their fields. Raises InvalidRequest that names the value that does not
    fit."""
    try:
        message = _class(name)(**values)
    except (TypeError, ValueError):
        message = _class(name)(**_fitting_fields(name, values))
    octets: bytes = message.SerializeToString()
    return octets


def _fitting_fields(name: str, values: _Fields) -> _Fields:
    """Return values that fit their fields, see `_fitting`."""
    found: _Fields = {}
    for key, value in values.items():
        nested = _class(name).DESCRIPTOR.fields_by_name[key].message_type
        if nested is None or value is None:
            found[key] = _fitting(name, key, value)
        elif isinstance(value, dict):
            found[key] = _fitting_fields(nested.name, value)
        else:
            found[key] = [_fitting_fields(nested.name, one) for one in value]
    return found


def _fitting(name: str, key: str, value: Any) -> Any:
    """Return a value that fits the field: text without lone surrogates, which UTF-8 cannot represent."""
    try:
        _class(name)(**{key: value})
    except UnicodeEncodeError:
        return _without_surrogates(value) if isinstance(value, str) else [_without_surrogates(item) for item in value]
    except (TypeError, ValueError):
        field = _class(name).DESCRIPTOR.fields_by_name[key]
        if field.type in (field.TYPE_STRING, field.TYPE_BOOL):
            expected = f"{'text' if field.type == field.TYPE_STRING else 'a boolean'}, got {type(value).__name__}"
        elif not hasattr(value, "__index__"):
            expected = f"an integer, got {type(value).__name__}"
        else:
            bits = 32 if field.type == field.TYPE_UINT32 else 64
            least, most = (-(1 << 63), (1 << 63) - 1) if field.type == field.TYPE_INT64 else (0, (1 << bits) - 1)
            expected = f"{least} to {most}, got {value}"
        raise InvalidRequest(f"'{_ATTRIBUTES.get((name, key), key)}' of {name} must be {expected}") from None
    return value


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _check_floats(name: str, /, **values: float) -> None:
    """Raise InvalidRequest for a number that would become infinite. protobuf does not."""
    try:
        struct.pack(_FLOATS[len(values)], *values.values())
    except OverflowError:
        key = next(key for key, value in values.items() if abs(value) >= _FLOAT_LIMIT and not math.isinf(value))
        message = f"'{key}' of {name} must be a number that fits into 32 bits, got {values[key]!r}"
    else:
        return
    raise InvalidRequest(message)


def _payload(number: int, name: str, value: Buffer) -> list[_Part]:
    """Return a field of bytes as its parts; nothing for empty bytes."""
    try:
        view = memoryview(value)
    except TypeError:
        field = _class(name).DESCRIPTOR.fields_by_number[number].name
        raise InvalidRequest(f"'{field}' of {name} must be bytes, got {type(value).__name__}") from None
    if not view.nbytes:
        return []
    return [encode_delimited_header(number, view.nbytes), view.cast("B") if view.c_contiguous else view.tobytes()]


def _nested(number: int, parts: Sequence[_Part]) -> list[_Part]:
    """Return a field with a message that consists of `parts`."""
    return [encode_delimited_header(number, sum(map(len, parts))), *parts]


def _parsed(name: str, data: Buffer) -> Any:
    """Return a parsed message. Raises InvalidRequest if it is malformed, or a field has another wire type."""
    decode_error, _ = _protobuf()
    try:
        message = _class(name).FromString(bytes(data))
    except (decode_error, UnicodeDecodeError) as error:
        message = str(error)
    else:
        _check_wire_types(message)
        return message
    raise InvalidRequest(f"a message of a frame stream is malformed: {name}: {message}")


def _check_wire_types(message: Any) -> None:
    """Raise InvalidRequest for a known field of another wire type. protobuf would skip it as an unknown field."""
    _, unknown_fields = _protobuf()
    for unknown in unknown_fields(message):
        field = message.DESCRIPTOR.fields_by_number.get(unknown.field_number)
        if field is not None:
            raise InvalidRequest(
                f"a message of a frame stream is malformed: '{field.name}' of {message.DESCRIPTOR.name} has the wire "
                f"type {unknown.wire_type}"
            )
