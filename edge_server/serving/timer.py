"""Thread that calls functions at given times (queue delays, request timeouts, retries)."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_MAX_WAIT_S = 3600.0
"""Clients choose the times. A wait beyond threading.TIMEOUT_MAX would raise; waking up once more is harmless."""


_SLACK = 64
"""Number of cancelled calls that may stay in the queue, beyond one for each call to come."""


class Alarm:
    """A scheduled call; `cancel` prevents it, unless it has already begun."""

    __slots__ = ("call", "when_ns")

    def __init__(self, when_ns: int, call: Callable[[], None] | None) -> None:
        self.when_ns = when_ns
        self.call = call

    def cancel(self) -> None:
        self.call = None


class Timer:
    """Calls run one after the other on the timer's thread and must return at once."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[int, int, Alarm]] = []
        self._order = itertools.count()
        self._kept_count = 0
        """Number of calls that were left at the last removal of cancelled ones."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="edge-timer", daemon=True)
        self._thread.start()

    def call_at(self, when_ns: int, call: Callable[[], None]) -> Alarm:
        """Schedule `call()` at `when_ns` (time.monotonic_ns), or at once if that is past."""
        alarm = Alarm(when_ns, call)
        with self._condition:
            heapq.heappush(self._heap, (when_ns, next(self._order), alarm))
            if self._heap[0][2] is alarm:
                self._condition.notify()
            if len(self._heap) > 2 * self._kept_count + _SLACK:
                self._remove_cancelled()
        return alarm

    def close(self) -> None:
        """Stop; calls that have not begun are dropped."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _remove_cancelled(self) -> None:
        """Remove cancelled calls. Otherwise they would pile up until their time, which clients choose."""
        self._heap = [entry for entry in self._heap if entry[2].call is not None]
        heapq.heapify(self._heap)
        self._kept_count = len(self._heap)

    def _loop(self) -> None:
        while True:
            with self._condition:
                alarm = self._next_due()
                if alarm is None:
                    return
            call = alarm.call
            if call is None:
                continue
            try:
                call()
            except Exception:
                # All alarms share this thread: a call that fails must not stop the later ones.
                log.exception("a timed call failed")

    def _next_due(self) -> Alarm | None:
        while not self._is_closed:
            if not self._heap:
                self._condition.wait()
                continue
            wait_ns = self._heap[0][0] - time.monotonic_ns()
            if wait_ns <= 0 or self._heap[0][2].call is None:
                return heapq.heappop(self._heap)[2]
            self._condition.wait(min(wait_ns / 1e9, _MAX_WAIT_S))
        return None
