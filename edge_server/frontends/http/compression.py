"""Compression and decompression of HTTP bodies (gzip, deflate), with a limit on the decompressed size."""

from __future__ import annotations

import zlib

from edge_server.errors import InvalidRequest, Unsupported

ENCODINGS = ("gzip", "deflate")
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# The machine also runs the model: processor time matters more than a few percent of size.
_LEVEL = 1

MAX_MEMBERS = 65536
"""Maximum number of gzip members of one body: a member can have only twenty bytes, but costs much time."""

_PIECE_BYTES = 16 * 1024
"""Maximum bytes given to zlib at a time: at the end of each member it copies all bytes that follow."""


class UnknownEncoding(Unsupported):
    """Unsupported Content-Encoding; the response names the supported ones."""


def request_encoding(header: str | None) -> str | None:
    """Return "gzip", "deflate" or None for no compression. Raises UnknownEncoding."""
    name = (header or "").strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ENCODINGS:
        raise UnknownEncoding(f"Unsupported Content-Encoding '{name[:64]}', expected one of: {', '.join(ENCODINGS)}")
    return name


def decompress(data: bytes | memoryview, encoding: str, limit: int) -> bytes:
    """Return the decompressed bytes. Never produces more than `limit` bytes.

    Raises InvalidRequest when the data are damaged, truncated, larger than `limit` bytes, or have more than MAX_MEMBERS
    members.
    """
    parts: list[bytes] = []
    rest = memoryview(data)
    size = members = 0
    # Several consecutive gzip members are one body (RFC 1952, 2.2).
    while not members or (rest and encoding == "gzip"):
        members += 1
        if members > MAX_MEMBERS:
            raise InvalidRequest(f"request body has more than {MAX_MEMBERS} members of '{encoding}' data")
        stream = zlib.decompressobj(_WINDOW_BITS[encoding])
        while not stream.eof:
            if not rest:
                raise InvalidRequest(f"request body with Content-Encoding '{encoding}' is truncated")
            piece = rest[:_PIECE_BYTES]
            try:
                parts.append(stream.decompress(piece, limit - size + 1))
            except zlib.error as error:
                raise InvalidRequest(f"request body is not valid '{encoding}' data: {error}") from None
            size += len(parts[-1])
            if size > limit:
                raise InvalidRequest(f"inflated request body is larger than the limit of {limit} bytes")
            rest = rest[len(piece) - len(stream.unused_data) :]
    if rest:
        raise InvalidRequest(f"{len(rest)} bytes follow the '{encoding}' data of the request body")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def accepted_encoding(header: str | None) -> str | None:
    """Return the encoding of ENCODINGS that an Accept-Encoding header prefers, or None for no compression.

    Follows RFC 9110, 12.5.3: q=0 forbids an encoding, "*" means the encodings not named. With equal weights, gzip.
    """
    if not header:
        return None
    weights: dict[str, float] = {}
    for item in header.lower().split(","):
        name, _, parameters = item.partition(";")
        weight = 1.0
        key, _, text = parameters.partition("=")
        if key.strip() == "q":
            try:
                weight = float(text)
            except ValueError:
                weight = 0.0
        weights[name.strip()] = weight
    others = weights.get("*", 0.0)
    best = max(ENCODINGS, key=lambda name: weights.get(name, others))
    weight = weights.get(best, others)
    return best if weight > 0 and weight >= weights.get("identity", 0.0) else None


def compress(chunks: list[bytes | memoryview], encoding: str) -> bytes:
    """Return the chunks, joined and compressed."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    parts = [stream.compress(chunk) for chunk in chunks]
    parts.append(stream.flush())
    return b"".join(parts)
