"""One in-process bus for things that happened: a model loaded, failed, was unloaded.

Who causes something publishes it and goes on; who wants to know subscribes or reads the history. Events are for people
and dashboards: nothing in serving depends on one being seen.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
GOVERNOR_STATE = "governor.state"
GOVERNOR_CLOCK_CAP = "governor.clock_cap"
SENSOR_LOST = "governor.sensor_lost"
SENSOR_BACK = "governor.sensor_back"
VARIANT_CHANGED = "governor.variant"
ENGINE_BUILD_STARTED = "engine.build_started"
ENGINE_BUILD_PROGRESS = "engine.build_progress"
ENGINE_BUILD_PAUSED = "engine.build_paused"
ENGINE_BUILD_RESUMED = "engine.build_resumed"
ENGINE_BUILD_FAILED = "engine.build_failed"
ENGINE_BUILD_CANCELLED = "engine.build_cancelled"
ENGINE_READY = "engine.ready"

EventValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Event:
    """`number` counts all events of the bus from 1; `time_s` is seconds since the epoch."""

    number: int
    time_s: float
    kind: str
    fields: Mapping[str, EventValue]


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands events to subscribers and remembers the latest `history_size`. Thread-safe.

    `run_id` differs from bus to bus: numbers of one run of the server mean nothing in the next.
    """

    def __init__(self, history_size: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self.run_id = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._clock = clock
        self._history: deque[Event] = deque(maxlen=history_size)
        self._subscribers: tuple[Subscriber, ...] = ()
        self._count = 0

    def publish(self, kind: str, /, **fields: EventValue) -> Event:
        """Record an event and call every subscriber on this thread, outside any lock.

        Two threads may reach a subscriber in either order; `Event.number` tells the true one. A subscriber that raises
        is logged and does not disturb the publisher or the other subscribers.
        """
        with self._lock:
            self._count += 1
            event = Event(self._count, self._clock(), kind, fields)
            self._history.append(event)
            subscribers = self._subscribers
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:  # noqa: BLE001 - a listener's bug must not stop a model from loading
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
        """Return the number of the latest event, 0 when there was none."""
        with self._lock:
            return self._count

    def history(self, after: int = 0) -> list[Event]:
        """Return the remembered events numbered above `after`, oldest first."""
        with self._lock:
            return [event for event in self._history if event.number > after]
