"""Heads of requests, told apart before aiohttp sees them: plain inferences, other plain requests, and all the rest.

Clients send the same head over and over. What aiohttp's own parser made of it once is kept by its bytes, so that the
rules for what is a valid head are aiohttp's, and reading one again costs one look into a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.http_writer import HttpVersion11

from edge_server.core.message import Parameter
from edge_server.records import dataclass

MAX_LINE_BYTES = 8190
"""Longest header line, for keys of restricted endpoints and forwarded headers; aiohttp's default, stated."""

MAX_HEAD_BYTES = 8190
"""Longest head that is told apart here; a longer one is aiohttp's to read or to refuse."""

_MAX_LINES = 100
_MAX_BODY_DIGITS = 18
_KEPT_HEADS = 256
_KEPT_HEAD_BYTES = 2048


@dataclass(frozen=True, slots=True)
class InferTarget:
    """What the head of an inference asks for. `json_size` as `decode_infer` takes it; `extra` are forwarded headers."""

    model: str
    version: int | None
    json_size: int | None
    extra: dict[str, Parameter]
    caller: str = ""
    """The name of the token that lets it in."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request that ends `body_size` bytes after its head. `target` None: not a plain inference."""

    body_size: int
    target: InferTarget | None


class HeadReader:
    """Reads heads; keeps a bounded number of short ones. Lives on one event loop.

    `find_target` decides whether a POST with a body is a plain inference. It must depend on nothing but the message, or
    `forget` be called.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, find_target: Callable[[RawRequestMessage, int], InferTarget | None]
    ) -> None:
        self._loop = loop
        self._find_target = find_target
        self._kept: dict[bytes, Head] = {}

    def read(self, raw: bytes) -> Head | None:
        """Return what `raw`, up to and with its empty line, says.

        None when it is malformed, or the request's end or its connection's fate cannot be told from it in the plainest
        way (chunks, Expect, upgrade, HTTP/1.0, Connection: close).
        """
        head = self._kept.get(raw)
        if head is not None:
            return head
        head = self._parse(raw)
        if head is not None and len(raw) <= _KEPT_HEAD_BYTES:
            if len(self._kept) >= _KEPT_HEADS:
                del self._kept[next(iter(self._kept))]
            self._kept[raw] = head
        return head

    def forget(self) -> None:
        """Have every head read anew, because `find_target` decides otherwise now."""
        self._kept.clear()

    def _parse(self, raw: bytes) -> Head | None:
        lines = raw.count(b"\r\n")
        # A lone CR or LF could end the head earlier for one reader than for another.
        if lines > _MAX_LINES or raw.count(b"\n") != lines or raw.count(b"\r") != lines:
            return None
        parser = HttpRequestParser(
            BaseProtocol(self._loop),
            self._loop,
            2**16,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            auto_decompress=False,
        )
        try:
            messages, is_upgraded, tail = parser.feed_data(raw)
        except HttpProcessingError:
            return None
        if len(messages) != 1 or is_upgraded or tail:
            return None
        message = messages[0][0]
        size = _body_size(message)
        if size is None:
            return None
        is_infer = message.method == "POST" and size > 0
        return Head(size, self._find_target(message, size) if is_infer else None)


def _body_size(message: RawRequestMessage) -> int | None:
    headers = message.headers
    if (
        message.version != HttpVersion11
        or message.should_close
        or message.chunked
        or message.upgrade
        or message.method == "CONNECT"
        or "Transfer-Encoding" in headers
        or "Expect" in headers
        or "Upgrade" in headers
    ):
        return None
    lengths = headers.getall("Content-Length", ["0"])
    text = lengths[0]
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_BODY_DIGITS
    return int(text) if len(lengths) == 1 and is_number else None
