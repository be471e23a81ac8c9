"""Control policy of the governor: computes from temperature, power and their limits which share of the time the machine
may compute.

No clock, no I/O, one small state. Temperatures are in degrees Celsius, power in watts, times in seconds. The result is
a *share*, 0 to 1: the part of its time that the machine may spend computing. A heat controller and a power controller
each propose a share. The lower one applies, after limits on how fast it may fall and rise.

Heat: a PI controller on the temperature predicted some seconds ahead. Its set-point is a few degrees below the trip
point at which the machine throttles itself. Power: an energy budget, filled by the power limit and emptied by the
measured power; a debt is paid back. Switching work on and off at two thresholds was rejected: the machine would
oscillate, and all classes of work would stop at the same time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from typing import NamedTuple

from edge_server.plugins.governor.control_algorithms import (
    MIN_SHARE,
    PiController,
    PowerBudget,
    SensorHealth,
    TemperaturePredictor,
    clip,
)
from edge_server.record import record

_LONGEST_STEP_S = 5.0
"""Longest time that a step counts. After a suspend or a stall the controllers would else make one huge step."""

_MEMORY_RECOVERED = 0.75
"""Memory pressure is over when it is below this part of its limit."""


class ThermalLevel(enum.IntEnum):
    """State of the machine. A higher value is worse."""

    NORMAL = 0
    WARM = 1
    HOT = 2
    THROTTLED = 3
    CRITICAL = 4


class Cause(enum.Enum):
    """Cause of throttling or of a limited share. The value is the name in metrics and events."""

    THERMAL = "thermal"
    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    UNDER_VOLTAGE = "under_voltage"
    OVER_CURRENT = "over_current"
    POWER_MODE = "power_mode"
    SENSOR_LOST = "sensor_lost"
    MEMORY = "memory"


_SLOWING = frozenset({Cause.THERMAL, Cause.POWER_CAP, Cause.POWER_BRAKE, Cause.UNDER_VOLTAGE})
"""Causes that less work would remove. The other causes are only reported."""

_CAUSE_TEXTS = {
    "thermal": "the box slows itself down because it is too hot",
    "power_cap": "the box slows itself down at its power limit",
    "power_brake": "the power supply asked the GPU to brake",
    "under_voltage": "the supply voltage drops under load: check the power supply and its cable",
    "over_current": "short over-current events slow the clocks for about a millisecond each; the board does this by "
    "design in its fastest power modes",
    "power_mode": "the power mode or a clock cap of this box limits the clocks: this is a setting, not heat",
    "memory": "tasks wait for memory: no bulk work and no loads until memory is free",
}
"""Text of each cause, by its value, in order of importance. "sensor_lost" has its own text, which names the sensor."""

_HARMLESS = frozenset({"over_current", "power_mode"})
"""Causes that explain slow clocks but do not limit the work. They are named last."""

RECOVERING_TEXT = "the cause is over, and the allowed work rises step by step"


class PolicyInput(NamedTuple):
    """One sample of the machine for the policy. None, or an implausible number, means: not known now.

    The machine throttles itself at `trip_c` and switches itself off at `critical_c`. Newer NVIDIA drivers report
    `margin_c` instead of both: degrees until throttling. These values and `power_limit_w` stay valid until a new value
    is reported. `slowed_by` are the causes for which the machine throttles itself now. `expects` are the kinds of
    reading that the machine ever had ("temperature", "power"). A kind that is expected but missing is lost; a kind that
    never existed is not. `silent` are single sensors ("zone tj", "rail VDD_IN") that had a reading before and have none
    now, even if another sensor replaces them.
    """

    temperature_c: float | None = None
    trip_c: float | None = None
    critical_c: float | None = None
    margin_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    slowed_by: frozenset[Cause] = frozenset()
    expects: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    memory_pressure_percent: float = 0.0


class PolicyConstants(NamedTuple):
    """Constants of the policy. The defaults fit machines whose heat sink warms up in minutes and whose chip in seconds.

    The set-point is `below_trip_c` below the trip point, or `temperature_limit_c` if that is lower (0: no limit).
    Without a reported trip point it is assumed `trip_below_critical_c` below the critical temperature, or at
    `default_trip_c`. `power_limit_w` 0: the limit is `power_fraction` of the limit that the machine enforces, if any.
    `horizon_s`: prediction time of the temperature. `heat_gain` is a share per degree, `power_gain` a share per whole
    budget. For `heat_fall_factor` see PiController. While the machine throttles itself, the share falls to
    `slowed_factor` of itself each second, and does not rise for `slowed_hold_s` after that. If the temperature is below
    the trip point at that time, the set-point is lowered by `ease_c_per_s`, at most by `most_eased_c`, and returns by
    `unease_c_per_s`. A sensor is lost after `lost_after_s` without a reading; the share is then at most `lost_share`.
    `hot_below_c` and `warm_below_c` are degrees below the set-point. A state changes to a better one after
    `level_rest_s` at a temperature that is `hysteresis_c` lower.
    """

    below_trip_c: float = 4.0
    temperature_limit_c: float = 0.0
    default_trip_c: float = 95.0
    trip_below_critical_c: float = 6.0
    below_critical_c: float = 3.0
    power_limit_w: float = 0.0
    power_fraction: float = 0.95
    horizon_s: float = 6.0
    smoothing_s: float = 1.0
    slope_smoothing_s: float = 3.0
    heat_gain: float = 0.05
    heat_integral_gain: float = 0.004
    heat_fall_factor: float = 2.0
    power_gain: float = 0.4
    power_integral_gain: float = 0.15
    power_burst_s: float = 5.0
    fall_per_s: float = 0.20
    rise_per_s: float = 0.03
    slowed_factor: float = 0.85
    slowed_hold_s: float = 10.0
    ease_c_per_s: float = 0.2
    unease_c_per_s: float = 0.003
    most_eased_c: float = 10.0
    lost_after_s: float = 3.0
    lost_share: float = 0.5
    warm_below_c: float = 4.0
    hot_below_c: float = 0.5
    hysteresis_c: float = 1.5
    level_rest_s: float = 10.0
    memory_pressure_limit_percent: float = 40.0


class PolicyDecision(NamedTuple):
    """Decision of the policy. With `share` 1.0 nothing is limited.

    `limited_by` names the cause of a lower share: "heat", "power_budget", or the value of a Cause; "" for none.
    `temperature_c` (smoothed), `predicted_c` and `set_point_c` are None without a temperature, or after it is lost.
    `detail` describes the state; "" if all is well. `may_load` is False while the machine is too hot, or has too little
    memory, for loads and engine builds. `sheds_bulk`: no bulk work is admitted. `only_control`: only control work is
    admitted, because the machine is about to switch itself off.
    """

    level: ThermalLevel = ThermalLevel.NORMAL
    share: float = 1.0
    heat_share: float = 1.0
    power_share: float = 1.0
    limited_by: str = ""
    temperature_c: float | None = None
    predicted_c: float | None = None
    set_point_c: float | None = None
    power_set_point_w: float | None = None
    causes: frozenset[Cause] = frozenset()
    lost: frozenset[str] = frozenset()
    detail: str = ""
    may_load: bool = True
    sheds_bulk: bool = False
    only_control: bool = False


@record(slots=True)
class _Limits:
    """The limits that the machine last reported. They stay valid if a later reading does not contain them."""

    trip_c: float | None = None
    critical_c: float | None = None
    power_w: float | None = None

    def update(self, seen: PolicyInput) -> None:
        self.critical_c = _degrees(seen.critical_c, above=30.0) or self.critical_c
        self.trip_c = _degrees(seen.trip_c, above=30.0) or self.trip_c
        self.power_w = _watts(seen.power_limit_w, above=0.1) or self.power_w

    def trip(self, constants: PolicyConstants) -> float:
        if self.trip_c is not None:
            return self.trip_c
        if self.critical_c is None:
            return constants.default_trip_c
        return self.critical_c - constants.trip_below_critical_c

    def temperature_c(self, seen: PolicyInput, constants: PolicyConstants) -> float | None:
        """Return the reported temperature. With only a margin, return the trip point minus the margin."""
        temperature_c = _degrees(seen.temperature_c)
        margin_c = _within(seen.margin_c, -100.0, 250.0)
        if margin_c is not None and temperature_c is not None:
            self.trip_c = temperature_c + margin_c
        elif margin_c is not None:
            return self.trip(constants) - margin_c
        return temperature_c


class ControlPolicy:
    """The policy with its state. One thread calls `step` once or a few times a second."""

    def __init__(self, constants: PolicyConstants = PolicyConstants()) -> None:
        self.constants = constants
        self._limits = _Limits()
        self._heat = TemperaturePredictor(constants.smoothing_s, constants.slope_smoothing_s, constants.horizon_s)
        self._heat_pi = PiController(constants.heat_gain, constants.heat_integral_gain, constants.heat_fall_factor)
        self._power = PowerBudget(
            PiController(constants.power_gain, constants.power_integral_gain),
            constants.power_burst_s,
            constants.smoothing_s,
        )
        self._heat_share = 1.0
        self._power_share = 1.0
        self._share = 1.0
        self._limited_by = ""
        self._level = ThermalLevel.NORMAL
        self._lower_since_s: float | None = None
        self._eased_c = 0.0
        self._hold_until_s = -math.inf
        self._sensor_health = SensorHealth(constants.lost_after_s)
        self._is_short_of_memory = False
        self._then_s: float | None = None

    def step(self, seen: PolicyInput, now_s: float) -> PolicyDecision:
        """Return the decision from now on. Without progress of time, or back in time, only the state may change."""
        dt_s = 0.0 if self._then_s is None else clip(now_s - self._then_s, 0.0, _LONGEST_STEP_S)
        self._then_s = now_s
        self._limits.update(seen)
        temperature_c = self._limits.temperature_c(seen, self.constants)
        power_w = _watts(seen.power_w)
        known = {"temperature": temperature_c is not None, "power": power_w is not None}
        present = frozenset(filter(known.get, known))
        lost = frozenset(self._sensor_health.step(present, seen.expects, seen.silent, now_s))
        set_point_c = self._control_heat(temperature_c, seen, dt_s, now_s)
        limit_w = self._control_power(power_w, dt_s)
        needs_power = limit_w is not None
        lacks_sensor = _is_lost(lost, "temperature", "zone") or (needs_power and _is_lost(lost, "power", "rail"))
        slowing = seen.slowed_by & _SLOWING
        if limit_w is not None and power_w is not None:
            # The power controller already keeps the limit. A reaction to the flag too would make the share oscillate.
            slowing -= {Cause.POWER_CAP}
        self._update_share(slowing, lacks_sensor, dt_s, now_s)
        memory_limit = self.constants.memory_pressure_limit_percent
        if seen.memory_pressure_percent > memory_limit:
            self._is_short_of_memory = True
        elif seen.memory_pressure_percent <= memory_limit * _MEMORY_RECOVERED:
            self._is_short_of_memory = False
        smooth_c, predicted_c = self._heat.smooth_c, self._heat.predicted_c
        if "temperature" in lost or smooth_c is None:
            set_point_c = smooth_c = predicted_c = None
        heat_level = self._level_of_heat(smooth_c, predicted_c, set_point_c)
        level = self._next_level(heat_level, seen, lost, now_s)
        causes = set(seen.slowed_by)
        if lost:
            causes.add(Cause.SENSOR_LOST)
        if self._is_short_of_memory:
            causes.add(Cause.MEMORY)
        # A GPU at its power cap is only busy, so loads stay allowed. THROTTLED alone does not mean hot.
        is_in_trouble = bool(seen.slowed_by & (_SLOWING - {Cause.POWER_CAP}))
        is_hot = (
            max(heat_level, level if level is not ThermalLevel.THROTTLED else ThermalLevel.NORMAL) >= ThermalLevel.HOT
        )
        decision = PolicyDecision(
            level=level,
            share=self._share,
            heat_share=self._heat_share,
            power_share=self._power_share,
            limited_by=self._limited_by,
            temperature_c=smooth_c,
            predicted_c=predicted_c,
            set_point_c=set_point_c,
            power_set_point_w=limit_w,
            causes=frozenset(causes),
            lost=lost,
            may_load=not (is_in_trouble or is_hot or self._is_short_of_memory),
            sheds_bulk=self._is_short_of_memory or level is ThermalLevel.CRITICAL,
            only_control=level is ThermalLevel.CRITICAL,
        )
        return decision._replace(detail=_describe(decision, self.constants.lost_share if lacks_sensor else None))

    def _control_heat(self, temperature_c: float | None, seen: PolicyInput, dt_s: float, now_s: float) -> float | None:
        """Update the heat controller's share. Return the set-point, or None before the first temperature."""
        constants = self.constants
        if temperature_c is not None:
            self._heat.update(temperature_c, now_s)
        predicted_c = self._heat.predicted_c
        if predicted_c is None:
            return None
        trip_c = self._limits.trip(constants)
        if Cause.THERMAL not in seen.slowed_by:
            self._eased_c = max(0.0, self._eased_c - constants.unease_c_per_s * dt_s)
        elif predicted_c < trip_c:
            # The machine throttles below the trip point: the sensor reads too low, or another part is hotter.
            self._eased_c = min(constants.most_eased_c, self._eased_c + constants.ease_c_per_s * dt_s)
        set_point_c = trip_c - constants.below_trip_c - self._eased_c
        if constants.temperature_limit_c > 0:
            set_point_c = min(set_point_c, constants.temperature_limit_c)
        if temperature_c is not None:
            self._heat_share = self._heat_pi.share(set_point_c - predicted_c, dt_s)
        return set_point_c

    def _control_power(self, power_w: float | None, dt_s: float) -> float | None:
        """Update the power controller's share. Return the power limit in watts, or None without a limit."""
        enforced_w = self._limits.power_w
        limits = [] if enforced_w is None else [enforced_w * self.constants.power_fraction]
        if self.constants.power_limit_w > 0:
            limits.append(self.constants.power_limit_w)
        if not limits:
            return None
        if power_w is not None:
            self._power_share = self._power.share(power_w, min(limits), dt_s)
        return min(limits)

    def _update_share(self, slowing: frozenset[Cause], lacks_sensor: bool, dt_s: float, now_s: float) -> None:
        """Move the share toward the lowest proposed share, within the limits of its rate of change."""
        constants = self.constants
        proposals = [(self._heat_share, "heat"), (self._power_share, "power_budget")]
        if lacks_sensor:
            proposals.append((constants.lost_share, Cause.SENSOR_LOST.value))
        if slowing:
            cause = min(slowing, key=list(Cause).index)
            proposals.append((self._share * constants.slowed_factor**dt_s, cause.value))
            self._hold_until_s = now_s + constants.slowed_hold_s
        elif now_s < self._hold_until_s:
            proposals.append((self._share, self._limited_by))
        target, by = min(proposals)
        lowest = max(MIN_SHARE, self._share - constants.fall_per_s * dt_s)
        self._share = clip(target, lowest, self._share + constants.rise_per_s * dt_s)
        if self._share >= 1.0:
            self._limited_by = ""
        elif target < 1.0 or not self._limited_by:
            # While the share rises again, the cause stays the one that lowered it.
            self._limited_by = by

    def _next_level(
        self, heat_level: ThermalLevel, seen: PolicyInput, lost: frozenset[str], now_s: float
    ) -> ThermalLevel:
        """Return the state. It becomes worse at once, and better after the better state was due for a while."""
        level = heat_level
        if lost or self._share < 1.0 or self._is_short_of_memory:
            level = max(level, ThermalLevel.WARM)
        if seen.slowed_by & _SLOWING:
            level = max(level, ThermalLevel.THROTTLED)
        if level >= self._level:
            self._lower_since_s = None
            self._level = level
        elif self._lower_since_s is None:
            self._lower_since_s = now_s
        elif now_s - self._lower_since_s >= self.constants.level_rest_s:
            self._lower_since_s = None
            self._level = level
        return self._level

    def _level_of_heat(
        self, smooth_c: float | None, predicted_c: float | None, set_point_c: float | None
    ) -> ThermalLevel:
        """Return the state by temperature. With hysteresis: a state ends at a lower temperature than it begins."""
        if smooth_c is None or predicted_c is None or set_point_c is None:
            return ThermalLevel.NORMAL
        constants = self.constants

        def hysteresis(level: ThermalLevel) -> float:
            return constants.hysteresis_c if self._level >= level else 0.0

        critical_c = self._limits.critical_c
        if critical_c is not None:
            critical_from_c = critical_c - constants.below_critical_c - hysteresis(ThermalLevel.CRITICAL)
            if smooth_c > critical_from_c:
                return ThermalLevel.CRITICAL
        if predicted_c > set_point_c - constants.hot_below_c - hysteresis(ThermalLevel.HOT):
            return ThermalLevel.HOT
        if predicted_c > set_point_c - constants.warm_below_c - hysteresis(ThermalLevel.WARM):
            return ThermalLevel.WARM
        return ThermalLevel.NORMAL


