"""Encoder and decoder of HTTP/2 header blocks (HPACK, RFC 7541), with a cache of decoded blocks.

RFC 7541, RFC 9113 section 8. A client whose HPACK table is stable sends the same bytes for every request of a kind.
Such a block is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpack import Decoder, HPACKDecodingError, HPACKError, OversizedHeaderListError

from edge_server.frontends.decode_cache import DecodeCache
from edge_server.frontends.http2 import limits

_PSEUDO = frozenset((b":method", b":path", b":scheme", b":authority"))
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
    """Header fields or trailers of a request. Requests share the object, so it must not be changed.

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
    )

    def __init__(self, fields: Iterable[tuple[bytes, bytes]], *, is_too_large: bool = False) -> None:
        self.method = self.path = self.scheme = self.authority = b""
        self.content_length = -1
        self.is_too_large = is_too_large
        self.problem = ""
        self.memo: object = None
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
        self.is_request = not self.request_problem()

    @property
    def has_pseudo(self) -> bool:
        return bool(self.method or self.path or self.scheme or self.authority)

    def request_problem(self) -> str:
        """Return why these are not headers of a request, "" if they are. RFC 9113 section 8.3.1."""
        if not self.problem and not (self.method and self.path and self.scheme):
            return ":method, :scheme or :path is missing"
        return self.problem

    def trailers_problem(self) -> str:
        """Return why these are not trailers, "" if they are. RFC 9113 section 8.1."""
        return "trailers have no pseudo-header fields" if self.has_pseudo else self.problem


class HeaderMemory:
    """Memory of the header blocks that all connections of a thread remember. Used on that thread."""

    __slots__ = ("max_bytes", "reader_count", "used_bytes")

    def __init__(self, max_bytes: int = limits.MAX_ALL_REMEMBERED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.reader_count = self.used_bytes = 0

    @property
    def max_bytes_each(self) -> int:
        """What one connection may use."""
        return min(limits.MAX_REMEMBERED_BYTES, self.max_bytes // max(1, self.reader_count))


class HeaderReader:
    """Decodes the header blocks of one connection, in order. Call `close` at the connection's end.

    Raises HPACKError for an undecodable block; the connection is unusable afterwards.
    """

    __slots__ = ("_decoder", "_limit", "_memory", "remembered")

    def __init__(self, max_list_bytes: int, memory: HeaderMemory | None = None) -> None:
        self._decoder = Decoder(max_list_bytes * _HARD_FACTOR)
        self._limit = max_list_bytes
        self._memory = memory or HeaderMemory()
        self._memory.reader_count += 1
        self.remembered: DecodeCache[bytes, HeaderBlock] = DecodeCache()
        """Decoded blocks by their bytes, valid while the table is unchanged. Their values are those of the table, not
        copies."""

    def read(self, block: bytes, survey: tuple[int, bool] | None = None) -> HeaderBlock:
        """Decode a block. Look in `remembered` first: it holds the result for the same bytes while the table is
        unchanged. `survey` is the result of `survey_block`, if it is known already."""
        field_count, changes_table = survey or survey_block(block)
        fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        octets = sum(len(name) + len(value) for name, value in fields)
        is_too_large = octets + _ENTRY_OVERHEAD_BYTES * len(fields) > self._limit
        found = HeaderBlock(fields, is_too_large=is_too_large or field_count > limits.MAX_HEADER_FIELDS)
        if changes_table:
            self.forget()
        elif not found.is_too_large:
            memory, remembered = self._memory, self.remembered
            memory.used_bytes -= remembered.used_bytes
            remembered.max_bytes = min(memory.max_bytes_each, memory.max_bytes - memory.used_bytes)
            remembered.add(block, found, octets=len(block) + octets, items=len(fields))
            memory.used_bytes += remembered.used_bytes
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


def survey_block(block: bytes) -> tuple[int, bool]:
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
            if count > limits.MAX_HEADER_FIELDS * _HARD_FACTOR:
                raise OversizedHeaderListError("there are too many header fields")
    except IndexError:
        raise HPACKDecodingError("the header block ends within a field") from None
    return count, changes_table


def is_large(block: bytes, field_count: int) -> bool:
    """Return whether a block takes long to decode."""
    return field_count > limits.LARGE_BLOCK_FIELDS or len(block) > limits.LARGE_BLOCK_BYTES


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
            raise HPACKDecodingError("an integer of a header block is too long")
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


__all__ = ["HPACKError", "HeaderBlock", "HeaderMemory", "HeaderReader", "encode_headers", "is_large", "survey_block"]
