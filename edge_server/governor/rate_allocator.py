"""Who may start work while less than everything is allowed: one store of computing time, three classes of priority.

The store is filled by the share that the law grants and emptied by the time that work takes. The fuller it has to be
for a class to draw from it, the earlier the class goes without: bulk first, then normal, control last. Control has a
small store of its own besides, which nothing takes from it. Pure: the caller holds its lock and brings the time.
"""

from __future__ import annotations

from edge_server.core.priority import PriorityClass

MAX_WAIT_S = 30.0
"""The longest time that a refusal names: what lies further ahead is not known."""

_BURST_S = 0.5
"""What the store holds at most, in seconds at the granted rate."""

_LEAST_BURST_S = 0.1
"""... and at least, in seconds of computing."""

_ROUNDING_S = 1e-6
"""Who comes back after exactly the time that it was told is let in, whatever the clock's last digits."""


_RESERVE = (0.0, 0.0, 0.25, 0.5)
"""The part of the store that a class, by its value, leaves to those above it."""


class TimeCharge(float):
    """Seconds that were charged for work, to be settled once it is known how long it took."""

    __slots__ = ("is_of_floor", "of_store_s")

    is_of_floor: bool
    """Drawn from the store that is control's own."""

    of_store_s: float
    """What the store of all three lost; of control's own draw, no more than its debt allowed."""

    def __new__(cls, cost_s: float, of_store_s: float, *, is_of_floor: bool) -> TimeCharge:
        charge = super().__new__(cls, cost_s)
        charge.of_store_s = of_store_s
        charge.is_of_floor = is_of_floor
        return charge


class RateAllocator:
    """Grants computing time. Not safe from several threads.

    `floor_share`: what control may use, whatever the law says, as a part of `capacity`. Capacity is how many seconds
    of computing the box does in a second at most: 1 for one instance that uses all of it. What control draws from its
    floor counts as used up in the store of all, so that in the long run no more than the granted share is worked; only
    where the share is less than the floor, and control uses all of it, is more done.
    """

    def __init__(self, floor_share: float = 0.2) -> None:
        self._floor_share = floor_share
        self._set_rates(1.0, 1.0)
        self._level_s = self.burst_s
        self._floor_level_s = self._floor_burst_s
        self._then_s: float | None = None
        self._lowest = PriorityClass.BULK

    def _set_rates(self, share: float, capacity: float) -> None:
        """Work out once what every request asks for."""
        self._rate = share * capacity
        self._floor_rate = self._floor_share * capacity
        self.burst_s = max(_LEAST_BURST_S, _BURST_S * self._rate)
        """What the store of all holds at most; its debt by control's floor is at most four times as much."""
        self._least_level_s = -4 * self.burst_s
        has_floor = self._floor_rate > 0
        self._floor_burst_s = max(_LEAST_BURST_S, _BURST_S * self._floor_rate) if has_floor else 0.0

    def grant(self, share: float, capacity: float, now_s: float, *, lowest: PriorityClass = PriorityClass.BULK) -> None:
        """Set what the law allows from now on. Classes below `lowest` get nothing."""
        self._fill(now_s)
        self._set_rates(share, capacity)
        self._lowest = lowest
        self._level_s = min(self._level_s, self.burst_s)
        self._floor_level_s = min(self._floor_level_s, self._floor_burst_s)

    def admit(self, priority: PriorityClass, cost_s: float, now_s: float) -> TimeCharge | None:
        """Charge `cost_s`; None: not now, `wait_s` tells when.

        The cost may be more than the store holds: it is then paid back before anything else runs.
        """
        self._fill(now_s)
        if self._store_serves(priority):
            self._level_s -= cost_s
            return TimeCharge(cost_s, cost_s, is_of_floor=False)
        if not self._floor_serves(priority):
            return None
        # The debt that the floor makes is bounded: it must not shut the others out for minutes.
        of_store_s = min(cost_s, max(0.0, self._level_s - self._least_level_s))
        self._level_s -= of_store_s
        self._floor_level_s -= cost_s
        return TimeCharge(cost_s, of_store_s, is_of_floor=True)

    def wait_s(self, priority: PriorityClass, now_s: float, caution: float = 0.0) -> float:
        """Return in how many seconds, MAX_WAIT_S at most, work of that class is let in if nobody else comes; 0: now.

        `caution` is a part of the store that has to be there besides what the class always leaves to others.
        """
        self._fill(now_s)
        if priority > self._lowest:
            return MAX_WAIT_S
        if self._store_serves(priority, caution) or self._floor_serves(priority):
            return 0.0
        missing_s = (_RESERVE[priority] + caution) * self.burst_s - self._level_s
        waits = [missing_s / self._rate] if self._rate > 0 else []
        if priority is PriorityClass.CONTROL and self._floor_rate > 0:
            waits.append(-self._floor_level_s / self._floor_rate)
        return min(MAX_WAIT_S, *waits, MAX_WAIT_S)

    def settle(self, charge: TimeCharge, took_s: float) -> None:
        """Put right what `admit` charged; `took_s` 0 when the work never ran."""
        level_s = self._level_s + charge.of_store_s - took_s
        if charge.is_of_floor:
            self._floor_level_s = min(self._floor_level_s + charge - took_s, self._floor_burst_s)
            level_s = max(level_s, min(self._level_s, self._least_level_s))
        self._level_s = min(level_s, self.burst_s)

    def _store_serves(self, priority: PriorityClass, caution: float = 0.0) -> bool:
        needed_s = (_RESERVE[priority] + caution) * self.burst_s
        return priority <= self._lowest and self._level_s >= needed_s - _ROUNDING_S

    def _floor_serves(self, priority: PriorityClass) -> bool:
        return priority is PriorityClass.CONTROL and self._floor_rate > 0 and self._floor_level_s >= -_ROUNDING_S

    def _fill(self, now_s: float) -> None:
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        self._level_s = min(self._level_s + self._rate * dt_s, self.burst_s)
        self._floor_level_s = min(self._floor_level_s + self._floor_rate * dt_s, self._floor_burst_s)
