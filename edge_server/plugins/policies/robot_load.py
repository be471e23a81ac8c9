"""Estimate of the computing time that connected robots need, from the times between their observations and the times of
their runs."""

from __future__ import annotations

import math
from collections import deque

from edge_server.errors import DeadlineExceeded, EdgeServerError, QueueFull, Throttled

_MAX_FAILED = 10
"""Number of observations in a row that fail, after which a robot needs nothing until one is answered."""
_REMEMBERED_ARRIVALS = 16


_REMEMBERED_RUNS = 8


class RobotLoad:
    """Computing that the observations of one robot need: their number per second times the shortest of the latest runs,
    as the others waited. Changed on the event loop; any thread may read `need`."""

    def __init__(self) -> None:
        self.need = 0.0
        """Seconds of computing per second; 0 between two episodes, and from the tenth observation in a row that failed
        to the next answer. Infinite while it is unknown: until an observation has run and the episode has a second
        one."""
        self._arrivals_s: deque[float] = deque(maxlen=_REMEMBERED_ARRIVALS)
        self._runs_s: deque[float] = deque(maxlen=_REMEMBERED_RUNS)
        self._failed = 0

    def add_arrival(self, now_s: float) -> None:
        """Count an observation, also one that is refused."""
        self._arrivals_s.append(now_s)
        self._measure()

    def add_run(self, seconds: float) -> None:
        """Count an answer."""
        self._runs_s.append(seconds)
        self._failed = 0
        self._measure()

    def add_failure(self, error: EdgeServerError) -> None:
        """Count an observation without an answer. One that the machine had no time for is no failure: it shows that the
        robot needs more."""
        if not isinstance(error, (Throttled, QueueFull, DeadlineExceeded)):
            self._failed += 1
            self._measure()

    def end_episode(self) -> None:
        self._arrivals_s.clear()
        self._measure()

    def _measure(self) -> None:
        if not self._arrivals_s or self._failed >= _MAX_FAILED:
            self.need = 0.0
            return
        duration_s = self._arrivals_s[-1] - self._arrivals_s[0]
        if duration_s <= 0 or not self._runs_s:
            self.need = math.inf
        else:
            self.need = (len(self._arrivals_s) - 1) / duration_s * min(self._runs_s)
