"""Schedule of frames: computes when the next picture is due, without drift and without bursts."""

from __future__ import annotations


class FrameSchedule:
    """Picture n is due n periods after the first. After a delay of more than one period, the schedule restarts.

    Pure: the time is an argument, in seconds. `slips` counts the restarts; many mean that the source is too slow.
    """

    def __init__(self, fps: float) -> None:
        """`fps` is the number of pictures per second; 0 means that every picture is due at once."""
        self._period_s = 1 / fps if fps > 0 else 0.0
        self._start: float | None = None
        self._number = 0
        self.slips = 0

    def wait_s(self, now: float) -> float:
        """Return the time from `now` until the next picture is due, and advance to the one after it."""
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
