"""Conversion of counters to rates: events per second, power from energy counters that wrap around, smoothed loads.

No clock, no I/O. Each object belongs to one counter and gets its readings in order.
"""

from __future__ import annotations

import math
from collections import deque

SUSTAINED_S = 60.0
_MIN_INTERVAL_S = 0.05
"""Shortest interval between two readings for a rate."""


class EventRate:
    """Turns a counter of events into rates."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int]] = deque()
        self._per_s: float | None = None

    def feed(self, count: int, now_s: float) -> tuple[float | None, float | None]:
        """Add a reading. Return the events per second since the last reading, and over the last minute if known."""
        past = self._past
        if past and count < past[-1][1]:
            # The driver was loaded again and the counter was reset.
            past.clear()
            self._per_s = None
        if past and now_s - past[-1][0] < _MIN_INTERVAL_S:
            return self._per_s, self._sustained()
        past.append((now_s, count))
        if len(past) > 1:
            (before_s, before), (at_s, at) = past[-2], past[-1]
            self._per_s = (at - before) / (at_s - before_s)
        while len(past) > 2 and now_s - past[1][0] >= SUSTAINED_S:
            past.popleft()
        return self._per_s, self._sustained()

    def _sustained(self) -> float | None:
        (first_s, first), (last_s, last) = self._past[0], self._past[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= SUSTAINED_S else None


class EnergyMeter:
    """Total of an energy counter that wraps around after `range_` units or is reset; None: it does not wrap.

    Power is the energy between two readings divided by the time between them.
    """

    def __init__(self, range_: int | None = None) -> None:
        self._range = range_
        self._last: int | None = None
        self._last_s = 0.0
        self._sum = 0
        self._power: float | None = None

    def feed(self, count: int, now_s: float, longest_s: float = math.inf) -> tuple[int, float | None]:
        """Add a reading. Return the total energy in the counter's units, and units per second since the last reading.

        The first reading is the initial total. After a gap of more than `longest_s` the power is None, because the
        counter may have wrapped more than once.
        """
        if self._last is None:
            self._sum = count
            self._last, self._last_s = count, now_s
            return self._sum, None
        elapsed_s = now_s - self._last_s
        if elapsed_s < _MIN_INTERVAL_S:
            return self._sum, self._power
        step = count - self._last
        if step < 0:
            # Without a range, or with a count beyond the range, the counter was reset to zero.
            step = step + self._range if self._range and self._last <= self._range else count
        self._sum += step
        self._power = step / elapsed_s if elapsed_s <= longest_s else None
        self._last, self._last_s = count, now_s
        return self._sum, self._power


class MovingAverage:
    """Exponential moving average with a time constant in seconds, for readings at any intervals."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._value: float | None = None
        self._then_s = 0.0

    def feed(self, value: float, now_s: float) -> float:
        """Add a reading and return the average."""
        if self._value is None:
            self._value = value
        else:
            part = 1.0 - math.exp(-max(0.0, now_s - self._then_s) / self._over_s)
            self._value += part * (value - self._value)
        self._then_s = now_s
        return self._value
