"""HTTP/2 header blocks: stateless encoding, and decoding with checks and a cache keyed by the block's bytes.

RFC 7541, RFC 9113 section 8. A client whose HPACK table is stable sends the same bytes for every request of a kind.
Such a block is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpack import Decoder, HPACKError

from edge_server.frontends.http2.limits import MAX_REMEMBERED_BLOCK_BYTES, MAX_REMEMBERED_BLOCKS

_PSEUDO = frozenset((b":method", b":path", b":scheme", b":authority"))
_OF_CONNECTIONS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
"""Fields that have a meaning only for HTTP/1.1 connections, RFC 9113 section 8.2.2."""

_ENTRY_OVERHEAD_BYTES = 32
"""Size added per field beside its octets, RFC 7541 section 4.1."""

_HARD_FACTOR = 4
"""A list larger than the announced size by more than this factor is not decoded."""

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


class HeaderReader:
    """Decodes the header blocks of one connection, in order. Raises HPACKError for an undecodable block; the connection
    is unusable afterwards."""

    __slots__ = ("_decoder", "_limit", "remembered")

    def __init__(self, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_list_bytes * _HARD_FACTOR)
        self._limit = max_list_bytes
        self.remembered: dict[bytes, HeaderBlock] = {}
        """Decoded blocks by their bytes, valid while the table is unchanged."""

    def read(self, block: bytes) -> HeaderBlock:
        """Decode a block. Look in `remembered` first: it holds the result for the same bytes while the table is
        unchanged."""
        fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        size = sum(len(name) + len(value) + _ENTRY_OVERHEAD_BYTES for name, value in fields)
        found = HeaderBlock(fields, is_too_large=size > self._limit)
        if _changes_table(block):
            self.remembered.clear()
        elif len(block) <= MAX_REMEMBERED_BLOCK_BYTES and not found.is_too_large:
            if len(self.remembered) >= MAX_REMEMBERED_BLOCKS:
                self.remembered.clear()
            self.remembered[block] = found
        return found


def _changes_table(block: bytes) -> bool:
    """Return whether a valid block adds to the dynamic table or resizes it. RFC 7541 section 6."""
    position = 0
    while position < len(block):
        first = block[position]
        if first & 0x80:  # an indexed field
            position = _after_integer(block, position, 7)[1]
        elif first & 0x60:  # a literal added to the table, or a table size update
            return True
        else:  # a literal not added to the table
            index, position = _after_integer(block, position, 4)
            for _ in range(1 if index else 2):
                size, position = _after_integer(block, position, 7)
                position += size
    return False


def _after_integer(block: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """Return an integer and the position after it. RFC 7541 section 5.1."""
    most = (1 << prefix_bits) - 1
    value = block[position] & most
    position += 1
    if value == most:
        shift = 0
        while True:
            octet = block[position]
            position += 1
            value += (octet & 0x7F) << shift
            shift += 7
            if not octet & 0x80:
                break
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


__all__ = ["HPACKError", "HeaderBlock", "HeaderReader", "encode_headers"]
