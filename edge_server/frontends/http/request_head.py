"""Parser of HTTP/1.1 and HTTP/1.0 request heads (RFC 9112), and of the query in a request target.

The parser is strict and refuses an ambiguous head, so that a proxy and this server agree where a request ends.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

from edge_server.errors import InvalidRequest
from edge_server.frontends.http.client_timeouts import ClosingRefusal

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 8190
"""Maximum length of a line of a head."""

MAX_HEAD_BYTES = 64 * 1024
_MAX_LINES = 128
_MAX_BODY_DIGITS = 18
_MAX_QUERY_FIELDS = 16
_SHOWN_CHARACTERS = 80

_HTTP2 = (
    "a client speaks HTTP/2 with prior knowledge at the HTTP port, which speaks HTTP/1.1: expected HTTP/1.1, or gRPC "
    "at the gRPC port (--grpc-port)"
)

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
METHOD = rb"[A-Z-]{1,20}"
"""A method as RFC 9110 and its extensions write them. Bytes that begin with anything else are not HTTP."""

_REQUEST_LINE = re.compile(rb"(" + METHOD + rb") ([\x21-\x7e\x80-\xff]+)(?: HTTP/(1)\.([01]))?")
FIELD_LINE = re.compile(rb"(" + _TOKEN + rb"):([^\x00-\x08\x0a-\x1f\x7f]*)")
"""A field line (RFC 9112, 5): no space before the colon, no line folding, no control character but a tab. The value has
the white space around it."""


class Headers:
    """The header fields of a request. Names are case-insensitive; order and repetition are kept."""

    __slots__ = ("_fields", "_values")

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self._fields = fields
        self._values: dict[str, list[str]] = {}
        for name, value in fields:
            self._values.setdefault(name.lower(), []).append(value)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def get(self, name: str) -> str | None:
        """Return the first value, or None."""
        values = self._values.get(name.lower())
        return values[0] if values else None

    def getall(self, name: str) -> list[str]:
        """Return all values, in order."""
        return self._values.get(name.lower(), [])

    def items(self) -> Sequence[tuple[str, str]]:
        """Return all fields as (name, value), in order."""
        return self._fields


class RequestHead(NamedTuple):
    """Request line and header fields of a request.

    `target` is still percent-encoded. `body_size` is in bytes, None for a chunked body. `expects_continue`: the client
    waits for "100 Continue" before it sends the body.
    """

    method: str
    target: str
    headers: Headers
    body_size: int | None
    is_http_1_0: bool
    keeps_alive: bool
    expects_continue: bool


def parse_head(raw: bytes) -> RequestHead:
    """Parse a head of at most MAX_HEAD_BYTES, including the empty line at its end. Raises ClosingRefusal."""
    lines = raw[:-4].split(b"\r\n")
    if len(lines) > _MAX_LINES:
        raise ClosingRefusal(f"the request's head has more than {_MAX_LINES} lines")
    if len(max(lines, key=len)) > MAX_LINE_BYTES:
        raise ClosingRefusal(f"a line of the request's head has more than {MAX_LINE_BYTES} bytes")
    if lines[0] == b"PRI * HTTP/2.0":  # RFC 9113, 3.4
        _log_http2()
        raise ClosingRefusal(_HTTP2)
    first = _REQUEST_LINE.fullmatch(lines[0])
    if first is None:
        raise ClosingRefusal(f"the request line cannot be read: {_shown(lines[0])}")
    method, target, major, minor = first.groups()
    if major is None:
        raise ClosingRefusal("the request line names no HTTP version, expected HTTP/1.1")
    authority, target = _split_target(target)
    # The authority of an absolute target replaces the Host field (RFC 9112, 3.2.2).
    fields = [("Host", authority.decode("utf-8", "surrogateescape"))] if authority else []
    for line in lines[1:]:
        match = FIELD_LINE.fullmatch(line)
        if match is None:
            raise ClosingRefusal(f"a header line cannot be read: {_shown(line)}")
        if authority and match[1].lower() == b"host":
            continue
        fields.append((match[1].decode("ascii"), match[2].strip(b" \t").decode("utf-8", "surrogateescape")))
    headers = Headers(fields)
    is_http_1_0 = minor == b"0"
    options = {item.strip().lower() for text in headers.getall("connection") for item in text.split(",")}
    return RequestHead(
        method.decode("ascii"),
        target.decode("utf-8", "surrogateescape"),
        headers,
        _body_size(headers, is_http_1_0),
        is_http_1_0,
        "keep-alive" in options if is_http_1_0 else "close" not in options,
        not is_http_1_0 and (headers.get("expect") or "").lower() == "100-continue",
    )


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """Return the authority of an absolute target, else nothing, and the path with the query."""
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() not in (b"http", b"https"):
        return b"", target
    authority, _, path = rest.partition(b"/")
    if not authority or b"?" in authority or b"@" in authority:
        raise ClosingRefusal(f"the request target cannot be read: {_shown(target)}")
    return authority, b"/" + path


def _body_size(headers: Headers, is_http_1_0: bool) -> int | None:
    """Return the length of the body, or None for a chunked one (RFC 9112, 6.3). Raises ClosingRefusal."""
    lengths, codings = headers.getall("content-length"), headers.getall("transfer-encoding")
    if codings:
        if lengths or is_http_1_0 or [item.strip().lower() for item in codings] != ["chunked"]:
            raise ClosingRefusal("Transfer-Encoding must be 'chunked', once, with HTTP/1.1 and without Content-Length")
        return None
    if not lengths:
        return 0
    text = lengths[0]
    if len(lengths) > 1 or not (text.isascii() and text.isdigit() and len(text) <= _MAX_BODY_DIGITS):
        raise ClosingRefusal(f"Content-Length must be one whole number, got '{', '.join(lengths)[:_SHOWN_CHARACTERS]}'")
    return int(text)


@functools.cache
def _log_http2() -> None:
    """Log once: a client that tries again and again would fill the log."""
    log.warning("%s. This is not logged again", _HTTP2)


def _shown(line: bytes) -> str:
    return repr(line[:_SHOWN_CHARACTERS].decode("latin-1"))


def parse_query(target: str, known: Collection[str]) -> dict[str, str]:
    """Return the query parameters of a request target. Raises InvalidRequest for an unknown or repeated one."""
    text = target.partition("?")[2]
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:
        raise InvalidRequest(f"the query cannot be read: {error}") from None
    for key, _ in pairs:
        if key not in known:
            raise InvalidRequest(f"unexpected query parameter '{key[:80]}', expected {', '.join(sorted(known))}")
    if len(dict(pairs)) != len(pairs):
        raise InvalidRequest("the query names a parameter twice")
    return dict(pairs)


def parse_whole_number(name: str, text: str) -> int:
    """Return a parameter's value as a number of 0 or more. Raises InvalidRequest."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_BODY_DIGITS):
        raise InvalidRequest(f"'{name}' must be a whole number of 0 or more, got '{text[:80]}'")
    return int(text)


def parse_boolean(name: str, text: str) -> bool:
    """Return the value of a parameter that is "true" or "false". Raises InvalidRequest."""
    if text not in ("true", "false"):
        raise InvalidRequest(f"'{name}' must be true or false, got '{text[:80]}'")
    return text == "true"
