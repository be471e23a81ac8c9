"""Queue of model events, published in order and outside the manager's lock."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from edge_server.telemetry.event_bus import EventValue


class PublishModelEvent(Protocol):
    """Told of every step in a version's life: `kind` is one of the `MODEL_...` names of telemetry.events."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


class ModelEventQueue:
    """`add` from any thread, under the manager's lock or not; `tell` never under it. `announce` None: nobody hears."""

    def __init__(self, announce: PublishModelEvent | None = None) -> None:
        self.announce: PublishModelEvent = announce or (lambda kind, /, **fields: None)
        self._announcing = threading.RLock()
        self._untold: deque[tuple[str, dict[str, EventValue]]] = deque()

    def add(self, kind: str, /, **fields: EventValue) -> None:
        """Note what happened. Returns at once; nobody is told before the next `tell`."""
        self._untold.append((kind, fields))

    def tell(self) -> None:
        """Announce what was noted, in order. Returns when all of it was announced, by whomever."""
        with self._announcing:
            while self._untold:
                kind, fields = self._untold.popleft()
                self.announce(kind, **fields)
