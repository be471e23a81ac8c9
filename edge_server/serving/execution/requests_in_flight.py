"""Requests of one version that are not over: counted, so that the version is closed after the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from edge_server.errors import EdgeServerError, NotReady
from edge_server.serving.timer import Timer

Item = TypeVar("Item")


class RequestsInFlight(Generic[Item]):
    """Thread-safe. Nothing is accepted before `accept`, and after `close`."""

    def __init__(self, name: str, timer: Timer) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight: set[Item] = set()
        # Makes a new error each time: an error raised again and again would collect the stack frames of all its
        # callers.
        self._refusal: Callable[[], EdgeServerError] | None = lambda: NotReady(f"model '{name}' is not ready yet")
        self._on_idle: Callable[[], None] | None = None
        self._timer = timer

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def accept(self) -> None:
        """Begin to accept requests."""
        with self._lock:
            self._refusal = None

    def add(self, item: Item) -> None:
        """Count a request. Raises the error given to `close`."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            self._in_flight.add(item)

    def remove(self, item: Item) -> None:
        """Count a request no longer."""
        with self._lock:
            self._in_flight.discard(item)
            self._notify_if_idle()

    def items(self) -> list[Item]:
        with self._lock:
            return list(self._in_flight)

    def close(self, refusal: Callable[[], EdgeServerError]) -> None:
        """Accept no new requests; waiting and running ones continue. Later ones get the error that `refusal` makes."""
        with self._lock:
            self._refusal = refusal
            self._notify_if_idle()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait, after `close`, until nothing is in flight and no thread is in an instance; False on time-out."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, timeout_s)

    def call_when_idle(self, call: Callable[[], None]) -> None:
        """Call the function on the timer's thread once nothing is in flight and no thread runs an instance; after
        `close`."""
        with self._lock:
            self._on_idle = call
            self._notify_if_idle()

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return not self._in_flight

    def _notify_if_idle(self) -> None:
        if self._refusal is not None and self._is_idle():
            self._idle.notify_all()
            if self._on_idle is not None:
                self._timer.call_at(0, self._on_idle)
                self._on_idle = None
