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
from dataclasses import dataclass, replace

from edge_server.governor import messages
from edge_server.governor.controllers import MIN_SHARE, HeatModel, PiController, PowerBudget, clip
from edge_server.governor.sensor_health import SensorHealth

_LONGEST_STRIDE_S = 5.0
"""A step after a longer time (a suspend, a stall) counts as one of this: the controllers would take a giant stride."""

_REST_AFTER_S = 0.75
"""Pressure on memory is over when it has fallen to this part of its limit."""


class ThermalLevel(enum.IntEnum):
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


_SLOWING = frozenset({Cause.THERMAL, Cause.POWER_CAP, Cause.POWER_BRAKE, Cause.UNDER_VOLTAGE})
"""Causes that doing less would mend. The others are told, no more."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """One look at the box, reduced to what the law needs. None, and any number that cannot be true: not known now.

    `trip_c` is where the box begins to slow itself down, `critical_c` where it switches itself off. `margin_c` is what
    NVIDIA's newer drivers tell instead of both: degrees left before the slow-down. These and `power_limit_w` hold on
    until another value is told. `slowed_by` are the causes for which the box, by its own word, slows itself down at
    this moment. `expects` are the kinds of reading that were ever had of this box ("temperature", "power"): one that is
    expected and silent is lost, one never had is not there. `silent` are single sensors, "zone tj" or "rail VDD_IN",
    that told something before and do not now, even if another one stands in for them.
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


