"""Meters for status displays: events per second, and quantiles (such as the median) of the latest values. Times are
nanoseconds of any monotonic clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

WINDOW_S = 5.0
_MAX_TIMES = 1024
_MAX_VALUES = 256


class Rate:
    """Events per second over the last WINDOW_S; over a shorter time if there are more than 1,024 events."""

    def __init__(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._times: deque[int] = deque(maxlen=_MAX_TIMES)

    def add(self, now_ns: int) -> None:
        self._times.append(now_ns)

    def per_s(self, now_ns: int) -> float:
        since_ns = max(now_ns - int(WINDOW_S * 1e9), self._began_ns)
        if len(self._times) == _MAX_TIMES:
            since_ns = max(since_ns, self._times[0])
        count = len(self._times) - bisect_left(self._times, since_ns)
        return count / (now_ns - since_ns) * 1e9 if now_ns > since_ns else 0.0


class RecentQuantiles:
    """Quantiles of the last 256 values."""

    def __init__(self) -> None:
        self._values: deque[int] = deque(maxlen=_MAX_VALUES)

    def add(self, value: int) -> None:
        self._values.append(value)

    def quantile(self, fraction: float) -> int:
        """Return the smallest value that at least `fraction` (0 to 1) of the values do not exceed; 0 without values."""
        ordered = sorted(self._values)
        return ordered[max(0, math.ceil(len(ordered) * fraction) - 1)] if ordered else 0
