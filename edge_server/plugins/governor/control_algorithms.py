"""Control algorithms of the policy: a PI controller, a temperature predictor, a power budget, and the detection of lost
sensors. No clock, no I/O.

Controllers turn an error into a share of full work, between MIN_SHARE and 1. Inputs are validated before: all numbers
are finite, and no time is negative.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import field

from edge_server.record import record

MIN_SHARE = 0.1
"""Smallest share. The class control still needs some work, and without any work the effect of cooling is unknown."""

_STALE_S = 10.0
"""Readings with a longer gap between them are not used to find outliers."""


@record(slots=True)
class PiController:
    """PI controller. The share is the sum of the proportional and the integral part.

    Anti-windup: the integral does not change while the share is at a bound and the error pushes it further out. The
    integral falls `fall_factor` times as fast as it rises: if less work is requested than allowed, the share has no
    effect before it has fallen to the requested work.
    """

    gain: float
    integral_gain: float
    fall_factor: float = 1.0
    integral: float = 1.0

    def share(self, error: float, dt_s: float) -> float:
        """Return the share after `dt_s` seconds with this error. A positive error allows more work."""
        proposed = self.integral + self.gain * error
        pushes_out = (proposed >= 1.0 and error > 0) or (proposed <= MIN_SHARE and error < 0)
        if not pushes_out:
            gain = self.integral_gain * (self.fall_factor if error < 0 else 1.0)
            self.integral = clip(self.integral + gain * error * dt_s, MIN_SHARE, 1.0)
        return clip(self.integral + self.gain * error, MIN_SHARE, 1.0)


@record(slots=True)
class TemperaturePredictor:
    """Smoothed temperature, and its prediction some seconds ahead.

    The median of the last three readings removes single outliers. Then the temperature and its slope are smoothed
    exponentially over the time since the last reading.
    """

    smoothing_s: float
    slope_smoothing_s: float
    horizon_s: float
    smooth_c: float | None = None
    _slope_c_per_s: float = 0.0
    _then_s: float = 0.0
    _recent_c: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def update(self, temperature_c: float, now_s: float) -> None:
        """Add a reading."""
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
            self.smooth_c += smoothing_weight(dt_s, self.smoothing_s) * (temperature_c - before_c)
            slope = (self.smooth_c - before_c) / max(dt_s, 0.05)
            self._slope_c_per_s += smoothing_weight(dt_s, self.slope_smoothing_s) * (slope - self._slope_c_per_s)

    @property
    def predicted_c(self) -> float | None:
        """The temperature in `horizon_s` seconds if it continues to rise. A falling temperature is not extrapolated."""
        return None if self.smooth_c is None else self.smooth_c + self.horizon_s * max(0.0, self._slope_c_per_s)


@record(slots=True)
class PowerBudget:
    """Energy budget in joules: filled by the power limit, emptied by the measured power.

    The level is between minus and plus one burst (`burst_s` seconds of the power limit). A surplus may be spent, and a
    debt must be paid back, within the time of one burst.
    """

    pi: PiController
    burst_s: float
    smoothing_s: float
    level_j: float | None = None
    _smooth_w: float = 0.0

    def share(self, power_w: float, limit_w: float, dt_s: float) -> float:
        """Return the share after `dt_s` seconds with this measured power and this limit."""
        most_j = limit_w * self.burst_s
        if self.level_j is None:
            self.level_j, self._smooth_w = most_j, power_w
        self.level_j = clip(self.level_j + (limit_w - power_w) * dt_s, -most_j, most_j)
        self._smooth_w += smoothing_weight(dt_s, self.smoothing_s) * (power_w - self._smooth_w)
        allowed_w = limit_w + self.level_j / self.burst_s
        return self.pi.share((allowed_w - self._smooth_w) / limit_w, dt_s)


@record(slots=True)
class SensorHealth:
    """Detects lost sensors: those that had readings before and have had none for a while.

    One missing sample is never a loss, even after a long pause: after a suspend, a sensor may not answer at once.
    """

    lost_after_s: float
    _silent_since_s: dict[str, float] = field(default_factory=dict)
    _kinds: set[str] = field(default_factory=set)

    def step(self, present: frozenset[str], expected: frozenset[str], silent: frozenset[str], now_s: float) -> set[str]:
        """Return the lost sensors.

        `present` are the kinds of reading in this sample. A kind that was ever present or `expected` must be present
        from then on. `silent` are single sensors that are missing in this sample.
        """
        self._kinds |= present | expected
        before = self._silent_since_s
        # At the first missing sample the silence begins now: the sensor may have worked until just before.
        self._silent_since_s = {name: before.get(name, now_s) for name in (self._kinds - present) | silent}
        return {
            name
            for name, since_s in self._silent_since_s.items()
            if name in before and now_s - since_s > self.lost_after_s
        }


def smoothing_weight(dt_s: float, over_s: float) -> float:
    """Return the weight of a new value in an exponential average with the time constant `over_s`."""
    return 1.0 - math.exp(-dt_s / over_s)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
