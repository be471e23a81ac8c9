"""What follows from counters: rates of events, energy across wrap-arounds, power from energy, loads that jump.

Pure; each object belongs to one counter and is fed with its readings in order.
"""

from __future__ import annotations

import math
from collections import deque

SUSTAINED_S = 60.0
_LEAST_INTERVAL_S = 0.05
"""Two readings closer than this tell nothing of a rate."""


class EventRate:
    """Turns a counter of events into rates."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int]] = deque()
        self._per_s: float | None = None

    def feed(self, count: int, now_s: float) -> tuple[float | None, float | None]:
        """Return the events a second since the last reading, and over the last minute once it is known."""
        past = self._past
        if past and count < past[-1][1]:
            # The driver was loaded again: what was counted before says nothing of now.
            past.clear()
            self._per_s = None
        if past and now_s - past[-1][0] < _LEAST_INTERVAL_S:
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
    """Adds up a counter that wraps around after `range_` units, or starts anew; None: it does not wrap.

    Power is the energy between two readings by the time between them.
    """

    def __init__(self, range_: int | None = None) -> None:
        self._range = range_
        self._last: int | None = None
        self._last_s = 0.0
        self._sum = 0
        self._power: float | None = None

    def feed(self, count: int, now_s: float, longest_s: float = math.inf) -> tuple[int, float | None]:
        """Return the energy so far in the counter's units, and units a second since the last reading.

        The first reading counts as it is. `longest_s`: after a longer silence the counter may have wrapped more than
        once, so that no power is told.
        """
        if self._last is None:
            self._sum = count
            self._last, self._last_s = count, now_s
            return self._sum, None
        elapsed_s = now_s - self._last_s
        if elapsed_s < _LEAST_INTERVAL_S:
            return self._sum, self._power
        step = count - self._last
        if step < 0:
            # Without a range, or with a count beyond it, it was set back to zero: what it shows came since.
            step = step + self._range if self._range and self._last <= self._range else count
        self._sum += step
        self._power = step / elapsed_s if elapsed_s <= longest_s else None
        self._last, self._last_s = count, now_s
        return self._sum, self._power


class Smooth:
    """An exponentially weighted mean with a time constant in seconds, for readings at any intervals."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._value: float | None = None
        self._then_s = 0.0

    def feed(self, value: float, now_s: float) -> float:
        if self._value is None:
            self._value = value
        else:
            part = 1.0 - math.exp(-max(0.0, now_s - self._then_s) / self._over_s)
            self._value += part * (value - self._value)
        self._then_s = now_s
        return self._value
