"""Raw fields of a serialized message: large payloads as views, without a copy.

Generated classes copy every tensor twice. A message is therefore split in two: its large payloads, found by walking
over the fields, and the few bytes that remain, which the message class reads with all of protobuf's rules (defaults,
merging, oneofs, maps). Whatever the walk does not understand it leaves to the message class as a whole, so that both
ways always agree. Format: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.protocol.wire_format import DELIMITED, read_varint, skip


@dataclass(slots=True)
class SplitMessage:
    """A message taken apart: the serialized fields that stay, and the payloads cut out, in their order."""

    rest: bytes | memoryview
    payloads: list[memoryview]


def split(data: bytes | memoryview, field: int, least_bytes: int = 0) -> SplitMessage | None:
    """Cut every payload of the length-delimited `field` out of the serialized message `data`.

    Payloads shorter than `least_bytes` stay. None when the walk met anything but whole, plain fields (a truncated
    message, a group, an overlong number): the caller must hand all of `data` to the message class. Nothing is
    allocated but views and the joined rest.
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
            # Tags and lengths of one octet are so common that the calls are spared for them.
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
