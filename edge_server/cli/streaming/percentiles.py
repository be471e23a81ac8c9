"""Rates and percentiles of repeated values: of the last seconds, and of the whole run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence


class RecentValues:
    """Values of the last `span_s` seconds. The clock is passed in and never goes back."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._items: deque[tuple[float, float]] = deque()
        self._began: float | None = None

    def add(self, now: float, value: float = 0.0) -> None:
        self._began = now if self._began is None else self._began
        self._items.append((now, value))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return how many came a second; in the first seconds, of the time since the first."""
        self._forget(now)
        if self._began is None:
            return 0.0
        passed_s = now - self._began
        if passed_s >= self._span_s:
            return len(self._items) / self._span_s
        # The first one opens the count of time and is none of the intervals in it.
        return (len(self._items) - 1) / passed_s if passed_s > 0 else 0.0

    def values(self, now: float) -> list[float]:
        self._forget(now)
        return [value for _, value in self._items]

    def _forget(self, now: float) -> None:
        while self._items and self._items[0][0] <= now - self._span_s:
            self._items.popleft()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0..1) of the values do not exceed, NaN of no values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class Percentiles:
    """Percentiles of any number of positive values in little memory: each is kept to within a hundredth of itself.

    The largest is exact.
    """

    _STEP = math.log(1.01)
    _SMALLEST = 1e-9

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.largest = math.nan

    def add(self, value: float) -> None:
        box = math.floor(math.log(max(value, self._SMALLEST)) / self._STEP)
        self._counts[box] = self._counts.get(box, 0) + 1
        self.count += 1
        self.largest = value if math.isnan(self.largest) else max(self.largest, value)

    def percentile(self, share: float) -> float:
        """Return the value that at least `share` (0..1) of the values do not exceed, NaN without values."""
        wanted, seen = max(math.ceil(share * self.count), 1), 0
        for box in sorted(self._counts):
            seen += self._counts[box]
            if seen >= wanted:
                # The middle of the box, which may lie above everything that came.
                return min(math.exp((box + 0.5) * self._STEP), self.largest)
        return math.nan

    @classmethod
    def joined(cls, spreads: Iterable[Percentiles]) -> Percentiles:
        """Return one of all the values."""
        whole = cls()
        for one in spreads:
            for box, count in one._counts.items():
                whole._counts[box] = whole._counts.get(box, 0) + count
            whole.count += one.count
            known = [value for value in (whole.largest, one.largest) if not math.isnan(value)]
            whole.largest = max(known, default=math.nan)
        return whole
