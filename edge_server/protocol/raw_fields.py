"""Splitter of serialized protobuf messages: large payloads become views without a copy, protobuf parses the rest.

Generated classes copy every tensor twice. A scan of the fields therefore splits a message into its large payloads and
the few remaining bytes. The message class parses those bytes with all of protobuf's rules (defaults, merging, oneofs,
maps). If the scan does not understand a message, the message class parses all of it, so that both ways always agree.
Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from edge_server.protocol.protobuf_wire_format import DELIMITED, read_varint, skip
from edge_server.record import record


@record(slots=True)
class SplitMessage:
    """A split message: the serialized fields that remain, and the extracted payloads in order."""

    rest: bytes | memoryview
    payloads: list[memoryview]


def split(data: bytes | bytearray | memoryview, field: int, least_bytes: int = 0) -> SplitMessage | None:
    """Extract every payload of the length-delimited `field` from the serialized message `data`.

    Payloads shorter than `least_bytes` remain. Return None if the message has anything but complete, plain fields (it
    is truncated, or has a group or an overlong number): the caller must then pass all of `data` to the message class.
    Allocates only views and the joined rest.
    """
    view = memoryview(data)
    wanted = field << 3 | DELIMITED
    kept: list[memoryview] = []
    payloads: list[memoryview] = []
    keep_from = position = 0
    end = len(view)
    while position < end:
        start = position
        try:
            # Tags and lengths of one octet are so common that they are read without a call.
            tag = view[position]
            position += 1
            if tag >= 0x80:
                tag, position = read_varint(view, start)
            if tag & 7 == DELIMITED:
                size = view[position]
                position += 1
                if size >= 0x80:
                    size, position = read_varint(view, position - 1)
                body = position
                position += size
            else:
                position = skip(view, tag & 7, position)
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
    return SplitMessage(kept[0] if len(kept) == 1 else b"".join(kept), payloads)
