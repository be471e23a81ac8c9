"""What gRPC puts into HTTP/2 frames: messages, the header fields of a request, and the status of a call.

Specification: github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
import urllib.parse
from collections.abc import Iterable

from edge_server.http2.frames import ConnectionFault, Http2ErrorCode
from edge_server.http2.header_blocks import HeaderBlock

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""

PREFIX_BYTES = PREFIX.size

RESET_STATUS: dict[int, str] = {
    Http2ErrorCode.REFUSED_STREAM: "UNAVAILABLE",
    Http2ErrorCode.CANCEL: "CANCELLED",
    Http2ErrorCode.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    Http2ErrorCode.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}
"""Error code of RST_STREAM -> name of the status, "HTTP2 Transport Mapping"; of others INTERNAL."""

_UNKNOWN = 2


def request_fields(
    path: str, authority: str, metadata: Iterable[tuple[str, str]], *, is_tls: bool
) -> list[tuple[bytes, bytes]]:
    """Return the header fields of a call."""
    fields = (
        (":method", "POST"),
        (":scheme", "https" if is_tls else "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    return [(name.encode(), value.encode()) for name, value in fields]


def take_message(data: bytearray) -> bytes | None:
    """Remove the first message, without its prefix, from received data. Return None if it is incomplete.

    Raises ConnectionFault for a compressed one.
    """
    if len(data) < PREFIX_BYTES:
        return None
    is_compressed, size = PREFIX.unpack_from(data)
    if is_compressed:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "a message is compressed, which was not offered")
    end = PREFIX_BYTES + size
    if len(data) < end:
        return None
    message = bytes(memoryview(data)[PREFIX_BYTES:end])
    del data[:end]
    return message


def read_status(headers: HeaderBlock) -> tuple[int | None, str]:
    """Return the number and the message of a status. None: the headers or trailers have none."""
    fields = dict(headers.pairs)
    status = fields.get(b"grpc-status")
    if status is None:
        return None, ""
    message = urllib.parse.unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return int(status) if status.isdigit() and len(status) < 4 else _UNKNOWN, message
