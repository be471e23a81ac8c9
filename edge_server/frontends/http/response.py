"""Answers as bytes: heads, JSON, and errors with their status and headers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus

from edge_server.errors import EdgeServerError, ServingFault, Throttled, Unauthenticated
from edge_server.frontends.http.client_timeouts import ClosingRefusal, StalledBody
from edge_server.frontends.http.compression import ENCODINGS, UnknownEncoding
from edge_server.frontends.status import http_status, retry_after
from edge_server.frontends.v2.json_parser import to_json

_LOG = logging.getLogger(__name__)

SERVER = "edge-server"
"""Value of the header Server: no versions, which would tell an attacker what to try."""

JSON_TYPE = "application/json"

GOVERNOR_HEADER = "Edge-Governor"
"""The state of the machine, NORMAL to CRITICAL: with refusals, and with the answer to whether the server is ready."""

JOIN_BELOW_BYTES = 256 * 1024
"""Below, one joined write is cheaper than several system calls; above, the copy costs more than they do."""

WRITE_BYTES = 512 * 1024
"""What the socket does not take at once is copied by the transport (before Python 3.12): keep that piece small."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b"
BINARY_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
    b"Content-Length: %d\r\n%b"
)


@dataclass(slots=True)
class HttpResponse:
    """An answer whose body is there as a whole."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False
    """Whether the connection ends with it."""


class CommonHeaders:
    """The last lines of every head, Date and Server, as long as the clock (time.time) does not show `second` + 1."""

    def __init__(self) -> None:
        self.second = -1
        self.lines = b""

    def renew(self, second: int) -> bytes:
        self.second = second
        self.lines = f"Date: {formatdate(second, usegmt=True)}\r\nServer: {SERVER}\r\n\r\n".encode("ascii")
        return self.lines


LAST_LINES = CommonHeaders()


def head_bytes(status: int, headers: Mapping[str, str], *, says_keep_alive: bool, closes: bool) -> bytes:
    """Return a head. `says_keep_alive`: a client of HTTP/1.0 is told that its connection stays."""
    lines = [f"HTTP/1.1 {status} {_reason(status)}", *(f"{name}: {value}" for name, value in headers.items())]
    if closes or says_keep_alive:
        lines.append("Connection: close" if closes else "Connection: keep-alive")
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n" + LAST_LINES.renew(int(time.time()))


def reply_bytes(reply: HttpResponse, *, closes: bool, says_keep_alive: bool = False, has_body: bool = True) -> bytes:
    """Return a whole answer. `has_body` False: to HEAD, which is told how long the body would be."""
    headers = {**reply.headers, "Content-Length": str(len(reply.body))}
    head = head_bytes(reply.status, headers, says_keep_alive=says_keep_alive, closes=closes)
    return head + reply.body if has_body else head


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Client Closed Request" if status == 499 else ""


def json_reply(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(to_json(value), status, {"Content-Type": JSON_TYPE})


def plain_error(message: str, status: int) -> HttpResponse:
    return json_reply({"error": message}, status)


def error_reply(error: EdgeServerError) -> HttpResponse:
    """Return the answer to a failed request: the one place where an error becomes a status and headers."""
    reply = plain_error(error.message, 408 if isinstance(error, StalledBody) else http_status(error))
    wait = retry_after(error)
    if wait is not None:
        reply.headers["Retry-After"] = wait
    if isinstance(error, Throttled) and error.state:
        reply.headers[GOVERNOR_HEADER] = error.state
    if isinstance(error, UnknownEncoding):
        reply.headers["Accept-Encoding"] = ", ".join(ENCODINGS)
    if isinstance(error, Unauthenticated):
        reply.headers["WWW-Authenticate"] = "Bearer"
    reply.closes = isinstance(error, ClosingRefusal)
    return reply


def failure_reply(error: Exception, what: str) -> HttpResponse:
    """Return the answer to whatever went wrong with `what`; to be called where the error is handled. Logs a fault."""
    if isinstance(error, EdgeServerError):
        return error_reply(error)
    _LOG.exception("%s failed", what)
    return error_reply(ServingFault(f"internal error: {type(error).__name__}: {error}"))
