"""Table-driven protobuf encoder and decoder for messages that are coded by hand.

Decoding follows proto3: unknown fields are skipped, the last of several values counts, an embedded message in several
parts is merged, and repeated numbers may be packed or not. Unlike proto3 it refuses groups, and known fields with
another wire type. Decoded `bytes` are views of the input. Encoding copies them once. Safe from any thread.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, index
from typing import Any, TypeAlias

from edge_server.errors import InvalidRequest
from edge_server.protocol.wire_format import DELIMITED, FIXED32, VARINT, read_varint, skip, text, varint

Buffer: TypeAlias = "bytes | bytearray | memoryview"
_Part: TypeAlias = "bytes | memoryview"
_Values: TypeAlias = "list[Any]"


class FieldKind(Enum):
    """Type of a field. NUMBERS are repeated int64. The value is the type's name in .proto files, with its wire type."""

    UINT32 = "uint32", VARINT
    UINT64 = "uint64", VARINT
    INT64 = "int64", VARINT
    BOOL = "bool", VARINT
    FLOAT = "float", FIXED32
    STRING = "string", DELIMITED
    BYTES = "bytes", DELIMITED
    MESSAGE = "message", DELIMITED
    NUMBERS = "repeated int64", DELIMITED

    def __init__(self, proto_name: str, wire_type: int) -> None:
        self.proto_name = proto_name
        self.wire_type = wire_type


_RANGES = {
    FieldKind.UINT32: (0, (1 << 32) - 1),
    FieldKind.UINT64: (0, (1 << 64) - 1),
    FieldKind.INT64: (-(1 << 63), (1 << 63) - 1),
    FieldKind.BOOL: (0, 1),
    FieldKind.NUMBERS: (-(1 << 63), (1 << 63) - 1),
}
_MAX_TAG_BYTES = 5
_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class MessageField:
    number: int
    name: str
    kind: FieldKind
    message: Message | None = None
    is_repeated: bool = False
    limit: int = 0
    """Most values of a repeated field; 0: no limit."""

    @property
    def default(self) -> Any:
        return None if self.is_repeated else _DEFAULTS.get(self.kind)


_DEFAULTS = {
    FieldKind.UINT32: 0,
    FieldKind.UINT64: 0,
    FieldKind.INT64: 0,
    FieldKind.BOOL: False,
    FieldKind.FLOAT: 0.0,
    FieldKind.STRING: "",
    FieldKind.BYTES: b"",
}


class Message:
    """Encoding of one message. Fields are in the order of `make`'s arguments and of the values that `take` returns.

    Absent scalars reach `make` as proto3's defaults, absent messages as None, repeated fields as tuples. `is_oneof`: of
    the message fields, the last one received counts. Leading floats (the many boxes and keypoints of a result) are
    written all at once, and read all at once if they arrive in the same layout: `lead`.
    """

    __slots__ = (
        "defaults",
        "embedded",
        "fields",
        "is_oneof",
        "lead",
        "lead_tags",
        "make",
        "name",
        "repeated",
        "slots",
        "take",
        "writers",
    )

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *fields: MessageField,
        take: Callable[[Any], Sequence[Any]] | None = None,
        is_oneof: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.fields = fields
        self.take = take or _attributes(fields)
        self.is_oneof = is_oneof
        self.defaults = [field.default for field in fields]
        floats = list(itertools.takewhile(lambda field: field.kind is FieldKind.FLOAT and field.number < 16, fields))
        self.lead = struct.Struct("<" + "Bf" * len(floats))
        self.lead_tags = tuple(field.number << 3 | FIXED32 for field in floats)
        self.writers = [(field, varint(field.number << 3 | field.kind.wire_type)) for field in fields]
        self.slots = {field.number: (index, field) for index, field in enumerate(fields)}
        self.repeated = [index for index, field in enumerate(fields) if field.is_repeated]
        self.embedded = [
            (index, field.message) for index, field in enumerate(fields) if field.message and not field.is_repeated
        ]


def _attributes(fields: tuple[MessageField, ...]) -> Callable[[Any], Sequence[Any]]:
    if len(fields) < 2:
        return lambda noun: [getattr(noun, field.name) for field in fields]
    return attrgetter(*(field.name for field in fields))


# Writing -------------------------------------------------------------------------------------------------------------


