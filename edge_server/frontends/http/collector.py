"""An inference's body that comes in pieces: received in place, without a copy, up to its last byte and no further."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from edge_server.frontends.http.body import ALIGNMENT
from edge_server.frontends.http.head import InferTarget

if TYPE_CHECKING:
    from edge_server.frontends.http.connection import Connection


class Collector(asyncio.BufferedProtocol):
    """Receives one body for its connection. Lives on one event loop."""

    def __init__(self, connection: Connection, target: InferTarget, size: int, begun: bytes) -> None:
        self._connection = connection
        self._target = target
        pad = -max(0, target.json_size or 0) % ALIGNMENT
        # Left uninitialised: pages of a body that never comes are never touched.
        self._body = np.empty(size + pad, np.uint8).data[pad:]
        self.size = size
        self.filled = len(begun)
        self.ticks = 0
        """Looks at its rate; see `Connection.tick`."""
        self.filled_before = 0
        """How much of it was there at the last of them."""
        self._body[: self.filled] = begun

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.has_moved = True
        self.filled += nbytes
        if self.filled == self.size:
            self._connection.collected(self._target, self._body.toreadonly())

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
