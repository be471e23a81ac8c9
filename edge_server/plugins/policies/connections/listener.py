"""Listener for robots: accepts their connections, in limits, and ends those that stay strangers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from edge_server.errors import EdgeServerError, ServingFault
from edge_server.plugins.policies.connections.message_stream import MessageStream

log = logging.getLogger(__name__)

MAX_ROBOTS = 16
MAX_CONNECTIONS = 64
"""Also of clients that have not become a robot yet."""

_BACKLOG = 64
_HANDSHAKE_S = 10.0
_WARNING_EVERY_S = 5.0


class RobotListener:
    """Listens on one address, and serves connections from `start` to `stop`. Lives on one event loop."""

    def __init__(self, flag: str, address: str, serve: Callable[[MessageStream], Awaitable[None]]) -> None:
        """`serve` reads and answers the messages of one connection, which is closed when it returns. It may raise
        ConnectionError and EdgeServerError. Listens, to know that no other server does; clients wait until `start`.
        Raises ServingFault, which names the `flag` of the address, HOST:PORT."""
        self._flag = flag
        self._serve = serve
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, place = found[0]
            self._socket = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServingFault(f"{flag}={address}: cannot listen: {reason}") from None
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._connections: dict[MessageStream, asyncio.Task[None]] = {}
        self._strangers: dict[MessageStream, asyncio.TimerHandle] = {}
        """Connections that have not become a robot's yet, oldest first."""
        self._next_warning_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether as many robots are connected as may be."""
        return len(self._connections) - len(self._strangers) >= MAX_ROBOTS

    async def start(self) -> None:
        """Serve the clients that wait, and all later ones."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: MessageStream(self._accept), sock=self._socket)

    def stop_listening(self) -> None:
        """Accept no more connections. May be called again."""
        if self._server is None:
            self._socket.close()
        else:
            self._server.close()

    async def stop(self) -> None:
        """Close all connections. May be called again."""
        self.stop_listening()
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def welcome(self, stream: MessageStream) -> None:
        """Note that a connection has become a robot's. Until then it is closed after a time, or for a newer one: raises
        ConnectionError if it was."""
        timer = self._strangers.pop(stream, None)
        if timer is None:
            raise ConnectionAbortedError("the connection was closed for a newer one")
        timer.cancel()

    def warn(self, message: str) -> None:
        """Log why a client was refused, not too often."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARNING_EVERY_S
            log.warning("a client of %s was refused: %s", self._flag, message)

    def _accept(self, stream: MessageStream) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            if not self._strangers:
                stream.abort()
                return
            self._drop(next(iter(self._strangers)))
        loop = asyncio.get_running_loop()
        self._strangers[stream] = loop.call_later(_HANDSHAKE_S, self._drop, stream)
        self._connections[stream] = loop.create_task(self._run(stream))

    def _drop(self, stream: MessageStream) -> None:
        """Close a stranger's connection. Its task ends soon; it does not count any more."""
        self._strangers.pop(stream).cancel()
        del self._connections[stream]
        stream.abort()

    async def _run(self, stream: MessageStream) -> None:
        try:
            await self._serve(stream)
            await stream.finish()
        except ConnectionError:
            pass  # the client has left
        except EdgeServerError as error:
            self.warn(error.message)
        except Exception:
            # Else it would be lost with its task.
            log.exception("a connection of %s has ended by a defect of the server", self._flag)
        finally:
            stream.abort()
            self._connections.pop(stream, None)
            timer = self._strangers.pop(stream, None)
            if timer is not None:
                timer.cancel()
