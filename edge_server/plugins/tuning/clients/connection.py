"""Non-blocking connection of a load test: opens, with or without TLS, sends what is queued, and reads what arrives.

All connections of a load belong to one thread, which waits for them in a `ConnectionLoop`. The subclasses speak
HTTP/1.1 and HTTP/2.
"""

from __future__ import annotations

import abc
import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from edge_server.plugins.tuning.clients.client_interface import TextTimes

_RECEIVE_BYTES = 1 << 16
_LARGE_RECEIVE_BYTES = 1 << 20
"""After a read that filled the smaller buffer. For each small answer, a large one would be mapped and unmapped."""
_MAX_PIECES = 64
"""Buffers of one system call. The kernel's limit is 1024."""

CHECKED_EVERY = 1024
"""Of so many answers of a connection, one is decoded: the first."""


class ServerAddress(NamedTuple):
    """Address of a server, after the name was resolved. `tls_context` is None without TLS, which checks `name`."""

    family: int
    address: Any
    name: str
    tls_context: ssl.SSLContext | None


def find_address(host: str, port: int, tls_context: ssl.SSLContext | None, timeout_s: float) -> ServerAddress:
    """Return the address of a host, or of unix:PATH. Of several addresses: the first one that accepts a connection.

    Raises OSError.
    """
    if host.startswith("unix:"):
        path = host.removeprefix("unix:").removeprefix("//")
        return ServerAddress(socket.AF_UNIX, path, "localhost", tls_context)
    host = host.strip("[]")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if len(found) == 1:
        return ServerAddress(found[0][0], found[0][4], host, tls_context)
    with socket.create_connection((host, port), timeout_s) as wire:
        server = ServerAddress(wire.family, wire.getpeername(), host, tls_context)
        if tls_context is not None:
            # A server would log a connection that ends without a handshake.
            tls_context.wrap_socket(wire, server_hostname=host).close()
    return server


class LoadWorker:
    """Sends requests in turns, one at a time. `connection` may be shared with other workers.

    `start_s` is when the request was written, `since_s` when the server was last heard of it (time.perf_counter),
    `lag_s` how late it was sent.
    """

    __slots__ = ("connection", "is_busy", "lag_s", "requests", "since_s", "start_s")

    def __init__(self, connection: LoadConnection, requests: Iterator[bytes]) -> None:
        self.connection = connection
        self.requests = requests
        self.is_busy = False
        self.start_s = self.since_s = self.lag_s = 0.0


OnAnswer = Callable[[LoadWorker, float, str, str, "TextTimes | None"], None]
"""Gets the worker, when the answer's last byte was read, why the request failed ("" if not) with a message, and the
times of text."""


