"""Listener for robots: accepts connections within limits, and closes those that do not complete the protocol's opening
in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edge_server.errors import EdgeServerError, QueueFull
from edge_server.frontends.plugin_listener import PluginListener
from edge_server.plugins.policies.connections.message_stream import MessageStream

log = logging.getLogger(__name__)

MAX_ROBOTS = 16
MAX_CONNECTIONS = 64
"""Also of clients that have not become a robot yet."""

_BACKLOG = 64
_HANDSHAKE_S = 10.0


class RobotListener(PluginListener[MessageStream]):
    """Listens on one address, and serves connections from `start` to `stop`. Lives on one event loop."""

    def __init__(self, flag: str, address: str, serve: Callable[[MessageStream], Awaitable[None]]) -> None:
        """`serve` reads and answers the messages of one connection, which is closed when it returns. It may raise
        ConnectionError and EdgeServerError. See PluginListener."""
        super().__init__(flag, address, _BACKLOG)
        self._serve = serve
        self._strangers: dict[MessageStream, asyncio.TimerHandle] = {}
        """Connections that have not become a robot's yet, oldest first."""

    def check_room(self) -> None:
        """Raise QueueFull if as many robots are connected as may be."""
        if len(self.connections) - len(self._strangers) >= MAX_ROBOTS:
            raise QueueFull(f"{MAX_ROBOTS} robots are connected, which is the maximum")

    async def start(self) -> None:
        """Serve the clients that wait, and all later ones."""
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: MessageStream(self._accept), sock=self.socket)

    def welcome(self, stream: MessageStream) -> None:
        """Note that a connection has become a robot's. Until then it is closed after a time, or for a newer one: raises
        ConnectionError if it was."""
        timer = self._strangers.pop(stream, None)
        if timer is None:
            raise ConnectionAbortedError("the connection was closed for a newer one")
        timer.cancel()

    def _accept(self, stream: MessageStream) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            if not self._strangers:
                stream.abort()
                return
            self._drop(next(iter(self._strangers)))
        loop = asyncio.get_running_loop()
        self._strangers[stream] = loop.call_later(_HANDSHAKE_S, self._drop, stream)
        self.connections[stream] = loop.create_task(self._run(stream))

    def _drop(self, stream: MessageStream) -> None:
        """Close a stranger's connection. Its task ends soon; it does not count any more."""
        self._strangers.pop(stream).cancel()
        del self.connections[stream]
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
            log.exception("a connection of %s has ended by a defect of the server", self.flag)
        finally:
            stream.abort()
            self.connections.pop(stream, None)
            timer = self._strangers.pop(stream, None)
            if timer is not None:
                timer.cancel()
