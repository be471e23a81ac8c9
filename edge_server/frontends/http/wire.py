"""Whole answers as bytes, with the headers that aiohttp would put on them."""

from __future__ import annotations

import time
from email.utils import formatdate

from aiohttp import web

SERVER = "edge-server"
"""Value of the header Server: no versions, which would tell an attacker what to try."""

_JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b"
_BINARY_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
    b"Content-Length: %d\r\n%b"
)


class _Clock:
    """The last lines of every head; made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._lines = b""

    def lines(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            text = f"Date: {formatdate(second, usegmt=True)}\r\nServer: {SERVER}\r\n\r\n"
            self._lines = text.encode("ascii")
        return self._lines


_CLOCK = _Clock()


def infer_head(size: int, json_size: int | None) -> bytes:
    """Return the head of an inference's answer of `size` bytes; `json_size` None when all of them are JSON."""
    if json_size is None:
        return _JSON_HEAD % (size, _CLOCK.lines())
    return _BINARY_HEAD % (json_size, size, _CLOCK.lines())


def wire_reply(reply: web.Response, *, will_stay: bool) -> bytes:
    """Return an answer that has a body of bytes, whole. `will_stay`: whether the connection may be used further."""
    body = reply.body
    assert isinstance(body, bytes)
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items() if name != "Content-Length"]
    lines.append(f"Content-Length: {len(body)}")
    if not will_stay:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("utf-8") + b"\r\n" + _CLOCK.lines() + body
