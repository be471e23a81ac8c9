"""Accepting connections: as many as are allowed, also while the process has no file left for one more.

asyncio's own accepting knows no bound, and without a free file it tries a thousand times a second, with a traceback
in the log for each.
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
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import Refusal
from edge_server.frontends.http.response import error_reply, reply_bytes

if TYPE_CHECKING:
    from edge_server.frontends.http.connection import HttpConnection

log = logging.getLogger(__name__)

MAX_DEFAULT_CONNECTIONS = 4096

_BACKLOG = 1024
_IN_A_ROW = 64
"""Connections accepted before the loop looks after those it has."""

_REST_S = 0.5
"""How long nothing is accepted when there is no file for it."""

_HANDSHAKE_S = 5.0
"""How long a handshake of TLS keeps its place when there is no other for a new connection."""

_LOG_EVERY_S = 60.0
_RETRY_AFTER_S = 5.0
_NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def max_connections(setting: int) -> int:
    """Return the bound that a setting means: itself, or for 0 half of the files that the process may have open, so that
    models, gRPC and metrics find theirs; at most MOST_BY_DEFAULT."""
    if setting:
        return setting
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_DEFAULT_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_DEFAULT_CONNECTIONS, files // 2))
    )


class ConnectionLimit(Protocol):
    """The connections of a listener."""

    def count(self) -> int:
        """Return how many are open or on their way, each counted once."""

    def expect(self) -> HttpConnection:
        """Return the protocol of one that was accepted; it counts from now on."""

    def expect_no_more(self, connection: HttpConnection) -> None:
        """It is open, or was given up on its way."""

    def drop_idle(self) -> bool:
        """Close the one that has been idle the longest; return whether there was one: a client that comes counts for
        more than one that went silent, as with nginx."""


class Acceptor:
    """Accepts for one listener, from `open` to `close`, on one event loop.

    `crowd` knows the connections, and counts those on their way here with the open ones.
    """

    def __init__(self, crowd: ConnectionLimit) -> None:
        self._crowd = crowd
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._limit = MAX_DEFAULT_CONNECTIONS
        self._arriving: dict[asyncio.Task[None], float] = {}
        """Connections on their way, and since when; the earliest first."""
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s: dict[str, float] = {}

    async def open(self, address: str, port: int, *, reuses_port: bool, tls: ssl.SSLContext | None, limit: int) -> int:
        """Listen; return the port of the first socket. Raises OSError when the address cannot be had."""
        self._tls, self._limit = tls, limit
        # asyncio finds the addresses and binds; the accepting is done here.
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
        for item in self._sockets:
            self._loop.add_reader(item, self._accept, item)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept nothing further, and give the address up. May be called again."""
        for resting in self._resting.values():
            resting.cancel()
        for item in self._sockets:
            self._loop.remove_reader(item)
            item.close()
        self._sockets.clear()
        self._resting.clear()
        for task in self._arriving:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_IN_A_ROW):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_RESOURCE:
                    self._rest(listening, error)
                    return
                # accept(2): what went wrong with one connection on its way comes out here; it costs no other.
                continue
            accepted.setblocking(False)
            if self._crowd.count() >= self._limit and not self._make_room(accepted):
                continue
            task = self._loop.create_task(self._welcome(accepted, self._crowd.expect()))
            self._arriving[task] = time.monotonic()
            task.add_done_callback(self._arrived)

    async def _welcome(self, accepted: socket.socket, protocol: HttpConnection) -> None:
        """Make the connection; with TLS, this is where its handshake may take a minute, and fail."""
        try:
            # TimeoutError, and all that a handshake fails with, is the client's affair.
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
        finally:
            self._crowd.expect_no_more(protocol)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._arriving.pop(task, None)

    def _drop_arriving(self) -> bool:
        """Give up the handshake that has taken longest, if that is long. False when there is none."""
        task = next(iter(self._arriving), None)
        if task is None or time.monotonic() - self._arriving[task] < _HANDSHAKE_S:
            return False
        del self._arriving[task]
        task.cancel()
        return True

    def _make_room(self, accepted: socket.socket) -> bool:
        text = f"{self._limit} HTTP connections are open already"
        if self._crowd.drop_idle() or self._drop_arriving():
            self._log(f"{text}: those that idle the longest are closed for new ones")
            return True
        self._log(f"{text}, and none is idle: new ones are refused")
        with contextlib.suppress(OSError), accepted:
            if self._tls is None:
                reply = error_reply(Refusal(text, retry_after_s=_RETRY_AFTER_S))
                accepted.send(reply_bytes(reply, closes=True))
                accepted.shutdown(socket.SHUT_WR)
                # What lies unread when a socket is closed takes the answer with it.
                accepted.recv(65536)
        return False

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Leave who waits in the system's queue for a moment: without a file, asking again at once would only spin."""
        self._loop.remove_reader(listening)
        self._resting[listening] = self._loop.call_later(_REST_S, self._resume, listening)
        has_room = self._crowd.drop_idle()
        then = "the connection that idled the longest is closed" if has_room else "new connections wait"
        self._log(f"no HTTP connection can be accepted: {error.strerror}; {then}")

    def _resume(self, listening: socket.socket) -> None:
        del self._resting[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _log(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(text, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_s[text] = now_s
            log.warning("%s", text)