def _describe(decision: PolicyDecision, share_without_sensor: float | None) -> str:
    """Return the state as text for people on site, with advice.

    `share_without_sensor` is the limit while a needed sensor is lost, else None.
    """
    causes = {cause.value for cause in decision.causes}
    parts = []
    if decision.lost:
        limit = share_without_sensor
        consequence = "" if limit is None else f": at most {limit:.0%} of full work until it is back"
        parts.append(f"no reading of {' and '.join(sorted(decision.lost))} any more{consequence}")
    parts += cause_texts(causes - _HARMLESS)
    temperature_c, set_point_c = decision.temperature_c, decision.set_point_c
    is_warm = decision.level is ThermalLevel.WARM and decision.limited_by in ("", "heat")
    is_about_heat = decision.level >= ThermalLevel.HOT or is_warm
    if temperature_c is not None and set_point_c is not None and is_about_heat:
        parts.append(f"{temperature_c:.0f} °C, to be kept at {set_point_c:.0f} °C")
    if decision.limited_by == "power_budget" and decision.power_set_point_w is not None:
        parts.append(f"the power budget of {decision.power_set_point_w:.1f} W is used up")
    if decision.share < 1.0 and decision.limited_by not in {"heat", "power_budget", *causes}:
        parts.append(RECOVERING_TEXT)
    return "; ".join([*parts, *cause_texts(causes & _HARMLESS)])


def cause_texts(values: Collection[str]) -> list[str]:
    """Return the texts of causes, by their values, the most important first. Values without a text are left out."""
    return [text for value, text in _CAUSE_TEXTS.items() if value in values]


def _is_lost(lost: frozenset[str], kind: str, sensor: str) -> bool:
    """Return whether a kind of reading, or one of its sensors, is lost."""
    return any(name == kind or name.startswith(f"{sensor} ") for name in lost)


def _within(value: float | None, low: float, high: float) -> float | None:
    return value if value is not None and low <= value <= high else None


def _degrees(value: float | None, above: float = -60.0) -> float | None:
    """Return a plausible temperature, else None. Sensors that are switched off report -256; broken ones any number."""
    return _within(value, above, 200.0)


def _watts(value: float | None, above: float = 0.0) -> float | None:
    return _within(value, above, 1e5)