@dataclass(frozen=True, slots=True)
class PolicyConstants:
    """Constants of the law. The defaults hold for boxes whose heat sink takes minutes to warm and a chip seconds.

    `below_trip_c`: the set-point lies this far below the trip, or at `temperature_limit_c` if that is lower; 0: no
    limit given. Where the box tells no trip, it is taken to lie `trip_below_critical_c` below the critical temperature,
    or at `default_trip_c`. `power_limit_w` 0: `power_fraction` of the limit that the box enforces, if it tells one.
    `horizon_s`: how far ahead the temperature is predicted. `heat_gain` is a share per degree, `power_gain` one per
    whole budget; for `heat_haste` see PiController. While the box slows itself down, the share falls to `slowed_factor`
    of itself each second, and for `slowed_hold_s` after that it does not rise; if the temperature gives no reason, the
    set-point is lowered by `ease_c_per_s`, to `most_eased_c` at most, and comes back by `unease_c_per_s`.
    `lost_after_s`: silence that makes a sensor lost; then `lost_share` holds. `hot_below_c` and `warm_below_c` are
    degrees below the set-point; a state is left for a lower one after `level_rest_s` in which that was due, at a
    temperature `hysteresis_c` lower.
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
    heat_haste: float = 2.0
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


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What the law says now. `share` 1.0 means that nothing is held back.

    `limited_by` is the one word for what holds the share down, "" when nothing does: "heat", "power_budget", or the
    value of a Cause. `temperature_c` (smoothed), `predicted_c` and `set_point_c` are None without a temperature, and
    once it is lost. `detail` is the state in plain words, "" when all is well. `may_load` is false while the box is too
    hot, or too short of memory, for loads and engine builds. `sheds_bulk`: no bulk work at all; `only_control`: nothing
    but control, the box is about to switch itself off.
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


@dataclass(slots=True)
class _Limits:
    """What the box said last of what it bears: that it fails to say so once does not make it bear something else."""

    trip_c: float | None = None
    critical_c: float | None = None
    power_w: float | None = None

    def learn(self, seen: PolicyInput) -> None:
        self.critical_c = _degrees(seen.critical_c, above=30.0) or self.critical_c
        self.trip_c = _degrees(seen.trip_c, above=30.0) or self.trip_c
        self.power_w = _watts(seen.power_limit_w, above=0.1) or self.power_w

    def trip(self, tuning: PolicyConstants) -> float:
        if self.trip_c is not None:
            return self.trip_c
        return tuning.default_trip_c if self.critical_c is None else self.critical_c - tuning.trip_below_critical_c

    def temperature_c(self, seen: PolicyInput, tuning: PolicyConstants) -> float | None:
        """Return the temperature that was told; where only its distance to the trip was, one that lies that far off."""
        temperature_c = _degrees(seen.temperature_c)
        margin_c = _within(seen.margin_c, -100.0, 250.0)
        if margin_c is not None and temperature_c is not None:
            self.trip_c = temperature_c + margin_c
        elif margin_c is not None:
            return self.trip(tuning) - margin_c
        return temperature_c


class ControlPolicy:
    """The law with its memory. `step` is called once or a few times a second, from one thread."""

    def __init__(self, tuning: PolicyConstants = PolicyConstants()) -> None:
        self.tuning = tuning
        self._limits = _Limits()
        self._heat = HeatModel(tuning.smoothing_s, tuning.slope_smoothing_s, tuning.horizon_s)
        self._heat_pi = PiController(tuning.heat_gain, tuning.heat_integral_gain, tuning.heat_haste)
        self._power = PowerBudget(
            PiController(tuning.power_gain, tuning.power_integral_gain), tuning.power_burst_s, tuning.smoothing_s
        )
        self._heat_share = 1.0
        self._power_share = 1.0
        self._share = 1.0
        self._limited_by = ""
        self._level = ThermalLevel.NORMAL
        self._lower_since_s: float | None = None
        self._eased_c = 0.0
        self._hold_until_s = -math.inf
        self._presence = SensorHealth(tuning.lost_after_s)
        self._is_short_of_memory = False
        self._then_s: float | None = None

    def step(self, seen: PolicyInput, now_s: float) -> PolicyDecision:
        """Return what may run from now on. A step of no time, or back in time, changes nothing but the state."""
        dt_s = 0.0 if self._then_s is None else clip(now_s - self._then_s, 0.0, _LONGEST_STRIDE_S)
        self._then_s = now_s
        self._limits.learn(seen)
        temperature_c = self._limits.temperature_c(seen, self.tuning)
        power_w = _watts(seen.power_w)
        told = {"temperature": temperature_c is not None, "power": power_w is not None}
        lost = frozenset(self._presence.step(frozenset(filter(told.get, told)), seen.expects, seen.silent, now_s))
        set_point_c = self._steer_by_heat(temperature_c, seen, dt_s, now_s)
        limit_w = self._steer_by_power(power_w, dt_s)
        is_blind = _has(lost, "temperature", "zone") or (_has(lost, "power", "rail") and limit_w is not None)
        is_steered_by_power = limit_w is not None and power_w is not None
        self._limit(_to_fall_for(seen, is_steered_by_power), is_blind, dt_s, now_s)
        self._feel_memory(seen.memory_pressure_percent)
        felt_c, ahead_c = self._heat.smooth_c, self._heat.predicted_c
        if "temperature" in lost or felt_c is None:
            set_point_c = felt_c = ahead_c = None
        heat_level = self._level_of_heat(felt_c, ahead_c, set_point_c)
        level = self._next_level(heat_level, seen, lost, now_s)
        decision = PolicyDecision(
            level=level,
            share=self._share,
            heat_share=self._heat_share,
            power_share=self._power_share,
            limited_by=self._limited_by,
            temperature_c=felt_c,
            predicted_c=ahead_c,
            set_point_c=set_point_c,
            power_set_point_w=limit_w,
            causes=self._causes(seen, lost),
            lost=lost,
            may_load=self._may_load(level, heat_level, seen),
            sheds_bulk=self._is_short_of_memory or level is ThermalLevel.CRITICAL,
            only_control=level is ThermalLevel.CRITICAL,
        )
        return replace(decision, detail=_detail(decision, self.tuning.lost_share if is_blind else None))

    def _steer_by_heat(self, temperature_c: float | None, seen: PolicyInput, dt_s: float, now_s: float) -> float | None:
        """Update the heat's share and return the set-point; None as long as no temperature was ever told."""
        tuning = self.tuning
        if temperature_c is not None:
            self._heat.feel(temperature_c, now_s)
        ahead_c = self._heat.predicted_c
        if ahead_c is None:
            return None
        trip_c = self._limits.trip(tuning)
        if Cause.THERMAL not in seen.slowed_by:
            self._eased_c = max(0.0, self._eased_c - tuning.unease_c_per_s * dt_s)
        elif ahead_c < trip_c:
            # The box throttles, but not by this temperature: the sensor tells too little, or another part is hotter.
            self._eased_c = min(tuning.most_eased_c, self._eased_c + tuning.ease_c_per_s * dt_s)
        set_point_c = trip_c - tuning.below_trip_c - self._eased_c
        if tuning.temperature_limit_c > 0:
            set_point_c = min(set_point_c, tuning.temperature_limit_c)
        if temperature_c is not None:
            self._heat_share = self._heat_pi.share(set_point_c - ahead_c, dt_s)
        return set_point_c

    def _steer_by_power(self, power_w: float | None, dt_s: float) -> float | None:
        """Update the power's share and return the budget in watts, None where there is none."""
        enforced_w = self._limits.power_w
        limits = [] if enforced_w is None else [enforced_w * self.tuning.power_fraction]
        if self.tuning.power_limit_w > 0:
            limits.append(self.tuning.power_limit_w)
        if not limits:
            return None
        if power_w is not None:
            self._power_share = self._power.share(power_w, min(limits), dt_s)
        return min(limits)

    def _limit(self, slowing: frozenset[Cause], is_blind: bool, dt_s: float, now_s: float) -> None:
        """Move the share towards the lowest that anything asks for, no faster than it may move."""
        tuning = self.tuning
        wishes = [(self._heat_share, "heat"), (self._power_share, "power_budget")]
        if is_blind:
            wishes.append((tuning.lost_share, Cause.SENSOR_LOST.value))
        if slowing:
            cause = min(slowing, key=list(Cause).index)
            wishes.append((self._share * tuning.slowed_factor**dt_s, cause.value))
            self._hold_until_s = now_s + tuning.slowed_hold_s
        elif now_s < self._hold_until_s:
            wishes.append((self._share, self._limited_by))
        wanted, by = min(wishes)
        lowest = max(MIN_SHARE, self._share - tuning.fall_per_s * dt_s)
        self._share = clip(wanted, lowest, self._share + tuning.rise_per_s * dt_s)
        if self._share >= 1.0:
            self._limited_by = ""
        elif wanted < 1.0 or not self._limited_by:
            # On its way up the share is still held down by what pressed it.
            self._limited_by = by

    def _feel_memory(self, pressure_percent: float) -> None:
        limit_percent = self.tuning.memory_pressure_limit_percent
        if pressure_percent > limit_percent:
            self._is_short_of_memory = True
        elif pressure_percent <= limit_percent * _REST_AFTER_S:
            self._is_short_of_memory = False

    def _causes(self, seen: PolicyInput, lost: frozenset[str]) -> frozenset[Cause]:
        causes = set(seen.slowed_by)
        if lost:
            causes.add(Cause.SENSOR_LOST)
        if self._is_short_of_memory:
            causes.add(Cause.MEMORY)
        return frozenset(causes)

    def _may_load(self, level: ThermalLevel, heat_level: ThermalLevel, seen: PolicyInput) -> bool:
        """A GPU at its power cap is at work, not in trouble: it may load."""
        is_in_trouble = bool(seen.slowed_by & (_SLOWING - {Cause.POWER_CAP}))
        is_hot = (
            max(heat_level, level if level is not ThermalLevel.THROTTLED else ThermalLevel.NORMAL) >= ThermalLevel.HOT
        )
        return not (is_in_trouble or is_hot or self._is_short_of_memory)

    def _next_level(
        self, heat_level: ThermalLevel, seen: PolicyInput, lost: frozenset[str], now_s: float
    ) -> ThermalLevel:
        """A worse state holds at once, a better one after it has been due for a while."""
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
        elif now_s - self._lower_since_s >= self.tuning.level_rest_s:
            self._lower_since_s = None
            self._level = level
        return self._level

    def _level_of_heat(self, felt_c: float | None, ahead_c: float | None, set_point_c: float | None) -> ThermalLevel:
        """A state is left at a temperature a little lower than the one at which it is entered."""
        if felt_c is None or ahead_c is None or set_point_c is None:
            return ThermalLevel.NORMAL
        tuning = self.tuning

        def eased(level: ThermalLevel) -> float:
            return tuning.hysteresis_c if self._level >= level else 0.0

        critical_c = self._limits.critical_c
        if critical_c is not None and felt_c > critical_c - tuning.below_critical_c - eased(ThermalLevel.CRITICAL):
            return ThermalLevel.CRITICAL
        if ahead_c > set_point_c - tuning.hot_below_c - eased(ThermalLevel.HOT):
            return ThermalLevel.HOT
        return (
            ThermalLevel.WARM
            if ahead_c > set_point_c - tuning.warm_below_c - eased(ThermalLevel.WARM)
            else ThermalLevel.NORMAL
        )


