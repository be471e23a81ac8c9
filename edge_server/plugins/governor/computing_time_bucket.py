"""Token bucket of computing time: divides the time that the policy grants between the three priority classes.

The bucket is filled at the rate that the policy grants, and emptied by the time
that work takes. Lower classes need a fuller bucket, so that bulk is rejected first, then normal, then control. Control
also has a small bucket of its own (the floor). No clock: the caller passes the time and holds a lock.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_server.core.priority_class import PriorityClass

MAX_WAIT_S = 30.0
"""Longest wait that a rejection names. Waits beyond this cannot be predicted."""

_BURST_S = 0.5
"""Size of the bucket, in seconds at the granted rate."""

_MIN_BURST_S = 0.1
"""Smallest size of the bucket, in seconds of computing."""

_ROUNDING_S = 1e-6
"""Tolerance, so that a client that returns after exactly the named wait is admitted."""


_NEED_MARGIN = 1.25
"""What control keeps in relation to what it needs: its work comes in bursts."""

_MAX_NEED_SHARE = 0.8
"""The part of the capacity that control keeps at most because it needs it. The rest cools the machine."""

_RESERVE = (0.0, 0.0, 0.25, 0.5)
"""The part of the bucket that a class, by its value, leaves to the higher classes."""


class TimeCharge(float):
    """Seconds charged for work. `settle` corrects the charge when the real time is known."""

    __slots__ = ("common_bucket_s", "is_of_floor")

    is_of_floor: bool
    """Whether it was charged to control's own bucket."""

    common_bucket_s: float
    """The part charged to the common bucket. For a charge to the floor it is limited by the largest debt."""

    def __new__(cls, cost_s: float, common_bucket_s: float, *, is_of_floor: bool) -> TimeCharge:
        charge = super().__new__(cls, cost_s)
        charge.common_bucket_s = common_bucket_s
        charge.is_of_floor = is_of_floor
        return charge


class RateAllocator:
    """Grants computing time. Not thread-safe.

    `min_floor_share`: the part of `capacity` that control may always use, and more if it needs more; 0: none. Capacity
    is the machine's highest number of computing seconds per second: 1 for one instance that uses the whole machine.
    Work of control's own bucket also empties the common bucket, so that the long-term work does not exceed the granted
    share. It can exceed it only if the share is below the floor and control uses the whole floor.
    """

    def __init__(self, min_floor_share: float = 0.2, control_need: Callable[[], float] = float) -> None:
        """`control_need` returns the seconds of computing per second that control work needs now; infinite: not known
        yet. Called at each grant, and for control work that finds the common bucket empty."""
        self._min_floor_share = self.floor_share = min_floor_share
        self._control_need = control_need
        self._share = self._capacity = 1.0
        self._lowest = PriorityClass.BULK
        self._floor_burst_s = self._floor_level_s = 0.0
        self._set_rates()
        self._level_s = self.burst_s
        self._then_s: float | None = None

    def _set_rates(self) -> None:
        """Compute the rates and sizes of the buckets.

        What is missing in control's bucket stays missing, so that a need that comes and goes grants nothing.
        """
        capacity = self._capacity
        self._rate = self._share * capacity
        needed_share = 0.0
        if self._min_floor_share:
            needed_share = min(_NEED_MARGIN * self._control_need() / capacity, _MAX_NEED_SHARE)
        missing_s = self._floor_burst_s - self._floor_level_s
        self.floor_share = max(self._min_floor_share, needed_share)
        self._floor_rate = self.floor_share * capacity
        self.burst_s = max(_MIN_BURST_S, _BURST_S * self._rate)
        """Size of the common bucket. Its debt from control's floor is at most four times this size."""
        self._least_level_s = -4 * self.burst_s
        has_floor = self._floor_rate > 0
        self._floor_burst_s = max(_MIN_BURST_S, _BURST_S * self._floor_rate) if has_floor else 0.0
        self._floor_level_s = self._floor_burst_s - missing_s

    def grant(self, share: float, capacity: float, now_s: float, *, lowest: PriorityClass = PriorityClass.BULK) -> None:
        """Set the allowed share from now on. Classes lower than `lowest` are rejected."""
        self._fill(now_s)
        self._share, self._capacity, self._lowest = share, capacity, lowest
        self._set_rates()
        self._level_s = min(self._level_s, self.burst_s)

    def admit(self, priority: PriorityClass, cost_s: float, now_s: float) -> TimeCharge | None:
        """Charge `cost_s` and return the charge. None: not now; `wait_s` returns the wait.

        The cost may exceed the bucket's content. The debt is then paid back before other work starts.
        """
        self._fill(now_s)
        if self._bucket_admits(priority):
            self._level_s -= cost_s
            return TimeCharge(cost_s, cost_s, is_of_floor=False)
        if priority is PriorityClass.CONTROL:
            self._set_rates()  # a robot may have begun since the last grant
        if not self._floor_admits(priority):
            return None
        # The debt from the floor is limited, so that it does not block the other classes for minutes.
        common_bucket_s = min(cost_s, max(0.0, self._level_s - self._least_level_s))
        self._level_s -= common_bucket_s
        self._floor_level_s -= cost_s
        return TimeCharge(cost_s, common_bucket_s, is_of_floor=True)

    def wait_s(self, priority: PriorityClass, now_s: float, margin: float = 0.0) -> float:
        """Return the seconds until work of that class is admitted without other work, at most MAX_WAIT_S; 0: now.

        `margin` is a part of the bucket that must be filled in addition to the reserve of the class.
        """
        self._fill(now_s)
        if priority > self._lowest:
            return MAX_WAIT_S
        if self._bucket_admits(priority, margin) or self._floor_admits(priority):
            return 0.0
        missing_s = (_RESERVE[priority] + margin) * self.burst_s - self._level_s
        waits = [missing_s / self._rate] if self._rate > 0 else []
        if priority is PriorityClass.CONTROL and self._floor_rate > 0:
            waits.append(-self._floor_level_s / self._floor_rate)
        return min(MAX_WAIT_S, *waits, MAX_WAIT_S)

    def settle(self, charge: TimeCharge, took_s: float) -> None:
        """Correct a charge of `admit`. `took_s` is 0 if the work never ran."""
        level_s = self._level_s + charge.common_bucket_s - took_s
        if charge.is_of_floor:
            self._floor_level_s = min(self._floor_level_s + charge - took_s, self._floor_burst_s)
            level_s = max(level_s, min(self._level_s, self._least_level_s))
        self._level_s = min(level_s, self.burst_s)

    def _bucket_admits(self, priority: PriorityClass, margin: float = 0.0) -> bool:
        needed_s = (_RESERVE[priority] + margin) * self.burst_s
        return priority <= self._lowest and self._level_s >= needed_s - _ROUNDING_S

    def _floor_admits(self, priority: PriorityClass) -> bool:
        return priority is PriorityClass.CONTROL and self._floor_rate > 0 and self._floor_level_s >= -_ROUNDING_S

    def _fill(self, now_s: float) -> None:
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        self._level_s = min(self._level_s + self._rate * dt_s, self.burst_s)
        self._floor_level_s = min(self._floor_level_s + self._floor_rate * dt_s, self._floor_burst_s)
