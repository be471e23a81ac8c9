"""Encoder and decoder of HTTP/2 header blocks (HPACK, RFC 7541), with a cache of decoded blocks.

RFC 7541, RFC 9113 section 8. A client whose HPACK table is stable sends the same bytes for every request of a kind.
Such a block is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import hpack

from edge_server.core.decode_cache import DecodeCache
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode

TABLE_BYTES = 4096
"""Size of a header table until SETTINGS changes it, section 6.5.2."""

MAX_HEADER_BLOCK_BYTES = 64 << 10
"""Largest compressed header block, over all its frames. More ends the connection: its compression state is lost."""

MAX_CONTINUATION_FRAMES = 16
"""CONTINUATION frames per header block. Endless empty ones cost processor time (CVE-2024-27316)."""

MAX_HEADER_FIELDS = 256
"""Fields of a header list. More are refused as a list that is too large: one byte may name a field, which costs the
receiver far more than the byte."""

MAX_REMEMBERED_BYTES = 64 << 10
MAX_ALL_REMEMBERED_BYTES = 16 << 20
"""Memory of the decoded header blocks that one connection, and that all connections together, remember by their bytes.
With many connections each has an equal part."""

LARGE_BLOCK_BYTES = 2048
LARGE_BLOCK_FIELDS = 64
"""Header blocks above these sizes take long to decode."""

_PSEUDO = frozenset((b":method", b":path", b":scheme", b":authority", b":status"))
_OF_CONNECTIONS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
"""Fields that have a meaning only for HTTP/1.1 connections, RFC 9113 section 8.2.2."""

_ENTRY_OVERHEAD_BYTES = 32
"""Size added per field beside its octets, RFC 7541 section 4.1."""

_HARD_FACTOR = 4
"""A list larger than the announced size, or with more fields than allowed, by more than this factor is not decoded."""

_MAX_INTEGER_OCTETS = 5
"""Longest encoding of an integer. No size or index of a block needs more."""

_IS_NAME = re.compile(rb"[!-9;-@\[-~]+").fullmatch
"""Visible ASCII without upper case and colon, RFC 9113 section 8.2.1."""

_IS_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])").fullmatch
"""No NUL, CR or LF, and no blanks at either end, RFC 9113 section 8.2.1."""


class HeaderBlock:
    """Header fields or trailers of a request or a response. Messages share the object, so it must not be changed.

    `pairs` holds the regular fields in order, including repeated ones, with lower-case names. `problem` says why the
    request is malformed (RFC 9113 section 8.1.1), "" if it is not. `is_request` is whether these are headers of a
    well-formed request. `memo` lets the layer above cache its result for the block; initially None.
    """

    __slots__ = (
        "authority",
        "content_length",
        "is_request",
        "is_too_large",
        "memo",
        "method",
        "pairs",
        "path",
        "problem",
        "scheme",
        "status",
    )

    def __init__(self, fields: Iterable[tuple[bytes, bytes]], *, is_too_large: bool = False) -> None:
        self.content_length = -1
        self.is_too_large = is_too_large
        self.problem = ""
        self.memo: Any = None
        pairs: list[tuple[bytes, bytes]] = []
        pseudo: dict[bytes, bytes] = {}
        for name, value in fields:
            if not _IS_VALUE(value):
                self.problem = f"the value of field {name!r} is not allowed"
            if name[:1] == b":":
                if name not in _PSEUDO or name in pseudo or pairs:
                    self.problem = f"pseudo-header field {name!r} is unknown, repeated, or after a regular one"
                pseudo[name] = value
                continue
            if not _IS_NAME(name):
                self.problem = f"field name {name!r} is not allowed"
            elif name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
                self.problem = f"field {name!r} has no meaning in HTTP/2"
            elif name == b"content-length":
                if not value.isdigit() or len(value) > 18 or self.content_length not in (-1, int(value)):
                    self.problem = "content-length is no number, or given twice"
                else:
                    self.content_length = int(value)
            pairs.append((name, value))
        self.pairs = tuple(pairs)
        self.method, self.path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        self.scheme, self.authority = pseudo.get(b":scheme", b""), pseudo.get(b":authority", b"")
        self.status = pseudo.get(b":status", b"")
        self.is_request = not self.request_problem()

    @property
    def has_pseudo(self) -> bool:
        return bool(self.method or self.path or self.scheme or self.authority or self.status)

    def request_problem(self) -> str:
        """Return why these are not headers of a request, "" if they are. RFC 9113 section 8.3.1."""
        if not self.problem and (self.status or not (self.method and self.path and self.scheme)):
            return ":method, :scheme or :path is missing, or :status is there"
        return self.problem

    def trailers_problem(self) -> str:
        """Return why these are not trailers, "" if they are. RFC 9113 section 8.1."""
        return "trailers have no pseudo-header fields" if self.has_pseudo else self.problem


class HeaderFrames:
    """Joins the HEADERS and CONTINUATION frames of one connection, RFC 9113 sections 6.2 and 6.10."""

    __slots__ = ("_block", "_frame_count", "flags", "stream_id")

    def __init__(self) -> None:
        self._block = b""
        self._frame_count = 0
        self.flags = 0
        """Flags of the last HEADERS frame."""
        self.stream_id = 0
        """Stream of an incomplete block, 0 if there is none."""

    def check(self, kind: int, stream_id: int) -> None:
        """Raise ConnectionFault if such a frame interrupts an incomplete block."""
        if self.stream_id and (kind != frames.CONTINUATION or stream_id != self.stream_id):
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR, "another frame came while a header block was incomplete"
            )

    def add(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bytes | None:
        """Return the block if it is complete with this frame. Raises ConnectionFault."""
        if kind == frames.HEADERS:
            block = payload
            if flags & (frames.PADDED | frames.HAS_PRIORITY):
                block = frames.without_padding(kind, flags, payload)
            self.flags, self._frame_count = flags, 0
        elif self.stream_id:
            block = self._block + payload
            self._frame_count += 1
        else:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "CONTINUATION continues nothing")
        if len(block) > MAX_HEADER_BLOCK_BYTES or self._frame_count > MAX_CONTINUATION_FRAMES:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & frames.END_HEADERS:
            self.stream_id, self._block = 0, b""
            return block
        self.stream_id, self._block = stream_id, block
        return None


class HeaderMemory:
    """Memory of the header blocks that all connections of a thread remember. Used on that thread."""

    __slots__ = ("max_bytes", "reader_count", "used_bytes")

    def __init__(self, max_bytes: int = MAX_ALL_REMEMBERED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.reader_count = self.used_bytes = 0

    @property
    def max_bytes_each(self) -> int:
        """What one connection may use."""
        return min(MAX_REMEMBERED_BYTES, self.max_bytes // max(1, self.reader_count))


class HeaderReader:
    """Decodes the header blocks of one connection, in order. Call `close` at the connection's end.

    After an undecodable block the connection is unusable.
    """

    __slots__ = ("_decoder", "_limit", "_memory", "remembered")

    def __init__(self, max_list_bytes: int, memory: HeaderMemory | None = None) -> None:
        self._decoder = hpack.Decoder(max_list_bytes * _HARD_FACTOR)
        self._limit = max_list_bytes
        self._memory = memory or HeaderMemory()
        self._memory.reader_count += 1
        self.remembered: DecodeCache[bytes, HeaderBlock] = DecodeCache()
        """Decoded blocks by their bytes, valid while the table is unchanged. Their values are those of the table, not
        copies."""

    def read(self, block: bytes, *, may_take_long: bool = True) -> HeaderBlock | None:
        """Decode a block. Look in `remembered` first: it holds the result for the same bytes while the table is
        unchanged. Return None for one that takes long, if it may not. Raises ConnectionFault."""
        try:
            field_count, changes_table = _survey(block)
            if not may_take_long and (field_count > LARGE_BLOCK_FIELDS or len(block) > LARGE_BLOCK_BYTES):
                return None
            fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.HPACKError as error:
            raise ConnectionFault(Http2ErrorCode.COMPRESSION_ERROR, f"headers cannot be decoded: {error}") from None
        octets = sum(len(name) + len(value) for name, value in fields)
        is_too_large = octets + _ENTRY_OVERHEAD_BYTES * len(fields) > self._limit
        found = HeaderBlock(fields, is_too_large=is_too_large or field_count > MAX_HEADER_FIELDS)
        if changes_table:
            self.forget()
        elif not found.is_too_large:
            memory, remembered = self._memory, self.remembered
            memory.used_bytes -= remembered.used_bytes
            remembered.max_bytes = min(memory.max_bytes_each, memory.max_bytes - memory.used_bytes)
            remembered.add(block, found, octets=len(block) + octets, items=len(fields))
            memory.used_bytes += remembered.used_bytes
        return found

    def read_response(self, block: bytes) -> HeaderBlock:
        """Return the fields or trailers of a response. Raises ConnectionFault."""
        found = self.remembered.get(block) or self.read(block)
        if found is None or found.is_too_large:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "a header list is too large")
        return found

    def forget(self) -> None:
        """Drop the remembered blocks."""
        self._memory.used_bytes -= self.remembered.used_bytes
        self.remembered.clear()

    def forget_excess(self) -> None:
        """Drop the remembered blocks if they use more than the connection's share, which more connections made
        smaller."""
        if self.remembered.used_bytes > self._memory.max_bytes_each:
            self.forget()

    def close(self) -> None:
        """Give the memory back. Call once."""
        self.forget()
        self._memory.reader_count -= 1


def _survey(block: bytes) -> tuple[int, bool]:
    """Return how many fields a block has, and whether it adds to the dynamic table or resizes it. RFC 7541 section 6.

    A tenth of the cost of decoding. Raises HPACKError for a block with far too many fields, or one that is cut.
    """
    count, changes_table = 0, False
    position, end = 0, len(block)
    try:
        while position < end:
            first = block[position]
            count += 1
            if first & 0x80:  # an indexed field
                position = _after_integer(block, position, 7)[1]
            elif first & 0xE0 == 0x20:  # a table size update
                changes_table = True
                count -= 1
                position = _after_integer(block, position, 5)[1]
            else:  # a literal, which may be added to the table
                changes_table |= first & 0x40 != 0
                index, position = _after_integer(block, position, 6 if first & 0x40 else 4)
                for _ in range(1 if index else 2):
                    size, position = _after_integer(block, position, 7)
                    position += size
            if count > MAX_HEADER_FIELDS * _HARD_FACTOR:
                raise hpack.OversizedHeaderListError("there are too many header fields")
    except IndexError:
        raise hpack.HPACKDecodingError("the header block ends within a field") from None
    return count, changes_table


def _after_integer(block: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """Return an integer and the position after it. RFC 7541 section 5.1."""
    most = (1 << prefix_bits) - 1
    value = block[position] & most
    position += 1
    if value == most:
        for shift in range(0, 7 * _MAX_INTEGER_OCTETS, 7):
            octet = block[position]
            position += 1
            value += (octet & 0x7F) << shift
            if not octet & 0x80:
                break
        else:
            raise hpack.HPACKDecodingError("an integer of a header block is too long")
    return value, position


def encode_headers(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block of literals that are not added to a table. It is valid on every connection.

    RFC 7541 sections 6.1 and 6.2.2; `:status` 200 is an entry of the static table.
    """
    parts: list[bytes] = []
    for name, value in pairs:
        if (name, value) == (b":status", b"200"):
            parts.append(b"\x88")
        elif name == b":status":
            parts.append(b"\x08" + _integer(len(value)) + value)
        elif name == b"content-type":
            parts.append(b"\x0f\x10" + _integer(len(value)) + value)
        else:
            parts.append(b"\x00" + _integer(len(name)) + name + _integer(len(value)) + value)
    return b"".join(parts)


def encode_repeated(pairs: Iterable[tuple[bytes, bytes]], table_bytes: int) -> tuple[bytes, bytes]:
    """Return the header blocks of the first and of each later message with the same fields on a connection.

    The first one adds the fields to the receiver's table of `table_bytes`, and the later ones name the entries.
    """
    fields = tuple(pairs)
    encoder = hpack.Encoder()
    if sum(len(name) + len(value) + _ENTRY_OVERHEAD_BYTES for name, value in fields) > min(table_bytes, TABLE_BYTES):
        encoder.header_table_size = 0
    return encoder.encode(fields, huffman=False), encoder.encode(fields, huffman=False)


def _integer(value: int) -> bytes:
    """Return the length of a string that is not Huffman-coded. RFC 7541 section 5.2."""
    if value < 0x7F:
        return bytes((value,))
    octets = bytearray((0x7F,))
    value -= 0x7F
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