def encode(message: Message, noun: Any) -> bytes:
    parts: list[_Part] = []
    _write(message, noun, parts)
    return b"".join(parts)


def _write(message: Message, noun: Any, parts: list[_Part]) -> int:
    """Append the message's bytes and return their count."""
    values = message.take(noun)
    writers = message.writers
    size = message.lead.size
    if size:
        parts.append(_lead(message, values))
        values, writers = values[len(message.lead_tags) :], writers[len(message.lead_tags) :]
    for (field, tag), value in zip(writers, values, strict=True):
        if _is_left_out(field.kind, value):
            continue
        if field.is_repeated and field.kind is not FieldKind.NUMBERS:
            for one in value:
                size += _write_value(message, field, tag, one, parts)
        else:
            size += _write_value(message, field, tag, value, parts)
    return size


def _lead(message: Message, values: Sequence[Any]) -> bytes:
    try:
        return message.lead.pack(*itertools.chain.from_iterable(zip(message.lead_tags, values, strict=False)))
    except (OverflowError, struct.error):
        for (field, _), value in zip(message.writers, values, strict=True):
            _float(message, field, value)  # raises an error that names the field
        raise


def _is_left_out(kind: FieldKind, value: Any) -> bool:
    """Return whether proto3 writes nothing: for defaults and absent messages. -0.0 is not a default."""
    if kind is FieldKind.MESSAGE:
        return value is None
    return not value and not (isinstance(value, float) and math.copysign(1.0, value) < 0)


def _write_value(message: Message, field: MessageField, tag: bytes, value: Any, parts: list[_Part]) -> int:
    kind = field.kind
    if kind is FieldKind.MESSAGE:
        assert field.message is not None
        place = len(parts)
        parts.append(tag)
        size = _write(field.message, value, parts)
        parts[place] = head = tag + varint(size)
        return len(head) + size
    if kind.wire_type == VARINT:
        written = tag + varint(_checked(message, field, value) & _UNSIGNED)
        parts.append(written)
        return len(written)
    if kind is FieldKind.FLOAT:
        written = tag + _float(message, field, value)
        parts.append(written)
        return len(written)
    payload = _payload(message, field, value)
    head = tag + varint(len(payload))
    parts += (head, payload)
    return len(head) + len(payload)