def _to_fall_for(seen: PolicyInput, is_steered_by_power: bool) -> frozenset[Cause]:
    """Return the causes that the share has to fall for. A box at its power cap is steered by its watts, if those are
    known: falling for the flag as well would make it swing."""
    slowing = seen.slowed_by & _SLOWING
    return slowing - {Cause.POWER_CAP} if is_steered_by_power else slowing


def _detail(decision: PolicyDecision, blind_share: float | None) -> str:
    causes = {cause.value for cause in decision.causes}
    parts = messages.causes(causes - messages.HARMLESS)
    if decision.lost:
        parts.insert(0, messages.lost(decision.lost, blind_share))
    temperature_c, set_point_c = decision.temperature_c, decision.set_point_c
    is_warm = decision.level is ThermalLevel.WARM and decision.limited_by in ("", "heat")
    is_about_heat = decision.level >= ThermalLevel.HOT or is_warm
    if temperature_c is not None and set_point_c is not None and is_about_heat:
        parts.append(messages.temperature(temperature_c, set_point_c))
    if decision.limited_by == "power_budget" and decision.power_set_point_w is not None:
        parts.append(messages.power(decision.power_set_point_w))
    if decision.share < 1.0 and decision.limited_by not in {"heat", "power_budget", *causes}:
        parts.append(messages.easing())
    return "; ".join([*parts, *messages.causes(causes & messages.HARMLESS)])


def _has(lost: frozenset[str], kind: str, sensor: str) -> bool:
    """Return whether a kind of reading as a whole, or one sensor of it, is lost."""
    return any(name == kind or name.startswith(f"{sensor} ") for name in lost)


def _within(value: float | None, low: float, high: float) -> float | None:
    return value if value is not None and low <= value <= high else None


def _degrees(value: float | None, above: float = -60.0) -> float | None:
    """Return a temperature that a working box may have, else None: gated sensors tell -256, broken ones anything."""
    return _within(value, above, 200.0)


def _watts(value: float | None, above: float = 0.0) -> float | None:
    return _within(value, above, 1e5)