class ConnectionLoop:
    """Waits for input of its connections, and for room for their output. Close after use."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.connections: dict[int, LoadConnection] = {}
        """By file descriptor."""
        self.response_heads: dict[bytes, Any] = {}
        """Decoded heads of responses by their bytes, for the connections of one protocol."""

    def wait(self, timeout_s: float, *, is_exact: bool = False) -> None:
        """Wait for the sockets, and let their connections read and write. `is_exact`: to less than a millisecond."""
        if is_exact:
            # epoll counts in milliseconds, select in microseconds.
            select.select((self.poll,), (), (), timeout_s)
            timeout_s = 0.0
        for file, events in self.poll.poll(timeout_s):
            connection = self.connections.get(file)
            if connection is not None:
                connection.handle(events)

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()
        self.poll.close()


class LoadConnection(abc.ABC):
    """Connection that is opened by its first request, and again by the first one after a failure.

    `on_answer` is called for each request once, and may start the next one.
    """

    failure_reason = "CONNECTION"
    timeout_reason = "TIMEOUT"

    def __init__(self, server: ServerAddress, loop: ConnectionLoop, on_answer: OnAnswer) -> None:
        self._server = server
        self._loop = loop
        self._on_answer = on_answer
        self.error: Exception | None = None
        """Why the connection failed last."""
        self._socket: Any = None
        self._file = -1
        self._connect_errno = 0
        self._is_open = False
        self._waits_to_write = False
        self._receive_bytes = _RECEIVE_BYTES
        self._output: list[bytes | memoryview] = []
        self._unwritten: list[LoadWorker] = []
        """Workers whose requests were added since the last `flush`."""

    def start(self, worker: LoadWorker, request: bytes) -> None:
        """Add a worker's request to the output. The caller calls `flush`, unless it was called by `on_answer`."""
        self._unwritten.append(worker)
        self._start(worker, request)

    def _start(self, worker: LoadWorker, request: bytes) -> None:
        error = None
        if self._socket is None:
            try:
                self._open()
            except OSError as failure:
                error = failure
        self._encode(worker, request)
        if error is not None:
            self._fail(error)

    @abc.abstractmethod
    def cancel(self, worker: LoadWorker, message: str) -> None:
        """End the worker's request, which takes too long."""

    @abc.abstractmethod
    def _encode(self, worker: LoadWorker, request: bytes) -> None:
        """Add the request to the output."""

    @abc.abstractmethod
    def _receive(self, data: bytes, now: float) -> None:
        """Read what came at the time `now`. Raises ValueError if it is not understood, and OSError."""

    @abc.abstractmethod
    def _fail_requests(self, reason: str, message: str) -> None:
        """Report the requests in flight as failed. The connection is closed already."""

    def handle(self, events: int) -> None:
        """Read and write after `events` of epoll."""
        try:
            if self._is_open or self._continue_opening():
                if events & ~select.EPOLLOUT:
                    self._read()
                if self._output or self._unwritten:
                    self._write()
        except (OSError, ValueError, struct.error) as error:
            self._fail(error)

    def flush(self) -> None:
        """Write the output, as far as the socket takes it. The rest follows when it can."""
        try:
            self._write()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the socket without a report of requests in flight."""
        if self._socket is not None:
            del self._loop.connections[self._file]
            self._socket.close()
        self._socket, self._is_open, self._waits_to_write = None, False, False
        self._output.clear()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.close()
        self._unwritten.clear()
        self._fail_requests(self.failure_reason, str(error) or type(error).__name__)

    def _open(self) -> None:
        wire = socket.socket(self._server.family, socket.SOCK_STREAM)
        wire.setblocking(False)
        if self._server.family != socket.AF_UNIX:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._file = wire, wire.fileno()
        self._loop.connections[self._file] = self
        # `_continue_opening` reads the result. The socket is writable also if there is an error already.
        self._connect_errno = wire.connect_ex(self._server.address)
        self._waits_to_write = True
        self._loop.poll.register(self._file, select.EPOLLOUT)

    def _continue_opening(self) -> bool:
        """Return whether the connection is open now. Raises OSError."""
        tls_context = self._server.tls_context
        if not isinstance(self._socket, ssl.SSLSocket):
            self._check_connected()
            if tls_context is not None:
                # The file descriptor stays the same.
                self._socket = tls_context.wrap_socket(
                    self._socket, server_hostname=self._server.name, do_handshake_on_connect=False
                )
        if tls_context is not None:
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._loop.poll.modify(self._file, select.EPOLLIN)
                return False
            except ssl.SSLWantWriteError:
                self._loop.poll.modify(self._file, select.EPOLLOUT)
                return False
        self._is_open = True
        self._waits_to_write = False
        self._loop.poll.modify(self._file, select.EPOLLIN)
        return True

    def _check_connected(self) -> None:
        number = self._connect_errno
        if number in (0, errno.EINPROGRESS):
            number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))

    def _read(self) -> None:
        wire = self._socket
        while True:
            try:
                data = wire.recv(self._receive_bytes)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._receive_bytes = _LARGE_RECEIVE_BYTES if len(data) >= _RECEIVE_BYTES else _RECEIVE_BYTES
            self._receive(data, time.perf_counter())
            # What TLS has decrypted already makes no event.
            if self._server.tls_context is None or self._socket is not wire or not wire.pending():
                return

    def _write(self) -> None:
        if self._unwritten:
            now = time.perf_counter()
            for worker in self._unwritten:
                worker.start_s = worker.since_s = now
            self._unwritten.clear()
        output = self._output
        while output and self._is_open:
            try:
                sent = self._send(output)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self._waits_to_write:
                    self._waits_to_write = True
                    self._loop.poll.modify(self._file, select.EPOLLIN | select.EPOLLOUT)
                return
            while output and sent >= len(output[0]):
                sent -= len(output.pop(0))
            if sent:
                output[0] = memoryview(output[0])[sent:]
        if self._waits_to_write and self._is_open:
            self._waits_to_write = False
            self._loop.poll.modify(self._file, select.EPOLLIN)

    def _send(self, output: list[bytes | memoryview]) -> int:
        if self._server.tls_context is None:
            if len(output) == 1:
                return int(self._socket.send(output[0]))
            return int(self._socket.sendmsg(output[:_MAX_PIECES]))
        if not self._waits_to_write:
            # One record for all. A record that TLS could not write is given again as it was.
            output[:] = [b"".join(output)]
        return int(self._socket.send(output[0]))
