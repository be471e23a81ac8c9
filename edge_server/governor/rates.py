"""Who may start work while less than everything is allowed: one store of computing time, three classes of priority.

The store is filled by the share that the law grants and emptied by the time that work takes. The fuller it has to be
for a class to draw from it, the earlier the class goes without: bulk first, then normal, control last. Control has a
small store of its own besides, which nothing takes from it. Pure: the caller holds its lock and brings the time.
"""

from __future__ import annotations

import enum

MAX_WAIT_S = 30.0
"""The longest time that a refusal names: what lies further ahead is not known."""

_BURST_S = 0.5
"""What the store holds at most, in seconds at the granted rate."""

_LEAST_BURST_S = 0.1
"""... and at least, in seconds of computing."""


class PriorityClass(enum.IntEnum):
    """How much work matters. The value is the order in which it goes: control before normal before bulk."""

    CONTROL = 1
    NORMAL = 2
    BULK = 3

    @classmethod
    def of_priority(cls, priority: int) -> PriorityClass:
        """Return the class of a request's or a stream's priority: 1 is control, 0 and 2 normal, above that bulk."""
        if priority == 1:
            return cls.CONTROL
        return cls.NORMAL if priority in (0, 2) else cls.BULK


_RESERVE = {PriorityClass.CONTROL: 0.0, PriorityClass.NORMAL: 0.25, PriorityClass.BULK: 0.5}
"""The part of the store that a class leaves to those above it."""


class WorkMeter:
    """Grants computing time. Not safe from several threads.

    `floor_share`: what control may use, whatever the law says, as a part of `capacity`. Capacity is how many seconds
    of computing the box does in a second at most: 1 for one instance that uses all of it.
    """

    def __init__(self, floor_share: float = 0.2) -> None:
        self._floor_share = floor_share
        self._rate = 1.0
        self._capacity = 1.0
        self._level_s = self.burst_s
        self._floor_level_s = self._floor_burst_s
        self._then_s: float | None = None
        self._sheds_bulk = False

    @property
    def burst_s(self) -> float:
        return max(_LEAST_BURST_S, _BURST_S * self._rate)

    @property
    def _floor_burst_s(self) -> float:
        return max(_LEAST_BURST_S, _BURST_S * self._floor_share * self._capacity)

    def grant(self, share: float, capacity: float, now_s: float, *, sheds_bulk: bool = False) -> None:
        """Set what the law allows from now on."""
        self._fill(now_s)
        self._capacity = capacity
        self._rate = share * capacity
        self._sheds_bulk = sheds_bulk
        self._level_s = min(self._level_s, self.burst_s)

    def admit(self, priority: PriorityClass, cost_s: float, now_s: float) -> float | None:
        """Charge `cost_s` and return None, or return after how many seconds it is worth asking again.

        The cost may be more than the store holds: it is then paid back before anything else runs.
        """
        wait_s = self.wait_s(priority, now_s)
        if wait_s is not None:
            return wait_s
        if self._level_s > _RESERVE[priority] * self.burst_s:
            self._level_s -= cost_s
        else:
            self._floor_level_s -= cost_s
            # The debt that the floor makes is bounded: it must not shut the others out for minutes.
            self._level_s = min(self._level_s, max(self._level_s - cost_s, -4 * self.burst_s))
        return None

    def wait_s(self, priority: PriorityClass, now_s: float) -> float | None:
        """Return as `admit` does, but charge nothing."""
        self._fill(now_s)
        needed_s = _RESERVE[priority] * self.burst_s
        if priority is PriorityClass.BULK and self._sheds_bulk:
            return MAX_WAIT_S
        if self._level_s > needed_s or (priority is PriorityClass.CONTROL and self._floor_level_s > 0):
            return None
        return min(MAX_WAIT_S, (needed_s - self._level_s) / self._rate) if self._rate > 0 else MAX_WAIT_S

    def settle(self, charged_s: float, took_s: float) -> None:
        """Put right what `admit` charged, once it is known how long the work took; 0 when it never ran."""
        self._level_s = min(self._level_s + charged_s - took_s, self.burst_s)

    def _fill(self, now_s: float) -> None:
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        self._level_s = min(self._level_s + self._rate * dt_s, self.burst_s)
        floor_rate = self._floor_share * self._capacity
        self._floor_level_s = min(self._floor_level_s + floor_rate * dt_s, self._floor_burst_s)
