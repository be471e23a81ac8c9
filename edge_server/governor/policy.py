"""The law: what the box feels and what it may bear, in; how much may run, out.

Pure: the clock and the readings are handed in, the state is one small object. Temperatures are degrees Celsius, power
is in watts, times are seconds. The result is a *share*, 0 to 1: the part of its full working time that the box may
spend computing. Two controllers, one of heat and one of power, each propose a share; the lower one holds, after
limits on how fast it may fall and rise.

Heat: a proportional-integral controller on the temperature predicted some seconds ahead, which aims a few degrees below
the point at which the box would slow itself down. Power: a budget in joules, filled by the budget's watts and emptied
by what is measured; a debt is paid back. Why not on and off at two thresholds: the box would swing between both, with
every class of work cut at once.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from edge_server.governor import words

MIN_SHARE = 0.1
"""Never less: what is left belongs to control, and a box that computes nothing cannot be asked whether it cooled."""


class Level(enum.IntEnum):
    """State of the box in one word. Higher is worse."""

    NORMAL = 0
    WARM = 1
    HOT = 2
    THROTTLED = 3
    CRITICAL = 4


class Cause(enum.Enum):
    """What slows the box down by itself, or makes the law cautious. The value is the word on metrics and events."""

    THERMAL = "thermal"
    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    UNDER_VOLTAGE = "under_voltage"
    OVER_CURRENT = "over_current"
    POWER_MODE = "power_mode"
    SENSOR_LOST = "sensor_lost"
    MEMORY = "memory"


_HARMLESS = frozenset({Cause.OVER_CURRENT, Cause.POWER_MODE})
"""Causes that are told, but that doing less would not mend."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the box, reduced to what the law needs. None: not known now.

    `trip_c` is where the box begins to slow itself down, `critical_c` where it switches itself off. `margin_c` is what
    NVIDIA's newer drivers tell instead of both: degrees left before the slow-down. `slowed_by` are the causes for which
    the box, by its own word, slows itself down at this moment. `expects` are the sensors that have been seen on this
    box ("temperature", "power"): one that is expected and silent is lost, one never seen is not there.
    """

    temperature_c: float | None = None
    trip_c: float | None = None
    critical_c: float | None = None
    margin_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    slowed_by: frozenset[Cause] = frozenset()
    expects: frozenset[str] = frozenset()
    memory_pressure_percent: float = 0.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the law. The defaults hold for boxes whose heat sink takes minutes to warm and a chip seconds.

    `below_trip_c`: the set-point lies this far below the trip. `default_trip_c` stands in where the box tells none.
    `power_limit_w` 0: the limit that the box enforces, if it tells one. `horizon_s`: how far ahead the temperature is
    predicted. `lost_after_s`: silence that makes a sensor lost; then `lost_share` holds.
    """

    below_trip_c: float = 4.0
    default_trip_c: float = 95.0
    below_critical_c: float = 3.0
    power_limit_w: float = 0.0
    power_fraction: float = 0.95
    horizon_s: float = 6.0
    smoothing_s: float = 1.0
    slope_smoothing_s: float = 3.0
    heat_gain: float = 0.05
    heat_integral_gain: float = 0.004
    power_gain: float = 0.4
    power_integral_gain: float = 0.15
    power_burst_s: float = 5.0
    fall_per_s: float = 0.20
    rise_per_s: float = 0.03
    slowed_factor: float = 0.85
    slowed_hold_s: float = 10.0
    lost_after_s: float = 3.0
    lost_share: float = 0.5
    warm_below_c: float = 4.0
    hot_below_c: float = 0.5
    hysteresis_c: float = 1.5
    memory_pressure_limit_percent: float = 40.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What the law says now. `share` 1.0 means that nothing is held back.

    `predicted_c` and `set_point_c` are None without a temperature. `detail` is the state in plain words, "" when all is
    well. `may_load` is false while the box is too hot, or too short of memory, for loads and engine builds.
    """

    level: Level = Level.NORMAL
    share: float = 1.0
    heat_share: float = 1.0
    power_share: float = 1.0
    predicted_c: float | None = None
    set_point_c: float | None = None
    power_set_point_w: float | None = None
    causes: frozenset[Cause] = frozenset()
    lost: frozenset[str] = frozenset()
    detail: str = ""
    may_load: bool = True
    sheds_bulk: bool = False


@dataclass(slots=True)
class _Heat:
    """Smoothed temperature, its slope, and the controller's integral."""

    smooth_c: float | None = None
    slope_c_per_s: float = 0.0
    integral: float = 1.0

    def feel(self, temperature_c: float, dt_s: float, tuning: Tuning) -> None:
        if self.smooth_c is None:
            self.smooth_c = temperature_c
            return
        before = self.smooth_c
        self.smooth_c += _part(dt_s, tuning.smoothing_s) * (temperature_c - before)
        slope = (self.smooth_c - before) / dt_s
        self.slope_c_per_s += _part(dt_s, tuning.slope_smoothing_s) * (slope - self.slope_c_per_s)

    def predicted_c(self, tuning: Tuning) -> float:
        assert self.smooth_c is not None
        return self.smooth_c + tuning.horizon_s * max(0.0, self.slope_c_per_s)

    def share(self, error_c: float, dt_s: float, tuning: Tuning) -> float:
        """Return the share for an error of set-point less prediction, and go on integrating unless that is no use."""
        wanted = self.integral + tuning.heat_gain * error_c
        pushes_out = (wanted >= 1.0 and error_c > 0) or (wanted <= MIN_SHARE and error_c < 0)
        if not pushes_out:
            self.integral = _clip(self.integral + tuning.heat_integral_gain * error_c * dt_s, MIN_SHARE, 1.0)
        return _clip(self.integral + tuning.heat_gain * error_c, MIN_SHARE, 1.0)


