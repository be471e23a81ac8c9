"""An inference's body that comes in pieces: received in place, without a copy, up to its last byte and no further."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import numpy as np

from edge_server.errors import Refusal
from edge_server.frontends.http.body import ALIGNMENT
from edge_server.frontends.http.budget import BodyBudget
from edge_server.frontends.http.head import InferTarget

if TYPE_CHECKING:
    from edge_server.frontends.http.connection import Connection

_FORGOTTEN = memoryview(bytearray(64 * 1024))
"""Where the rest of a refused body goes, of all connections: nobody reads it."""


class Collector(asyncio.BufferedProtocol):
    """Receives one body for its connection. Lives on one event loop.

    A body that gives way to others is read to its end all the same, and forgotten: a client that sends all before it
    reads would otherwise never see the answer.
    """

    def __init__(self, connection: Connection, target: InferTarget, size: int, budget: BodyBudget) -> None:
        self._connection = connection
        self._target = target
        self._budget = budget
        pad = -max(0, target.json_size or 0) % ALIGNMENT
        self._body: memoryview | None = None
        with contextlib.suppress(MemoryError):
            # Left uninitialised: pages of a body that never comes are never touched.
            self._body = np.empty(size + pad, np.uint8).data[pad:]
        self.size = size
        self.filled = 0
        self.ticks = 0
        """Looks at its rate; see `Connection.tick`."""
        self.filled_before = 0
        """How much of it was there at the last of them."""

    @property
    def is_refused(self) -> bool:
        """Whether it was answered already, and is only read to its end."""
        return self._body is None

    def begin(self, begun: bytes) -> None:
        """Take what came with the head. To be called once the connection's bytes come here."""
        if self._body is None:
            self.filled = len(begun)
            self._connection.refuse_body(Refusal(f"there is no memory for a request body of {self.size} bytes"))
            return
        self._body[: len(begun)] = begun
        self._budget.enter(self)
        self._count(len(begun))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is None:
            return _FORGOTTEN[: self.size - self.filled]
        return self._body[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.has_moved = True
        body = self._body
        if body is None:
            self.filled += nbytes
            if self.filled == self.size:
                self._connection.forgotten()
        elif self.filled + nbytes == self.size:
            self.drop()
            self.filled = self.size
            self._connection.collected(self._target, body.toreadonly())
        else:
            self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        budget = self._budget
        self.filled += nbytes
        budget.held += nbytes
        if budget.held > budget.total:
            budget.make_room()

    def drop(self) -> None:
        """Let go of what is held. May be called again."""
        if self._body is not None:
            self._body = None
            self._budget.leave(self)

    def give_way(self, refusal: Refusal) -> None:
        self.drop()
        self._connection.refuse_body(refusal)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