def _checked(message: Message, field: MessageField, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        raise _unfit(message, field, f"an integer, got {type(value).__name__}") from None
    least, most = _RANGES[field.kind]
    if not least <= number <= most:
        raise _unfit(message, field, f"{least} to {most}, got {number}")
    return number


def _float(message: Message, field: MessageField, value: Any) -> bytes:
    try:
        return struct.pack("<f", value)
    except (OverflowError, struct.error):
        raise _unfit(message, field, f"a number that fits into 32 bits, got {value!r}") from None


def _payload(message: Message, field: MessageField, value: Any) -> _Part:
    if field.kind is FieldKind.STRING:
        if not isinstance(value, str):
            raise _unfit(message, field, f"text, got {type(value).__name__}")
        return text(value)
    if field.kind is FieldKind.NUMBERS:
        return b"".join(varint(_checked(message, field, number) & _UNSIGNED) for number in value)
    if isinstance(value, bytes):
        return value
    try:
        view = memoryview(value)
    except TypeError:
        raise _unfit(message, field, f"bytes, got {type(value).__name__}") from None
    return view.cast("B") if view.c_contiguous else view.tobytes()


def _unfit(message: Message, field: MessageField, what: str) -> InvalidRequest:
    return InvalidRequest(f"'{field.name}' of {message.name} must be {what}")


# Reading -------------------------------------------------------------------------------------------------------------


def decode(message: Message, data: Buffer) -> _Values:
    view = memoryview(data)
    values = message.defaults.copy()
    try:
        _read(message, view, 0, len(view), values)
    except IndexError:
        raise InvalidRequest(f"{message.name} is cut off") from None
    except (ValueError, struct.error) as error:
        raise InvalidRequest(f"{message.name} is malformed: {error}") from None
    return _made(message, values)  # type: ignore[no-any-return]


def _read(message: Message, view: memoryview, position: int, end: int, values: _Values) -> None:
    """Read the fields in `view[position:end]` into `values`, merging with values already there.

    Raises IndexError and ValueError on malformed bytes.
    """
    lead = message.lead
    if 0 < lead.size <= end - position:
        pairs = lead.unpack_from(view, position)
        if pairs[::2] == message.lead_tags:
            values[: len(message.lead_tags)] = pairs[1::2]
            position += lead.size
    while position < end:
        tag = view[position]
        start = position
        position += 1
        if tag >= 0x80:
            tag, position = read_varint(view, start)
        if not 8 <= tag < 1 << 32 or position - start > _MAX_TAG_BYTES:
            raise ValueError(f"field number {tag >> 3} in {position - start} bytes")
        found = message.slots.get(tag >> 3)
        wire_type = tag & 7
        if wire_type == DELIMITED:
            size, start = read_varint(view, position)
            position = start + size
            if position > end:
                raise IndexError
            if found is not None:
                _read_delimited(message, *found, view, start, position, values)
        elif found is None:
            position = skip(view, wire_type, position)
        else:
            position = _read_number(message, *found, wire_type, view, position, values)
    if position > end:
        raise IndexError


def _read_delimited(
    message: Message, slot: int, field: MessageField, view: memoryview, start: int, end: int, values: _Values
) -> None:
    kind = field.kind
    if kind is FieldKind.MESSAGE:
        _read_message(message, slot, field, view, start, end, values)
    elif kind is FieldKind.STRING:
        try:
            found = str(view[start:end], "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"'{field.name}' of {message.name} is not UTF-8") from None
        _keep(message, slot, field, found, values)
    elif kind is FieldKind.BYTES:
        values[slot] = view[start:end]
    elif kind is FieldKind.NUMBERS:
        if values[slot] is None:
            values[slot] = []
        while start < end:
            number, start = read_varint(view, start)
            values[slot].append(_signed(number))
        if start > end:
            raise IndexError
    else:
        raise _wrong_type(message, field, DELIMITED)


def _read_message(
    message: Message, slot: int, field: MessageField, view: memoryview, start: int, end: int, values: _Values
) -> None:
    inner = field.message
    assert inner is not None
    if field.is_repeated:
        fresh = inner.defaults.copy()
        _read(inner, view, start, end, fresh)
        _keep(message, slot, field, _made(inner, fresh), values)
        return
    if message.is_oneof:
        for other, _ in message.embedded:
            if other != slot:
                values[other] = None
    if values[slot] is None:
        values[slot] = inner.defaults.copy()
    _read(inner, view, start, end, values[slot])


def _keep(message: Message, slot: int, field: MessageField, value: Any, values: _Values) -> None:
    if not field.is_repeated:
        values[slot] = value
    elif values[slot] is None:
        values[slot] = [value]
    elif 0 < field.limit <= len(values[slot]):
        raise ValueError(f"'{field.name}' of {message.name} holds more than {field.limit} values")
    else:
        values[slot].append(value)


def _read_number(
    message: Message, slot: int, field: MessageField, wire_type: int, view: memoryview, position: int, values: _Values
) -> int:
    """Read an unpacked number and return its end position."""
    kind = field.kind
    if kind is FieldKind.FLOAT and wire_type == FIXED32:
        (values[slot],) = struct.unpack_from("<f", view, position)
        return position + 4
    if wire_type != VARINT or (kind.wire_type != VARINT and kind is not FieldKind.NUMBERS):
        raise _wrong_type(message, field, wire_type)
    number, position = read_varint(view, position)
    if kind is FieldKind.UINT32:
        values[slot] = number & 0xFFFF_FFFF
    elif kind is FieldKind.INT64:
        values[slot] = _signed(number)
    elif kind is FieldKind.BOOL:
        values[slot] = number != 0
    elif kind is FieldKind.NUMBERS:
        _keep(message, slot, field, _signed(number), values)
    else:
        values[slot] = number
    return position


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _wrong_type(message: Message, field: MessageField, wire_type: int) -> ValueError:
    return ValueError(f"'{field.name}' of {message.name} has wire type {wire_type}, not {field.kind.wire_type}")


def _made(message: Message, values: _Values) -> Any:
    for slot, inner in message.embedded:
        if values[slot] is not None:
            values[slot] = _made(inner, values[slot])
    for slot in message.repeated:
        values[slot] = () if values[slot] is None else tuple(values[slot])
    return message.make(*values)
