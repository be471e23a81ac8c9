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
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident

from edge_server.errors import Refusal
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.connection_limit import ConnectionLimit, LimitedListener, SilentConnection
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


class ConnectionSetup:
    """Sets up accepted connections on the event loop that creates it, on which they then stay."""

    def __init__(self, connections: Connections, tls: ssl.SSLContext | None) -> None:
        self.connections = connections
        self.arriving: dict[asyncio.Task[None], tuple[float, HttpConnection]] = {}
        """Connections that are being set up, with the times at which they were accepted."""
        self._tls = tls
        self._accepted: deque[tuple[socket.socket, float]] = deque()
        """Sockets that were accepted on another thread, and when."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = get_ident()

    def begin(self, accepted: socket.socket, accepted_s: float) -> None:
        """Set up a connection that was accepted at `accepted_s`. For any thread."""
        if get_ident() == self._thread_id:
            self._begin(accepted, accepted_s)
        else:
            self._accepted.append((accepted, accepted_s))
            self.run_soon(self._begin_accepted)

    def _begin_accepted(self) -> None:
        if self._accepted:
            self._begin(*self._accepted.popleft())

    def _begin(self, accepted: socket.socket, accepted_s: float) -> None:
        protocol = self.connections.expect()
        task = self._loop.create_task(self._set_up(accepted, protocol))
        self.arriving[task] = accepted_s, protocol
        task.add_done_callback(lambda task: self.arriving.pop(task, None))

    async def _set_up(self, accepted: socket.socket, protocol: HttpConnection) -> None:
        """Set up the connection. With TLS this waits for the handshake, up to a minute."""
        second: socket.socket | None = None
        if self._tls is not None and len(self.arriving) <= _MAX_ANSWERED_HANDSHAKES:
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
            self.connections.expect_no_more(protocol)

    def count(self) -> int:
        """Return the number of connections that are open or being set up. For any thread."""
        return self.connections.count() + len(self._accepted)

    def silent(self, listener: LimitedListener) -> list[SilentConnection]:
        """Return the silent connections of `listener` on this loop, see LimitedListener."""
        arriving = [
            SilentConnection(False, since_s, listener, (self, task))
            for task, (since_s, protocol) in list(self.arriving.items())
            if not protocol.is_open  # else it is listed below, before its task has ended
        ]
        return arriving + [
            SilentConnection(item.has_served, item.silent_since_s, listener, (self, item))
            for item in self.connections.silent()
        ]

    def close_silent(
        self, connection: HttpConnection | asyncio.Task[None], since_s: float, on_closed: Callable[[], None]
    ) -> bool:
        """See LimitedListener. On another thread, return True at once; `on_closed` is called in any case then."""
        if get_ident() != self._thread_id:
            self.run_soon(lambda: None if self.close_silent(connection, since_s, on_closed) else on_closed())
            return True
        if isinstance(connection, HttpConnection):
            if connection.silent_since_s != since_s or not connection.close_silent():
                return False
            self._loop.call_soon(on_closed)  # after the transport's call that closes the socket
        elif connection.done():
            return False
        else:
            # Not at once: a task that is cancelled before its first step does not close its socket.
            self._loop.call_soon(self._stop_setup, connection, self.arriving[connection][1])
            connection.add_done_callback(lambda task: on_closed())
        return True

    @staticmethod
    def _stop_setup(task: asyncio.Task[None], protocol: HttpConnection) -> None:
        if not task.cancel():
            protocol.abort()  # the connection has been opened meanwhile

    def run_soon(self, call: Callable[[], None]) -> None:
        """Make a call on the loop. For any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    async def close(self, grace_s: float) -> None:
        """Set up no more connections, wait `grace_s` for open requests, then abort the rest. For any loop."""
        if get_ident() != self._thread_id:
            closing = asyncio.run_coroutine_threadsafe(self.close(grace_s), self._loop)
            await asyncio.wrap_future(closing)
            return
        await asyncio.sleep(0)  # as in `close_silent`: the first step of each task
        for task in self.arriving:
            task.cancel()
        await asyncio.gather(*self.arriving, return_exceptions=True)
        while self._accepted:
            self._accepted.popleft()[0].close()
        await self.connections.finish(grace_s)


class Acceptor:
    """Accepts the connections of one listener, from `open` to `close`, on one event loop. See LimitedListener.

    Each connection goes to the one of `setups`, one for each event loop, that has the fewest.
    """

    def __init__(self, name: str, setups: Sequence[ConnectionSetup], limit: ConnectionLimit) -> None:
        self.name = name
        self.max_connections = MAX_DEFAULT_CONNECTIONS
        self.setups = setups
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._is_tls = False
        self._sockets: list[socket.socket] = []
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._waiting: dict[socket.socket, tuple[socket.socket, float]] = {}
        """Listening socket -> the connection that waits for room, and the time at which it was accepted."""

    async def open(self, address: str, port: int, *, reuses_port: bool, is_tls: bool, max_connections: int) -> int:
        """Listen; return the port of the first socket. Raises OSError when the address cannot be used."""
        self._is_tls, self.max_connections = is_tls, max_connections
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
        is_on_loopback = all(is_this_machine(item.getsockname()[0]) for item in self._sockets)
        for setup in self.setups:
            setup.connections.is_on_loopback = is_on_loopback
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
            min(self.setups, key=ConnectionSetup.count).begin(accepted, accepted_s)

    def _refuse(self, accepted: socket.socket, refusal: Refusal) -> None:
        with contextlib.suppress(OSError), accepted:
            if not self._is_tls:
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
        return sum(setup.count() for setup in self.setups)

    def silent_connections(self) -> list[SilentConnection]:
        return [silent for setup in self.setups for silent in setup.silent(self)]

    def run_soon(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def close_silent(self, silent: SilentConnection, on_closed: Callable[[], None]) -> bool:
        setup: ConnectionSetup
        setup, connection = silent.connection
        return setup.close_silent(connection, silent.since_s, on_closed)
