"""Encoder and decoder of protobuf's numbers, tags and lengths (protobuf.dev/programming-guides/encoding).

For messages coded by hand, where generated classes would copy large payloads or cost an import.
"""

from __future__ import annotations

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
"""Wire types, the lowest three bits of a tag. 3 and 4 are groups, which no message here uses."""

_MAX_VARINT_BYTES = 10
_SHORT = tuple(bytes((number,)) for number in range(0x80))


def read_varint(view: memoryview | bytes, position: int) -> tuple[int, int]:
    """Return the number at `position` and its end. Raises IndexError beyond the end, ValueError over 64 bits."""
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


def skip(view: memoryview, kind: int, position: int) -> int:
    """Return the end position of a value of wire type `kind` at `position`; it may be beyond the end of `view`."""
    if kind == VARINT:
        return read_varint(view, position)[1]
    if kind == FIXED64:
        return position + 8
    if kind == FIXED32:
        return position + 4
    raise ValueError(f"wire type {kind}")


def encode_varint(number: int) -> bytes:
    """Return `number`, 0 to 2**64 - 1, as a protobuf varint."""
    if number < 0x80:
        return _SHORT[number]
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def encode_delimited(field: int, payload: bytes) -> bytes:
    """Return a whole length-delimited field: tag, length, payload."""
    return encode_varint(field << 3 | DELIMITED) + encode_varint(len(payload)) + payload


def encode_delimited_header(field: int, size: int) -> bytes:
    """Return tag and length of a length-delimited field whose payload of `size` bytes is sent separately."""
    return encode_varint(field << 3 | DELIMITED) + encode_varint(size)


def encode_number_field(field: int, number: int) -> bytes:
    """Return a whole varint field. Negative numbers are encoded as 64-bit two's complement (int32, int64)."""
    return encode_varint(field << 3 | VARINT) + encode_varint(number & 0xFFFF_FFFF_FFFF_FFFF)


def encode_text(value: str) -> bytes:
    """Return `value` as UTF-8. Lone surrogates, which UTF-8 cannot encode, become question marks."""
    return value.encode("utf-8", "replace")
