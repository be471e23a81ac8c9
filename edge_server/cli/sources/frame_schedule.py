"""Frame schedule: when the next picture is due, without drift and without bursts."""

from __future__ import annotations


class FrameSchedule:
    """Picture n is due n periods after the first. Who is later than a whole period starts a new schedule from there.

    Pure: the clock is passed in, in seconds. `slips` counts the new schedules, which say that the source is slower
    than the rate asked for.
    """

    def __init__(self, fps: float) -> None:
        """Take pictures a second; 0 means that every picture is due at once."""
        self._period_s = 1 / fps if fps > 0 else 0.0
        self._start: float | None = None
        self._number = 0
        self.slips = 0

    def wait_s(self, now: float) -> float:
        """Return how long to wait from `now` until the next picture is due, and count it as given."""
        if self._start is None or not self._period_s:
            self._start = now if self._start is None else self._start
            self._number = 1
            return 0.0
        due = self._start + self._number * self._period_s
        if now > due + self._period_s:
            self._start, self._number, due = now, 0, now
            self.slips += 1
        self._number += 1
        return max(due - now, 0.0)
