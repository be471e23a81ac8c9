"""Listener of a plugin's protocol: it takes its address at the server's start, and serves clients when models do."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Generic, TypeVar

from edge_server.errors import ServingFault

_WARNING_EVERY_S = 5.0

log = logging.getLogger(__name__)

C = TypeVar("C")
"""A connection."""


class PluginListener(Generic[C]):
    """Base of a class that accepts connections: it sets `server` and fills `connections`. Lives on one event loop."""

    def __init__(self, flag: str, address: str, backlog: int) -> None:
        """Listen, to know that no other server does; at most `backlog` clients wait until `server` is set. Raises
        ServingFault, which names the `flag` of the address, HOST:PORT."""
        self.flag = flag
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, place = found[0]
            self.socket = socket.create_server(place[:2], family=family, backlog=backlog)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServingFault(f"{flag}={address}: cannot listen: {reason}") from None
        self.port = int(self.socket.getsockname()[1])
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.port}"
        self.server: asyncio.Server | None = None
        self.connections: dict[C, asyncio.Task[None]] = {}
        """The task that serves each connection."""
        self._next_warning_s = 0.0

    def stop_listening(self) -> None:
        """Accept no more connections. May be called again."""
        if self.server is None:
            self.socket.close()
        else:
            self.server.close()

    async def stop(self) -> None:
        """Close all connections; requests that run get no answer. May be called again."""
        self.stop_listening()
        tasks = list(self.connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def warn(self, message: str) -> None:
        """Log why a client was refused, not too often."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARNING_EVERY_S
            log.warning("a client of %s was refused: %s", self.flag, message)
