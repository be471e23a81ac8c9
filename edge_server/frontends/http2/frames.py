"""Encoder of HTTP/2 frames, RFC 9113 sections 4.1, 6 and 7."""

from __future__ import annotations

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""Connection preface, the first bytes from a client, section 3.4."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
"""Flags. Flags that a frame type does not define are ignored."""

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)
"""Settings, section 6.5.2."""

FRAME_HEADER_BYTES = 9
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW_BYTES = MAX_STREAM_ID = 2**31 - 1

HEADER = struct.Struct(">HBBBI")
"""Frame header: upper two octets and lower octet of the length, type, flags, stream."""

WINDOW_UPDATE_FRAME = struct.Struct(">IBII")
"""Whole WINDOW_UPDATE frame: length and type, flags, stream, increment."""

UINT32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class Http2ErrorCode(enum.IntEnum):
    """HTTP/2 error codes, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def encode_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 255, kind, flags, stream_id) + payload


def encode_frame_header(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame with a payload of `size` bytes."""
    return HEADER.pack(size >> 8, size & 255, kind, flags, stream_id)


def encode_settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return encode_frame(SETTINGS, 0, 0, b"".join(SETTING.pack(name, value) for name, value in values.items()))


def encode_window_update(stream_id: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return encode_frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(size))


def encode_goaway(last_stream_id: int, code: Http2ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame."""
    return encode_frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code) + text.encode("utf-8", "replace"))


SETTINGS_ACK = encode_frame(SETTINGS, ACK, 0)
