"""HTTP/1.1 connections: heads and bodies, of known length and chunked, as one client sends them.

The requests that are read may not depend on how the bytes are cut, and each head is read as h11 reads it, where h11
accepts it too.
"""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Iterable
from typing import Any

import h11
from input_reader import InputReader

from edge_server.frontends.http import connection as http_connection
from edge_server.frontends.http.body_reader import BodyReader
from edge_server.frontends.http.client_timeouts import ClosingRefusal
from edge_server.frontends.http.connection import Connections, HttpConnection, NoDrainDelay
from edge_server.frontends.http.request_head import RequestHead, parse_head
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.memory_budget import MemoryBudget

_BUDGET_BYTES = 3000
_MAX_STEPS = 3000

_LENGTH = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
_CHUNKED = b"POST /infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def seeds() -> Iterable[bytes]:
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
    yield b"\0" + get
    yield b"\5" + get * 3
    yield b"\7" + _LENGTH % (5, b"hello") + get
    yield b"\3" + _LENGTH % (4000, b"x" * 4000) + get
    yield b"\2" + _CHUNKED + b"5\r\nhello\r\n3;a=b\r\nxyz\r\n0\r\nTrailer: 1\r\n\r\n" + get
    yield b"\0GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\nPOST /early HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    yield b"\4POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    yield b"\0\r\n\r\nHEAD /a?b=c&d=%20 HTTP/1.1\r\nX:\t y \r\n\r\n"


WORDS = (
    "Content-Length: ", "Transfer-Encoding: chunked", "Connection: close", "Connection: keep-alive",
    "Expect: 100-continue",
    "\r\n", "\r\n\r\n", " HTTP/1.1\r\n", " HTTP/1.0\r\n", "POST ", "GET ", "0\r\n\r\n", "5\r\nhello\r\n", ";", "\t",
    "HEAD ", "/early",
)  # fmt: skip


class _Loop:
    """The parts of an event loop that connections use."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def call_soon(self, call: Any, *arguments: Any) -> None:
        self.calls.append((call, arguments))

    call_soon_threadsafe = call_soon

    def call_later(self, delay_s: float, call: Any, *arguments: Any) -> Any:
        return asyncio.TimerHandle(0.0, call, arguments, self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False


_LOOP = _Loop()
# The module's own asyncio: other readers in this process need the real one.
http_connection.asyncio = types.SimpleNamespace(**{**vars(asyncio), "get_running_loop": lambda: _LOOP})  # type: ignore[assignment]


class _Transport:
    """The bytes that the server writes to a client, and whether it closed the connection."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = self.is_paused = self.has_eof = False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes | memoryview) -> None:
        assert not self.is_closed, "written after the end"
        assert not self.has_eof, "written after write_eof"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert not self.is_closed
        self.has_eof = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class _Call:
    def cancel(self) -> None:
        raise AssertionError("a request that has its response was cancelled")


class _Target:
    """Responds at once to each request with its body."""

    aligned_at = 7
    is_cacheable = True

    def __init__(self, head: RequestHead, requests: list[Any]) -> None:
        self._head = head
        self._requests = requests

    def begin(self, connection: HttpConnection, body: bytes | memoryview, reader: BodyReader | None) -> _Call:
        head = self._head
        data = bytes(body)
        assert head.body_size is None or len(data) == head.body_size
        assert len(data) <= _BUDGET_BYTES
        self._requests.append((head.method, head.target, head.headers.items(), data))
        del body
        if reader is not None:
            reader.release()
        connection.send_response(HttpResponse(b"<" + data + b">"))
        return _Call()


_STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")


def _read(pieces: Iterable[bytes]) -> tuple[list[Any], list[bytes]]:
    """Return the requests, and the statuses of the responses."""
    requests: list[Any] = []
    _LOOP.calls.clear()
    budget = MemoryBudget(_BUDGET_BYTES, _BUDGET_BYTES, lambda: 1.0)

    def find(head: RequestHead) -> Any:
        return HttpResponse(b"no", 404) if head.target == "/early" else _Target(head, requests)

    connections = Connections(find, budget, NoDrainDelay())
    connection = connections.expect()
    transport = _Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    steps = 0
    for whole in pieces:
        piece = memoryview(whole)
        while piece and not transport.is_closed:
            steps += 1
            assert steps < _MAX_STEPS, "the connection works without end"
            if not transport.is_paused:
                buffer = connection.get_buffer(-1)
                count = min(len(buffer), len(piece))
                assert count, "no room for the bytes of a client"
                buffer[:count] = piece[:count]
                del buffer
                connection.buffer_updated(count)
                piece = piece[count:]
            calls, _LOOP.calls = _LOOP.calls, []
            assert calls or not transport.is_paused, "the connection does not read and does nothing"
            for call, arguments in calls:
                call(*arguments)
            assert 0 <= budget.held <= 2 * _BUDGET_BYTES
            assert len(connection._held) <= 2 * 65536 + http_connection.READ_BYTES
        while _LOOP.calls:
            steps += 1
            assert steps < _MAX_STEPS, "the connection works without end"
            call, arguments = _LOOP.calls.pop(0)
            call(*arguments)
    connection.connection_lost(None)
    assert not budget.held, f"{budget.held} bytes are held for a connection that is gone"
    return requests, _STATUS.findall(transport.written)


def _check_head(data: bytes) -> None:
    end = data.find(b"\r\n\r\n") + 4
    start = len(data) - len(data.lstrip(b"\r\n"))
    if end < 4 or start >= end:
        return
    raw = data[start:end]
    try:
        head = parse_head(raw)
    except ClosingRefusal:
        return
    oracle = h11.Connection(h11.SERVER)
    try:
        oracle.receive_data(raw)
        event = oracle.next_event()
    except h11.RemoteProtocolError:
        return
    assert isinstance(event, h11.Request), "the head is not complete for h11"
    assert (event.method, event.target) == (head.method.encode(), head.target.encode("utf-8", "surrogateescape"))
    fields = [(name.lower().encode(), value.encode("utf-8", "surrogateescape")) for name, value in head.headers.items()]
    # h11 adds nothing, and removes white space around a value as we do. It writes this one in small letters.
    fields = [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in fields]
    assert sorted(fields) == sorted((bytes(name), bytes(value)) for name, value in event.headers)


def check(data: bytes) -> None:
    """The first byte selects how the rest is cut; the last bytes of the input are the sizes."""
    if not data:
        return
    cut, data = data[0], data[1:]
    sizes = InputReader(data[-(cut % 32) :] * 8 if cut % 32 else b"")
    whole = _read([data])
    in_pieces = _read(sizes.cut(data))
    # Whether a client waits for "100 Continue" is seen by what comes with the head.
    if b"100-continue" not in data.lower():
        assert in_pieces == whole, "what is read depends on how the bytes come"
    _check_head(data)
