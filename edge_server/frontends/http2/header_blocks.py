"""HTTP/2 header blocks: decoded, checked and cached by their bytes; encoded without state. RFC 7541, RFC 9113 section
8.

A client whose HPACK table has settled sends the same bytes with each request of a kind. Such a block is decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpack import Decoder, HPACKError

from edge_server.frontends.http2.limits import MAX_REMEMBERED_BLOCK_BYTES, MAX_REMEMBERED_BLOCKS

_PSEUDO = frozenset((b":method", b":path", b":scheme", b":authority"))
_OF_CONNECTIONS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
"""Fields that mean something for an HTTP/1.1 connection only, RFC 9113 section 8.2.2."""

_ENTRY_OVERHEAD_BYTES = 32
"""What a field counts beside its octets, RFC 7541 section 4.1."""

_HARD_FACTOR = 4
"""A list this many times larger than announced is not decoded any more."""

_IS_NAME = re.compile(rb"[!-9;-@\[-~]+").fullmatch
"""Visible ASCII without upper case and colon, RFC 9113 section 8.2.1."""

_IS_VALUE = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])").fullmatch
"""No NUL, CR and LF, and no blanks at either end, RFC 9113 section 8.2.1."""


class HeaderBlock:
    """Header fields of a request, or its trailers. Shared by requests: not to be changed.

    `pairs` are the regular fields in their order, repeated ones each; names are in lower case. `problem` says what
    makes the request malformed (RFC 9113 section 8.1.1), "" if nothing does; `is_request` is whether they are
    headers of a well-formed request. `memo` is for the layer above, to keep what it made of the block: None at first.
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
        """Return why these are no headers of a request, "" if they are. RFC 9113 section 8.3.1."""
        if not self.problem and not (self.method and self.path and self.scheme):
            return ":method, :scheme or :path is missing"
        return self.problem

    def trailers_problem(self) -> str:
        """Return why these are no trailers, "" if they are. RFC 9113 section 8.1."""
        return "trailers have no pseudo-header fields" if self.has_pseudo else self.problem


class HeaderReader:
    """Decodes the header blocks of one connection, in their order. Raises HPACKError for what cannot be decoded: the
    connection is of no use then."""

    __slots__ = ("_decoder", "_limit", "remembered")

    def __init__(self, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_list_bytes * _HARD_FACTOR)
        self._limit = max_list_bytes
        self.remembered: dict[bytes, HeaderBlock] = {}
        """Blocks by their bytes, as long as they mean the same."""

    def read(self, block: bytes) -> HeaderBlock:
        """Return the decoded block. While the table stays as it is, `remembered` has the same object for the same
        bytes: ask there first."""
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
    """Return whether a block, which was decoded before, adds to the dynamic table or resizes it. RFC 7541 section 6."""
    position = 0
    while position < len(block):
        first = block[position]
        if first & 0x80:  # an indexed field
            position = _after_integer(block, position, 7)[1]
        elif first & 0x60:  # a literal that is added to the table, or another size of the table
            return True
        else:  # a literal that is not
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
    """Return a header block of literals that are not added to a table: it means the same on every connection.

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