@dataclass(slots=True)
class _Power:
    """The budget in joules: `level_j` runs from a debt of one burst to a store of one burst."""

    level_j: float | None = None
    integral: float = 1.0
    smooth_w: float | None = None

    def share(self, power_w: float, limit_w: float, dt_s: float, tuning: Tuning) -> float:
        store_j = limit_w * tuning.power_burst_s
        level_j = store_j if self.level_j is None else self.level_j
        self.level_j = _clip(level_j + (limit_w - power_w) * dt_s, -store_j, store_j)
        smooth_w = power_w if self.smooth_w is None else self.smooth_w
        self.smooth_w = smooth_w + _part(dt_s, tuning.smoothing_s) * (power_w - smooth_w)
        # A store may be spent, a debt has to be paid back, over the time of one burst.
        allowed_w = limit_w + self.level_j / tuning.power_burst_s
        error = (allowed_w - self.smooth_w) / limit_w
        wanted = self.integral + tuning.power_gain * error
        pushes_out = (wanted >= 1.0 and error > 0) or (wanted <= MIN_SHARE and error < 0)
        if not pushes_out:
            self.integral = _clip(self.integral + tuning.power_integral_gain * error * dt_s, MIN_SHARE, 1.0)
        return _clip(self.integral + tuning.power_gain * error, MIN_SHARE, 1.0)


