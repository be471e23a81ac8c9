"""HTTP/2 frames, RFC 9113 sections 4.1, 6 and 7: their encoder, and what server and client read the same way."""

from __future__ import annotations

import enum
import struct
from collections import deque

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
MAX_FRAME_BYTES = 2**24 - 1
"""Largest frame that an end may permit the other one to send, section 4.2."""

MAX_WINDOW_BYTES = MAX_STREAM_ID = 2**31 - 1

HEADER = struct.Struct(">HBBBI")
"""Frame header: upper two octets and lower octet of the length, type, flags, stream."""

WINDOW_UPDATE_FRAME = struct.Struct(">IBII")
"""Whole WINDOW_UPDATE frame: length and type, flags, stream, increment."""

UINT32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")
_GOAWAY_HEAD = struct.Struct(">II")

_MAX_SETTINGS = 64
"""Settings of one frame."""


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


class ConnectionFault(ValueError):
    """Reason to end a connection: the other end violated the protocol or exceeded a limit. Section 5.4.1."""

    def __init__(self, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def encode_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 255, kind, flags, stream_id) + payload


def encode_frame_header(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame with a payload of `size` bytes."""
    return HEADER.pack(size >> 8, size & 255, kind, flags, stream_id)


def encode_header_frames(stream_id: int, flags: int, block: bytes) -> bytes:
    """Return HEADERS, and CONTINUATION for what is above the frame size that every receiver accepts. Section 6.10."""
    most = DEFAULT_FRAME_BYTES
    if len(block) <= most:
        return encode_frame(HEADERS, flags | END_HEADERS, stream_id, block)
    data = encode_frame(HEADERS, flags, stream_id, block[:most])
    for start in range(most, len(block), most):
        is_last = start + most >= len(block)
        data += encode_frame(CONTINUATION, END_HEADERS if is_last else 0, stream_id, block[start : start + most])
    return data


def encode_reset(stream_id: int, code: Http2ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return encode_frame(RST_STREAM, 0, stream_id, UINT32.pack(code))


def encode_settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return encode_frame(SETTINGS, 0, 0, b"".join(SETTING.pack(name, value) for name, value in values.items()))


def encode_window_update(stream_id: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return encode_frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(size))


def encode_greeting(settings: dict[int, int], window_bytes: int) -> bytes:
    """Return the first frames of an end: its settings, and the window of the connection."""
    return encode_settings(settings) + encode_window_update(0, window_bytes - DEFAULT_WINDOW_BYTES)


def encode_goaway(last_stream_id: int, code: Http2ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame."""
    return encode_frame(GOAWAY, 0, 0, _GOAWAY_HEAD.pack(last_stream_id, code) + text.encode("utf-8", "replace"))


SETTINGS_ACK = encode_frame(SETTINGS, ACK, 0)


def take_pieces(queue: deque[bytes | memoryview], most: int) -> tuple[list[bytes | memoryview], int]:
    """Remove up to `most` bytes from the front of a queue. Return them in pieces, without a copy, and their number."""
    pieces = []
    left = most
    while queue and left:
        piece = queue.popleft()
        if len(piece) > left:
            whole = memoryview(piece)
            queue.appendleft(whole[left:])
            piece = whole[:left]
        pieces.append(piece)
        left -= len(piece)
    return pieces, most - left


def without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority, sections 6.1 and 6.2.

    Raises ConnectionFault.
    """
    start, end = 0, len(payload)
    if flags & PADDED:
        start = 1
        end -= payload[0] if payload else 1
    if flags & HAS_PRIORITY and kind == HEADERS:
        start += 5  # section 5.3: priorities are ignored
    if start > end:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[start:end]


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return names and values of a SETTINGS frame, section 6.5.2. Raises ConnectionFault."""
    if len(payload) % SETTING.size or len(payload) > _MAX_SETTINGS * SETTING.size:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is no multiple of 6 bytes, or too long")
    settings = list(SETTING.iter_unpack(payload))
    for name, value in settings:
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW_BYTES:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the initial window is too large")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"a maximum frame size of {value} is not allowed")
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value} is not allowed")
    return settings


def read_uint32(name: str, payload: bytes) -> int:
    """Return the number that is the payload of RST_STREAM or WINDOW_UPDATE. Raises ConnectionFault."""
    if len(payload) != UINT32.size:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"{name} is not of 4 bytes")
    return int(UINT32.unpack(payload)[0])


def read_goaway(payload: bytes) -> tuple[int, int, str]:
    """Return the last stream, the error code and at most 248 bytes of the text of a GOAWAY frame.

    Raises ConnectionFault.
    """
    if len(payload) < _GOAWAY_HEAD.size:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
    last, code = _GOAWAY_HEAD.unpack_from(payload)
    return last & MAX_STREAM_ID, code, payload[8:256].decode("utf-8", "replace")
