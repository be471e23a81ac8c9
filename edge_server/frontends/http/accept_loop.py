"""Accept loop of a listening socket, with a limit of connections. It also works without free file descriptors.

asyncio's accept loop has no limit. Without a free file descriptor it retries a thousand times a second, and logs a
traceback each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import time

from edge_server.errors import Refusal
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.connection import Connections, HttpConnection
from edge_server.frontends.http.response import error_response, response_bytes

log = logging.getLogger(__name__)

MAX_DEFAULT_CONNECTIONS = 4096

_BACKLOG = 1024
_MAX_ACCEPTS_PER_TURN = 64
"""Maximum number of connections accepted in one turn of the event loop."""

_PAUSE_S = 0.5
"""Pause of the accept loop when there is no free file descriptor."""

_HANDSHAKE_S = 5.0
"""At the limit of connections, a TLS handshake that takes longer is cancelled for a new connection."""

_LOG_EVERY_S = 60.0
_RETRY_AFTER_S = 5.0
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
    """Accepts the connections of one listener, from `open` to `close`, on one event loop."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._limit = MAX_DEFAULT_CONNECTIONS
        self._arriving: dict[asyncio.Task[None], float] = {}
        """Connections that are being set up, with their start times; the oldest first."""
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s: dict[str, float] = {}

    async def open(self, address: str, port: int, *, reuses_port: bool, tls: ssl.SSLContext | None, limit: int) -> int:
        """Listen; return the port of the first socket. Raises OSError when the address cannot be used."""
        self._tls, self._limit = tls, limit
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
        for item in self._sockets:
            self._loop.add_reader(item, self._accept, item)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop accepting, and release the address. May be called again."""
        for timer in self._paused.values():
            timer.cancel()
        for item in self._sockets:
            self._loop.remove_reader(item)
            item.close()
        self._sockets.clear()
        self._paused.clear()
        for task in self._arriving:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_RESOURCE:
                    self._pause(listening, error)
                    return
                # accept(2) also returns the errors of one pending connection. The others are not affected.
                continue
            accepted.setblocking(False)
            if self._connections.count() >= self._limit and not self._make_room(accepted):
                continue
            task = self._loop.create_task(self._set_up(accepted, self._connections.expect()))
            self._arriving[task] = time.monotonic()
            task.add_done_callback(lambda task: self._arriving.pop(task, None))

    async def _set_up(self, accepted: socket.socket, protocol: HttpConnection) -> None:
        """Set up the connection. With TLS this waits for the handshake, up to a minute."""
        try:
            # The client causes a failed handshake: no log line.
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        finally:
            self._connections.expect_no_more(protocol)

    def _make_room(self, accepted: socket.socket) -> bool:
        """Close an idle connection or cancel a slow handshake for a new connection, or refuse the new one.

        Return whether the new connection is accepted.
        """
        text = f"{self._limit} HTTP connections are open already"
        is_free = self._connections.drop_idle()
        oldest = next(iter(self._arriving), None)
        if not is_free and oldest is not None and time.monotonic() - self._arriving[oldest] >= _HANDSHAKE_S:
            del self._arriving[oldest]
            oldest.cancel()
            is_free = True
        if is_free:
            self._log(f"{text}: the longest idle ones are closed for new ones")
            return True
        self._log(f"{text}, and none is idle: new ones are refused")
        with contextlib.suppress(OSError), accepted:
            if self._tls is None:
                response = error_response(Refusal(text, retry_after_s=_RETRY_AFTER_S))
                accepted.send(response_bytes(response, closes=True))
                accepted.shutdown(socket.SHUT_WR)
                # The kernel would discard the response if the socket were closed with unread bytes.
                accepted.recv(65536)
        return False

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Leave new connections in the kernel's queue for _PAUSE_S: an immediate retry would waste processor time."""
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(_PAUSE_S, self._resume, listening)
        is_free = self._connections.drop_idle()
        reaction = "the longest idle connection is closed" if is_free else "new connections wait"
        self._log(f"no HTTP connection can be accepted: {error.strerror}; {reaction}")

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _log(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(text, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[text] = now_s
            log.warning("%s", text)
