"""Protobuf's wire format, as far as tensors need it: large payloads are cut out of a message as views, never copied.

Generated classes copy every tensor twice. A message is therefore split in two: its large payloads, found by walking
over the fields, and the few bytes that remain, which the message class reads with all of protobuf's rules (defaults,
merging, oneofs, maps). Whatever the walk does not understand it leaves to the message class as a whole, so that both
ways always agree. Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


@dataclass(slots=True)
class Split:
    """A message taken apart: the serialized fields that stay, and the payloads cut out, in their order."""

    rest: bytes | memoryview
    payloads: list[memoryview]


def split(data: bytes | memoryview, field: int, least_bytes: int = 0) -> Split | None:
    """Cut every payload of the length-delimited `field` out of the serialized message `data`.

    Payloads shorter than `least_bytes` stay. None when the walk met anything but whole, plain fields (a truncated
    message, a group, an overlong number): the caller must hand all of `data` to the message class. Nothing is
    allocated but views and the joined rest.
    """
    view = memoryview(data)
    wanted = field << 3 | _DELIMITED
    kept: list[memoryview] = []
    payloads: list[memoryview] = []
    keep_from = position = 0
    end = len(view)
    while position < end:
        start = position
        try:
            # Tags and lengths of one octet are so common that the calls are spared for them.
            tag = view[position]
            position += 1
            if tag >= 0x80:
                tag, position = read_varint(view, start)
            if tag & 7 == _DELIMITED:
                size = view[position]
                position += 1
                if size >= 0x80:
                    size, position = read_varint(view, position - 1)
                body = position
                position += size
            else:
                position = _skip(view, tag & 7, position)
        except (IndexError, ValueError):
            return None
        # A field number of 0, or one beyond 29 bits, makes the whole message invalid.
        if position > end or not 8 <= tag < 1 << 32:
            return None
        if tag == wanted and size >= least_bytes:
            payloads.append(view[body:position])
            if keep_from < start:
                kept.append(view[keep_from:start])
            keep_from = position
    if keep_from < end:
        kept.append(view[keep_from:])
    return Split(kept[0] if len(kept) == 1 else b"".join(kept), payloads)


def read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position` and where it ends. Raises IndexError beyond the end, ValueError over 64 bits."""
    octet = view[position]
    if octet < 0x80:
        return octet, position + 1
    number = octet & 0x7F
    for index in range(1, _MAX_VARINT_BYTES):
        octet = view[position + index]
        number |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            if number >> 64:
                break
            return number, position + index + 1
    raise ValueError("a number of more than 64 bits")


def _skip(view: memoryview, kind: int, position: int) -> int:
    if kind == _VARINT:
        return read_varint(view, position)[1]
    if kind == _FIXED64:
        return position + 8
    if kind == _FIXED32:
        return position + 4
    raise ValueError(f"wire type {kind}")


def varint(number: int) -> bytes:
    """Return `number`, 0 to 2**64 - 1, as protobuf writes it."""
    if number < 0x80:
        return _SHORT[number]
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


_SHORT = tuple(bytes((number,)) for number in range(0x80))


def delimited(field: int, payload: bytes) -> bytes:
    """Return a whole length-delimited field: tag, length, payload."""
    return varint(field << 3 | _DELIMITED) + varint(len(payload)) + payload


def delimited_head(field: int, size: int) -> bytes:
    """Return tag and length of a length-delimited field whose payload of `size` bytes is sent separately."""
    return varint(field << 3 | _DELIMITED) + varint(size)


def number_field(field: int, number: int) -> bytes:
    """Return a whole varint field. Negative numbers travel as their 64-bit two's complement (int32, int64)."""
    return varint(field << 3 | _VARINT) + varint(number & 0xFFFF_FFFF_FFFF_FFFF)


def text(value: str) -> bytes:
    """Return `value` as UTF-8; lone surrogates, which UTF-8 cannot say, become question marks."""
    return value.encode("utf-8", "replace")
