"""Event bus inside the process: passes events of models, the server and plugins to subscribers, and keeps a history.

`publish` never waits for a reader: it calls the subscribers and returns. Events are for people and dashboards; serving
does not depend on them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

_log = logging.getLogger(__name__)

MODEL_LOADING = "model.loading"
MODEL_READY = "model.ready"
MODEL_FAILED = "model.failed"
MODEL_DRAINING = "model.draining"
MODEL_UNLOADED = "model.unloaded"
MODEL_EVICTED = "model.evicted"
MODEL_CANARY_FAILED = "model.canary_failed"
MODEL_HUNG = "model.hung"
GPU_LOST = "gpu.lost"
MODEL_PINNED = "model.pinned"
MODEL_UNPINNED = "model.unpinned"
SERVER_READY = "server.ready"
SERVER_STOPPING = "server.stopping"

EventValue = str | int | float | bool | None


class Event(NamedTuple):
    """Something that happened. `number` counts the events of the bus from 1; `time_s` is in seconds since the epoch."""

    number: int
    time_s: float
    kind: str
    fields: Mapping[str, EventValue]


class PublishEvent(Protocol):
    """`EventBus.publish`, for code that publishes events and needs nothing else of the bus."""

    def __call__(self, kind: str, /, **fields: EventValue) -> object: ...


Subscriber = Callable[[Event], None]


class EventBus:
    """Calls subscribers with each event and keeps the latest `history_size` events, and of frequent events as many of
    their own, so that they displace no others. Thread-safe.

    `run_id` is random for each bus: event numbers are valid for one run of the server only.
    """

    def __init__(self, history_size: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self.run_id = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._clock = clock
        self._history: deque[Event] = deque(maxlen=history_size)
        self._frequent: deque[Event] = deque(maxlen=history_size)
        self._subscribers: tuple[Subscriber, ...] = ()
        self._count = 0

    def publish(self, kind: str, /, **fields: EventValue) -> Event:
        """Record an event and call every subscriber on this thread, outside any lock.

        Events of two threads may reach a subscriber in either order; `Event.number` has the true order. An error of a
        subscriber is logged; the publisher and the other subscribers continue.
        """
        return self._publish(self._history, kind, fields)

    def publish_frequent(self, kind: str, /, **fields: EventValue) -> Event:
        """As `publish`, for events that may come every second."""
        return self._publish(self._frequent, kind, fields)

    def _publish(self, history: deque[Event], kind: str, fields: Mapping[str, EventValue]) -> Event:
        with self._lock:
            self._count += 1
            event = Event(self._count, self._clock(), kind, fields)
            history.append(event)
            subscribers = self._subscribers
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:  # noqa: BLE001 - a subscriber's bug must not stop a model from loading
                _log.exception("a subscriber failed on event %d (%s)", event.number, kind)
        return event

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` for every event from now on, until the function returned is called."""

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)

        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)
        return unsubscribe

    def latest(self) -> int:
        """Return the number of the latest event, or 0 before the first event."""
        with self._lock:
            return self._count

    def history(self, after: int = 0) -> list[Event]:
        """Return the kept events numbered above `after`, oldest first."""
        with self._lock:
            kept = [event for history in (self._history, self._frequent) for event in history if event.number > after]
        return sorted(kept)


class EventQueue:
    """Queue of events that are published in order, outside the lock under which they come to be. Thread-safe.

    `add` may be called under that lock, `publish` may not. `publisher` None: no events.
    """

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
