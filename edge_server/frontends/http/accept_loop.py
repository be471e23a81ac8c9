"""Accept loop of a listening socket: takes new client connections, within the limits on connections and file
descriptors. It also works without free file descriptors.

asyncio's accept loop has no limit. Without a free file descriptor it retries a thousand times a second, and logs a
traceback each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import time
from collections.abc import Callable

from edge_server.errors import Refusal
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.connection_limit import ConnectionLimit, SilentConnection
from edge_server.frontends.http.connection import Connections, HttpConnection
from edge_server.frontends.http.response import error_response, plain_error, response_bytes

MAX_DEFAULT_CONNECTIONS = 4096

_BACKLOG = 1024
_MAX_ACCEPTS_PER_TURN = 64
"""Maximum number of connections accepted in one turn of the event loop."""

_MAX_ANSWERED_HANDSHAKES = 16
"""With more handshakes in progress, a plain HTTP request to a TLS port gets no response: each needs a descriptor."""

_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def max_connections(setting: int) -> int:
    """Return the limit of connections for a setting.

    0 means half of the files that the process may open, at most MAX_DEFAULT_CONNECTIONS: models, gRPC and metrics need
    files too.
    """
    if setting:
        return setting
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_DEFAULT_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_DEFAULT_CONNECTIONS, files // 2))
    )


class Acceptor:
    """Accepts the connections of one listener, from `open` to `close`, on one event loop. See LimitedListener."""

    def __init__(self, name: str, connections: Connections, limit: ConnectionLimit) -> None:
        self.name = name
        self.max_connections = MAX_DEFAULT_CONNECTIONS
        self._connections = connections
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._arriving: dict[asyncio.Task[None], float] = {}
        """Connections that are being set up, with the times at which they were accepted."""
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._waiting: dict[socket.socket, tuple[socket.socket, float]] = {}
        """Listening socket -> the connection that waits for room, and the time at which it was accepted."""

    async def open(
        self, address: str, port: int, *, reuses_port: bool, tls: ssl.SSLContext | None, max_connections: int
    ) -> int:
        """Listen; return the port of the first socket. Raises OSError when the address cannot be used."""
        self._tls, self.max_connections = tls, max_connections
        # asyncio resolves the address and binds the sockets; this class accepts the connections.
        bound = await self._loop.create_server(
            asyncio.Protocol, address, port, reuse_port=reuses_port or None, start_serving=False
        )
        self._sockets = [item.dup() for item in bound.sockets]
        bound.close()
        try:
            for item in self._sockets:
                item.listen(_BACKLOG)
                item.setblocking(False)
        except OSError:
            self.close()
            raise
        self._connections.is_on_loopback = all(is_this_machine(item.getsockname()[0]) for item in self._sockets)
        self._limit.add(self)
        for item in self._sockets:
            self._loop.add_reader(item, self._accept, item)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop accepting, and release the address. May be called again."""
        self._limit.remove(self)
        for timer in self._paused.values():
            timer.cancel()
        for item in self._sockets:
            self._loop.remove_reader(item)
            item.close()
        for accepted, _ in self._waiting.values():
            accepted.close()
        self._sockets.clear()
        self._paused.clear()
        self._waiting.clear()
        for task in self._arriving:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            waiting = self._waiting.pop(listening, None)
            if waiting is None:
                try:
                    accepted, _ = listening.accept()
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as error:
                    if error.errno in _NO_RESOURCE:
                        self._pause(listening, self._limit.accept_failed(self, error))
                        return
                    # accept(2) also returns the errors of one pending connection. The others are not affected.
                    continue
                accepted.setblocking(False)
                waiting = accepted, time.monotonic()
            accepted, accepted_s = waiting
            try:
                wait_s = self._limit.admit(self, accepted_s)
            except Refusal as refusal:
                self._refuse(accepted, refusal)
                continue
            if wait_s:
                self._waiting[listening] = waiting
                self._pause(listening, wait_s)
                return
            task = self._loop.create_task(self._set_up(accepted, self._connections.expect()))
            self._arriving[task] = accepted_s
            task.add_done_callback(lambda task: self._arriving.pop(task, None))

    async def _set_up(self, accepted: socket.socket, protocol: HttpConnection) -> None:
        """Set up the connection. With TLS this waits for the handshake, up to a minute."""
        second: socket.socket | None = None
        if self._tls is not None and len(self._arriving) <= _MAX_ANSWERED_HANDSHAKES:
            # asyncio closes the socket of a failed handshake: the response to a plain HTTP request needs a second one.
            with contextlib.suppress(OSError):
                second = accepted.dup()
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        except (OSError, asyncio.TimeoutError) as error:
            # The client causes a failed handshake: no log line.
            if second is not None and isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                with contextlib.suppress(OSError):
                    second.send(response_bytes(plain_error("this port takes https://, not http://", 400), closes=True))
        finally:
            if second is not None:
                second.close()
            self._connections.expect_no_more(protocol)

    def _refuse(self, accepted: socket.socket, refusal: Refusal) -> None:
        with contextlib.suppress(OSError), accepted:
            if self._tls is None:
                accepted.send(response_bytes(error_response(refusal), closes=True))
                accepted.shutdown(socket.SHUT_WR)
                # The kernel would discard the response if the socket were closed with unread bytes.
                accepted.recv(65536)

    def _pause(self, listening: socket.socket, wait_s: float) -> None:
        """Leave new connections in the kernel's queue for a time."""
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(wait_s, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)
        self._accept(listening)

    # -- for the limit of connections

    @property
    def connection_count(self) -> int:
        return self._connections.count()

    def silent_connections(self) -> list[SilentConnection]:
        arriving = [SilentConnection(False, since_s, self, task) for task, since_s in list(self._arriving.items())]
        return arriving + [
            SilentConnection(item.has_served, item.silent_since_s, self, item) for item in self._connections.silent()
        ]

    def run_soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def close_silent(self, silent: SilentConnection, on_closed: Callable[[], None]) -> bool:
        connection: HttpConnection | asyncio.Task[None] = silent.connection
        if isinstance(connection, HttpConnection):
            if connection.silent_since_s != silent.since_s or not connection.close_silent():
                return False
            self._loop.call_soon(on_closed)  # after the transport's call that closes the socket
        elif connection.done():
            return False
        else:
            connection.cancel()
            connection.add_done_callback(lambda task: on_closed())
        return True
