"""Queue that publishes the events of models (loaded, failed, unloaded) in order, outside the lock of the model
table."""

from __future__ import annotations

import threading
from collections import deque

from edge_server.telemetry.event_bus import EventValue, PublishEvent


class ModelEventQueue:
    """Thread-safe. `add` may be called under the table's lock, `publish` may not. `publisher` None: no events."""

    def __init__(self, publisher: PublishEvent | None = None) -> None:
        self.publisher: PublishEvent = publisher or (lambda kind, /, **fields: None)
        self._publishing = threading.RLock()
        self._waiting: deque[tuple[str, dict[str, EventValue]]] = deque()

    def add(self, kind: str, /, **fields: EventValue) -> None:
        """Add an event. Returns at once; it is published by the next `publish`."""
        self._waiting.append((kind, fields))

    def publish(self) -> None:
        """Publish all waiting events in order. Returns when all are published, by this or another thread."""
        with self._publishing:
            while self._waiting:
                kind, fields = self._waiting.popleft()
                self.publisher(kind, **fields)
