"""The controllers of the law: one that steers by heat, one that keeps a budget of joules. Pure.

Both turn an error into a share of full work, between the least share and 1. What they are told has been checked: every
number is finite, every time not negative.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MIN_SHARE = 0.1
"""Never less: what is left belongs to control, and a box that computes nothing cannot be asked whether it cooled."""

_STALE_S = 10.0
"""Readings further apart than this say nothing about which of them is an outlier."""


@dataclass(slots=True)
class PiController:
    """Proportional and integral parts, whose sum is the share.

    The integral rests while the share is at a bound and the error pushes it further out: it would have to be undone
    before the share moves at all once the error turns. It falls `haste` times as fast as it rises: where less is asked
    for than is allowed, the share has to come down to what is asked for before it has any effect.
    """

    gain: float
    integral_gain: float
    haste: float = 1.0
    integral: float = 1.0

    def share(self, error: float, dt_s: float) -> float:
        wanted = self.integral + self.gain * error
        pushes_out = (wanted >= 1.0 and error > 0) or (wanted <= MIN_SHARE and error < 0)
        if not pushes_out:
            gain = self.integral_gain * (self.haste if error < 0 else 1.0)
            self.integral = clip(self.integral + gain * error * dt_s, MIN_SHARE, 1.0)
        return clip(self.integral + self.gain * error, MIN_SHARE, 1.0)


@dataclass(slots=True)
class HeatModel:
    """What the readings say of the temperature now and some seconds ahead.

    The middle one of the last three readings counts, so that a single wrong one counts for nothing; then come
    exponential averages of the temperature and of its slope, over the time since the last reading, however long ago.
    """

    smoothing_s: float
    slope_smoothing_s: float
    horizon_s: float
    smooth_c: float | None = None
    _slope_c_per_s: float = 0.0
    _then_s: float = 0.0
    _recent_c: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def feel(self, temperature_c: float, now_s: float) -> None:
        dt_s = max(0.0, now_s - self._then_s)
        self._then_s = now_s
        if dt_s > _STALE_S:
            self._recent_c.clear()
        self._recent_c.append(temperature_c)
        if len(self._recent_c) == 3:
            temperature_c = sorted(self._recent_c)[1]
        if self.smooth_c is None:
            self.smooth_c = temperature_c
        elif dt_s > 0:
            before_c = self.smooth_c
            self.smooth_c += part(dt_s, self.smoothing_s) * (temperature_c - before_c)
            slope = (self.smooth_c - before_c) / max(dt_s, 0.05)
            self._slope_c_per_s += part(dt_s, self.slope_smoothing_s) * (slope - self._slope_c_per_s)

    @property
    def predicted_c(self) -> float | None:
        """The temperature ahead if it goes on rising as it does; one that falls is not counted on to go on falling."""
        return None if self.smooth_c is None else self.smooth_c + self.horizon_s * max(0.0, self._slope_c_per_s)


@dataclass(slots=True)
class PowerBudget:
    """A store of joules, filled by the budget's watts and emptied by what is drawn.

    It runs from a debt to a plenty of one burst, which is `burst_s` seconds of the budget. A plenty may be spent, a
    debt has to be paid back, over the time of one burst.
    """

    pi: PiController
    burst_s: float
    smoothing_s: float
    level_j: float | None = None
    _smooth_w: float = 0.0

    def share(self, power_w: float, limit_w: float, dt_s: float) -> float:
        most_j = limit_w * self.burst_s
        if self.level_j is None:
            self.level_j, self._smooth_w = most_j, power_w
        self.level_j = clip(self.level_j + (limit_w - power_w) * dt_s, -most_j, most_j)
        self._smooth_w += part(dt_s, self.smoothing_s) * (power_w - self._smooth_w)
        allowed_w = limit_w + self.level_j / self.burst_s
        return self.pi.share((allowed_w - self._smooth_w) / limit_w, dt_s)


def part(dt_s: float, over_s: float) -> float:
    """Return how much of a new value an exponential average of that time constant takes in."""
    return 1.0 - math.exp(-dt_s / over_s)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
