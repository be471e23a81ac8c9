"""Computation of rates and percentiles of the frames of `edge-server stream`, over the last seconds and over the whole
run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence


class RecentValues:
    """Values of the last `span_s` seconds. The time is an argument and must not decrease."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._items: deque[tuple[float, float]] = deque()
        self._began: float | None = None

    def add(self, now: float, value: float = 0.0) -> None:
        self._began = now if self._began is None else self._began
        self._items.append((now, value))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return the number of values per second. Before `span_s` have passed, use the time since the first value."""
        self._forget(now)
        if self._began is None:
            return 0.0
        passed_s = now - self._began
        if passed_s >= self._span_s:
            return len(self._items) / self._span_s
        # n values have n - 1 intervals between them.
        return (len(self._items) - 1) / passed_s if passed_s > 0 else 0.0

    def values(self, now: float) -> list[float]:
        self._forget(now)
        return [value for _, value in self._items]

    def _forget(self, now: float) -> None:
        while self._items and self._items[0][0] <= now - self._span_s:
            self._items.popleft()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; `share` is between 0 and 1. NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class Percentiles:
    """Percentiles of positive values in little memory: a histogram with bins of 1 % width.

    Percentiles are accurate to 1 %; the largest value is exact.
    """

    _STEP = math.log(1.01)
    _SMALLEST = 1e-9

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.largest = math.nan

    def add(self, value: float) -> None:
        index = math.floor(math.log(max(value, self._SMALLEST)) / self._STEP)
        self._counts[index] = self._counts.get(index, 0) + 1
        self.count += 1
        self.largest = value if math.isnan(self.largest) else max(self.largest, value)

    def percentile(self, share: float) -> float:
        """Return the nearest-rank percentile; `share` is between 0 and 1. NaN without values."""
        wanted, seen = max(math.ceil(share * self.count), 1), 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= wanted:
                # The middle of the bin may be larger than the largest value.
                return min(math.exp((index + 0.5) * self._STEP), self.largest)
        return math.nan

    @classmethod
    def joined(cls, parts: Iterable[Percentiles]) -> Percentiles:
        """Return the percentiles of all values together."""
        whole = cls()
        for one in parts:
            for index, count in one._counts.items():
                whole._counts[index] = whole._counts.get(index, 0) + count
            whole.count += one.count
            known = [value for value in (whole.largest, one.largest) if not math.isnan(value)]
            whole.largest = max(known, default=math.nan)
        return whole
