"""Encoder of HTTP responses: head, JSON body, and errors with their status and headers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import field
from http import HTTPStatus

from edge_server.errors import EdgeServerError, ServingFault, Throttled, Unauthenticated
from edge_server.frontends.error_status import http_status, retry_after
from edge_server.frontends.http.client_timeouts import ClosingRefusal, StalledBody
from edge_server.frontends.http.compression import ENCODINGS, UnknownEncoding
from edge_server.frontends.json_text import to_json
from edge_server.record import record

_LOG = logging.getLogger(__name__)

SERVER = "edge-server"
"""Value of the header Server. It has no version: that would help an attacker."""

JSON_TYPE = "application/json"
MOTION_JPEG_TYPE = "multipart/x-mixed-replace"

GOVERNOR_HEADER = "Edge-Governor"
"""Header with the governor's state, NORMAL to CRITICAL: in refusals and in responses to /v2/health/ready."""

JOIN_BELOW_BYTES = 256 * 1024
"""Below this size, one joined write is cheaper than several system calls; above it, the copy costs more."""

WRITE_BYTES = 512 * 1024
"""Maximum bytes of one write: before Python 3.12 the transport copies the bytes that the socket does not accept."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b"
BINARY_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
    b"Content-Length: %d\r\n%b"
)


@record(slots=True)
class HttpResponse:
    """A response with a complete body."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False
    """Whether the connection closes after it."""


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
"""Names in a date of HTTP (RFC 9110, 5.6.7). The package email formats it too, but a server needs no mail."""


class CommonHeaders:
    """The last lines of each head, Date and Server; valid while time.time is in `second`."""

    def __init__(self) -> None:
        self.second = -1
        self.lines = b""

    def renew(self, second: int) -> bytes:
        """Make the lines for `second`, and return them."""
        self.second = second
        year, month, day, hour, minute, seconds, weekday, *_ = time.gmtime(second)
        date = f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year:04} {hour:02}:{minute:02}:{seconds:02} GMT"
        self.lines = f"Date: {date}\r\nServer: {SERVER}\r\n\r\n".encode("ascii")
        return self.lines


LAST_LINES = CommonHeaders()


def head_bytes(status: int, headers: Mapping[str, str], *, shows_keep_alive: bool, closes: bool) -> bytes:
    """Return a head. `shows_keep_alive`: add the header that keeps an HTTP/1.0 connection open."""
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Client Closed Request" if status == 499 else ""
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    if closes or shows_keep_alive:
        lines.append("Connection: close" if closes else "Connection: keep-alive")
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n" + LAST_LINES.renew(int(time.time()))


def response_bytes(
    response: HttpResponse, *, closes: bool, shows_keep_alive: bool = False, has_body: bool = True
) -> bytes:
    """Return the bytes of a response. `has_body` is False for HEAD requests: only the length of the body is sent."""
    headers = response.headers
    if response.status != 204:  # RFC 9110, 8.6
        headers = {**headers, "Content-Length": str(len(response.body))}
    head = head_bytes(response.status, headers, shows_keep_alive=shows_keep_alive, closes=closes)
    return head + response.body if has_body else head


def json_response(value: object, status: int = 200) -> HttpResponse:
    """Return a response with a JSON body."""
    return HttpResponse(to_json(value), status, {"Content-Type": JSON_TYPE})


def plain_error(message: str, status: int) -> HttpResponse:
    """Return an error response without further headers."""
    return json_response({"error": message}, status)


def error_response(error: EdgeServerError) -> HttpResponse:
    """Return the response to a failed request. Only this function maps an error to a status and headers."""
    response = plain_error(error.message, 408 if isinstance(error, StalledBody) else http_status(error))
    wait = retry_after(error)
    if wait is not None:
        response.headers["Retry-After"] = wait
    if isinstance(error, Throttled) and error.state:
        response.headers[GOVERNOR_HEADER] = error.state
    if isinstance(error, UnknownEncoding):
        response.headers["Accept-Encoding"] = ", ".join(ENCODINGS)
    if isinstance(error, Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    response.closes = isinstance(error, ClosingRefusal)
    return response


def failure_response(error: Exception, what: str) -> HttpResponse:
    """Return the response to any error of `what`, and log an unexpected one. Call it in an except block."""
    if isinstance(error, EdgeServerError):
        return error_response(error)
    _LOG.exception("%s failed", what)
    return error_response(ServingFault(f"internal error: {type(error).__name__}: {error}"))
