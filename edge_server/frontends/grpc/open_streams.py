"""The streams that are open, by whichever door: how many there may be, and which must end before the server does."""

from __future__ import annotations

import threading
from typing import Protocol

from edge_server.errors import Throttled


class Stoppable(Protocol):
    def stop(self) -> None:
        """End as soon as nothing is outstanding."""


class OpenStreams:
    """Thread-safe. `max_streams` bounds how many calls of unlimited length are open at once."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._count = 0
        self._streams: set[Stoppable] = set()
        self._is_stopping = False

    def enter(self) -> None:
        """Count a stream in. Raises Throttled when there are too many."""
        with self._lock:
            if self._count >= self._max_streams:
                raise Throttled(f"{self._max_streams} streams are open, which is as many as are served at once")
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1

    def add(self, stream: Stoppable) -> None:
        """Have the stream stopped when all are, which may be now."""
        with self._lock:
            self._streams.add(stream)
            is_stopping = self._is_stopping
        if is_stopping:
            stream.stop()

    def remove(self, stream: Stoppable) -> None:
        with self._lock:
            self._streams.discard(stream)

    def stop(self) -> None:
        """Stop those that were added, and those that will be."""
        with self._lock:
            self._is_stopping = True
            streams = list(self._streams)
        for stream in streams:
            stream.stop()