@dataclass(slots=True)
class Law:
    """The law with its memory. `step` is called once or a few times a second, from one thread."""

    tuning: Tuning = Tuning()
    _heat: _Heat = field(default_factory=_Heat)
    _power: _Power = field(default_factory=_Power)
    _then_s: float | None = None
    _share: float = 1.0
    _heat_share: float = 1.0
    _power_share: float = 1.0
    _level: Level = Level.NORMAL
    _hold_until_s: float = 0.0
    _seen_s: dict[str, float] = field(default_factory=dict)

    def step(self, seen: Observation, now_s: float) -> Decision:
        """Return what may run from now on. `now_s` never goes back; a step of no time changes nothing but the state."""
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        # After a suspend or a stall the controllers would take one giant stride.
        dt_s = min(dt_s, 5.0)
        lost = self._lost(seen, now_s)
        set_point_c, predicted_c = self._feel_heat(seen, dt_s)
        limit_w = self._feel_power(seen, dt_s)
        self._share = self._next_share(seen, lost, dt_s, now_s)
        level = self._next_level(seen, predicted_c, set_point_c, bool(lost))
        causes = set(seen.slowed_by)
        if lost:
            causes.add(Cause.SENSOR_LOST)
        is_short_of_memory = seen.memory_pressure_percent > self.tuning.memory_pressure_limit_percent
        if is_short_of_memory:
            causes.add(Cause.MEMORY)
        decision = Decision(
            level=level,
            share=self._share,
            heat_share=self._heat_share,
            power_share=self._power_share,
            predicted_c=predicted_c,
            set_point_c=set_point_c,
            power_set_point_w=limit_w,
            causes=frozenset(causes),
            lost=lost,
            may_load=level < Level.HOT and not is_short_of_memory,
            sheds_bulk=is_short_of_memory,
        )
        return replace(decision, detail=self._detail(decision))

    def _detail(self, decision: Decision) -> str:
        parts = words.causes({cause.value for cause in decision.causes})
        if decision.lost:
            parts.insert(0, words.lost(decision.lost, self.tuning.lost_share))
        predicted_c, set_point_c = decision.predicted_c, decision.set_point_c
        if predicted_c is not None and set_point_c is not None and decision.level > Level.NORMAL:
            parts.append(words.temperature(predicted_c, set_point_c))
        if decision.power_share < 1.0 and decision.power_set_point_w is not None:
            parts.append(words.power(decision.power_set_point_w))
        return "; ".join(parts)

    def _lost(self, seen: Observation, now_s: float) -> frozenset[str]:
        given = {"temperature": _is_number(seen.temperature_c) or _is_number(seen.margin_c),
                 "power": _is_number(seen.power_w)}  # fmt: skip
        for name, is_given in given.items():
            if is_given or (name in seen.expects and name not in self._seen_s):
                self._seen_s[name] = now_s
        return frozenset(name for name, at_s in self._seen_s.items() if now_s - at_s > self.tuning.lost_after_s)

    def _feel_heat(self, seen: Observation, dt_s: float) -> tuple[float | None, float | None]:
        """Update the heat's share; return set-point and prediction in degrees, None without a temperature."""
        tuning = self.tuning
        temperature_c, trip_c = seen.temperature_c, seen.trip_c
        if _is_number(seen.margin_c):
            # Only the distance matters: the trip is put where the margin says, the temperature being what it is.
            if not _is_number(temperature_c):
                temperature_c = (trip_c or tuning.default_trip_c) - _is(seen.margin_c)
            trip_c = _is(temperature_c) + _is(seen.margin_c)
        if not _is_number(temperature_c):
            return None, None
        set_point_c = (trip_c if _is_number(trip_c) and trip_c else tuning.default_trip_c) - tuning.below_trip_c
        if dt_s > 0 or self._heat.smooth_c is None:
            self._heat.feel(_is(temperature_c), dt_s, tuning)
            self._heat_share = self._heat.share(set_point_c - self._heat.predicted_c(tuning), dt_s, tuning)
        return set_point_c, self._heat.predicted_c(tuning)

    def _feel_power(self, seen: Observation, dt_s: float) -> float | None:
        """Update the power's share; return the limit in watts, None where there is none or power is not known."""
        limits = [seen.power_limit_w * self.tuning.power_fraction] if seen.power_limit_w else []
        if self.tuning.power_limit_w:
            limits.append(self.tuning.power_limit_w)
        if not limits:
            self._power_share = 1.0
            return None
        if _is_number(seen.power_w) and dt_s > 0:
            self._power_share = self._power.share(_is(seen.power_w), min(limits), dt_s, self.tuning)
        return min(limits)

    def _next_share(self, seen: Observation, lost: frozenset[str], dt_s: float, now_s: float) -> float:
        tuning = self.tuning
        wanted = min(self._heat_share, self._power_share)
        if lost:
            wanted = min(wanted, tuning.lost_share)
        if seen.slowed_by - _HARMLESS:
            wanted = min(wanted, self._share * tuning.slowed_factor**dt_s)
            self._hold_until_s = now_s + tuning.slowed_hold_s
        elif now_s < self._hold_until_s:
            wanted = min(wanted, self._share)
        lowest = max(MIN_SHARE, self._share - tuning.fall_per_s * dt_s)
        return _clip(wanted, lowest, self._share + tuning.rise_per_s * dt_s)

    def _next_level(
        self, seen: Observation, predicted_c: float | None, set_point_c: float | None, is_lost: bool
    ) -> Level:
        level = Level.WARM if is_lost or self._share < 1.0 else Level.NORMAL
        if predicted_c is not None and set_point_c is not None:
            level = max(level, self._level_of_heat(predicted_c, set_point_c))
        if seen.slowed_by - _HARMLESS:
            level = Level.THROTTLED
        smooth_c = self._heat.smooth_c
        if seen.critical_c is not None and smooth_c is not None and predicted_c is not None:
            eased_c = self.tuning.hysteresis_c if self._level is Level.CRITICAL else 0.0
            if smooth_c > seen.critical_c - self.tuning.below_critical_c - eased_c:
                level = Level.CRITICAL
        self._level = level
        return level

    def _level_of_heat(self, predicted_c: float, set_point_c: float) -> Level:
        """A state is left a little lower than it is entered, so that noise does not make it flicker."""
        tuning = self.tuning
        hot_c = set_point_c - (tuning.hot_below_c + tuning.hysteresis_c * (self._level >= Level.HOT))
        warm_c = set_point_c - (tuning.warm_below_c + tuning.hysteresis_c * (self._level >= Level.WARM))
        if predicted_c > hot_c:
            return Level.HOT
        return Level.WARM if predicted_c > warm_c else Level.NORMAL


def _part(dt_s: float, over_s: float) -> float:
    """Return how much of a new value an exponential average of that time constant takes in."""
    return 1.0 - math.exp(-dt_s / over_s)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _is(value: float | None) -> float:
    assert value is not None
    return value
