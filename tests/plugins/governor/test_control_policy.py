"""Control policy in closed loop with a thermal model, and alone with invalid readings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.governor.control_algorithms import MIN_SHARE
from edge_server.plugins.governor.control_policy import (
    Cause,
    ControlPolicy,
    PolicyConstants,
    PolicyDecision,
    PolicyInput,
    ThermalLevel,
)
from tests.plugins.governor.thermal_model import ThermalModel, ThermalModelConstants

PERIOD_S = 0.5
TRIP_C, CRITICAL_C = 99.0, 104.5
SET_POINT_C = TRIP_C - PolicyConstants().below_trip_c

When = Callable[[float], float]


def always(value: float) -> When:
    return lambda now_s: value


@dataclass
class Conditions:
    """Ambient temperature, requested work, and behaviour of the sensor."""

    ambient_c: When = field(default_factory=lambda: always(25.0))
    fan_factor: When = field(default_factory=lambda: always(1.0))
    load: When = field(default_factory=lambda: always(1.0))
    noise_c: float = 0.3
    offset_c: float = 0.0
    missing: float = 0.02
    is_gone: Callable[[float], bool] = lambda now_s: False
    duration_s: float = 1800.0
    seed: int = 1


@dataclass
class Curves:
    """Curves of a run, one point every half second."""

    decisions: list[PolicyDecision] = field(default_factory=list)
    chip_c: list[float] = field(default_factory=list)
    is_throttled: list[bool] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    def after(self, start_s: float, end_s: float = math.inf) -> Curves:
        span = slice(round(start_s / PERIOD_S), None if end_s == math.inf else round(end_s / PERIOD_S))
        return Curves(self.decisions[span], self.chip_c[span], self.is_throttled[span], self.power_w[span])

    def level_changes_in_a_minute(self) -> int:
        changes = [now.level is not then.level for then, now in zip(self.decisions, self.decisions[1:], strict=False)]
        size = round(60 / PERIOD_S)
        return max(sum(changes[at : at + size]) for at in range(len(changes)))


def live(world: Conditions, policy: ControlPolicy, *, knows_power: bool = False) -> Curves:
    """Run the policy on the thermal model."""
    rnd = random.Random(world.seed)
    plant = ThermalModel(ambient_c=world.ambient_c(0.0))
    course = Curves()
    for index in range(round(world.duration_s / PERIOD_S)):
        now_s = index * PERIOD_S
        plant.ambient_c, plant.fan_factor = world.ambient_c(now_s), world.fan_factor(now_s)
        is_silent = rnd.random() < world.missing or world.is_gone(now_s)
        sensed_c = None if is_silent else plant.chip_c + world.offset_c + rnd.gauss(0, world.noise_c)
        power_w = plant.power_w * (1 + rnd.gauss(0, 0.03)) if knows_power else None
        slowed_by = frozenset({Cause.THERMAL}) if plant.is_throttled else frozenset[Cause]()
        seen = PolicyInput(sensed_c, TRIP_C, CRITICAL_C, power_w=power_w, slowed_by=slowed_by)
        decision = policy.step(seen, now_s)
        course.decisions.append(decision)
        course.chip_c.append(plant.chip_c)
        course.is_throttled.append(plant.is_throttled)
        for _ in range(5):
            plant.step(min(decision.share, world.load(now_s)), PERIOD_S / 5)
        course.power_w.append(plant.power_w)
    return course


def _step(now_s: float) -> float:
    return 55.0 if 1200.0 <= now_s < 2400.0 else 30.0


def _heat_wave(now_s: float) -> float:
    return 55.0 if 1200.0 <= now_s < 2400.0 else 5.0


def _hold(decision: PolicyDecision) -> None:
    """Check the invariants of a decision."""
    numbers = (decision.share, decision.heat_share, decision.power_share)
    assert all(math.isfinite(number) and MIN_SHARE <= number <= 1.0 for number in numbers)
    for value in (decision.temperature_c, decision.predicted_c, decision.set_point_c, decision.power_set_point_w):
        assert value is None or math.isfinite(value)
    assert (decision.limited_by == "") == (decision.share >= 1.0)
    assert decision.level > ThermalLevel.NORMAL or decision.share >= 1.0
    assert decision.detail or decision.share >= 1.0


WORLDS = {
    **{f"ambient {ambient}": Conditions(always(ambient)) for ambient in (25, 30, 35, 40, 45, 50, 55)},
    "step": Conditions(_step),
    "dead fan": Conditions(always(30.0), lambda now_s: 1.8 if now_s >= 1200 else 1.0),
    "dead fan on a hot day": Conditions(always(45.0), lambda now_s: 1.8 if now_s >= 1200 else 1.0),
    "half load, dead fan": Conditions(always(45.0), lambda now_s: 1.8 if now_s >= 1200 else 1.0, always(0.5)),
    "low load, dead fan": Conditions(always(55.0), lambda now_s: 1.8 if now_s >= 1200 else 1.0, always(0.3)),
    "load in bursts": Conditions(always(50.0), load=lambda now_s: 1.0 if now_s % 100 < 50 else 0.1),
    "sensor reads 2 more": Conditions(always(50.0), offset_c=2.0),
    "sensor gone for a minute": Conditions(always(50.0), is_gone=lambda now_s: now_s % 600 >= 540),
    "sensor fails often": Conditions(always(50.0), missing=0.3),
}


# An hour of each is `full`: half an hour of six shows the same. In it the fan dies, and the sensor is gone three times.
@pytest.mark.parametrize(
    ("name", "duration_s"),
    [
        ("ambient 40", 1800.0),
        ("dead fan on a hot day", 1800.0),
        ("load in bursts", 1800.0),
        ("sensor reads 2 more", 1800.0),
        ("sensor gone for a minute", 1800.0),
        ("sensor fails often", 1800.0),
        *(pytest.param(name, 3600.0, marks=pytest.mark.full) for name in WORLDS),
    ],
)
def test_the_temperature_stays_near_the_set_point_and_the_machine_never_throttles(name: str, duration_s: float) -> None:
    course = live(replace(WORLDS[name], duration_s=duration_s), ControlPolicy())
    settled = course.after(120)
    assert max(settled.chip_c) <= SET_POINT_C + 2.5
    assert not any(settled.is_throttled)
    for decision in course.decisions:
        _hold(decision)
    assert course.level_changes_in_a_minute() <= 6


@pytest.mark.parametrize("ambient_c", [45.0, 50.0, 55.0])
def test_the_available_thermal_budget_is_used(ambient_c: float) -> None:
    course = live(Conditions(always(ambient_c)), ControlPolicy()).after(900)
    assert sum(course.chip_c) / len(course.chip_c) == pytest.approx(SET_POINT_C, abs=0.5)


def test_a_sensor_that_reads_two_degrees_low_still_prevents_throttling() -> None:
    course = live(Conditions(always(50.0), offset_c=-2.0), ControlPolicy()).after(120)
    assert not any(course.is_throttled)
    assert max(course.chip_c) <= SET_POINT_C + 2.0 + 2.5


def test_throttling_reveals_a_sensor_that_reads_far_too_low() -> None:
    course = live(Conditions(always(50.0), offset_c=-6.0), ControlPolicy()).after(120)
    assert sum(course.is_throttled) / len(course.is_throttled) < 0.05
    set_points = [decision.set_point_c for decision in course.decisions]
    assert min(item for item in set_points if item is not None) < SET_POINT_C - 1.0


def test_a_cool_machine_is_not_limited() -> None:
    for decision in live(Conditions(always(25.0), duration_s=300.0), ControlPolicy()).decisions:
        assert decision == PolicyDecision()._replace(
            temperature_c=decision.temperature_c,
            predicted_c=decision.predicted_c,
            set_point_c=SET_POINT_C,
        )


def test_the_allowed_rate_rises_monotonically_after_cooling() -> None:
    course = live(Conditions(_heat_wave, noise_c=0.0, missing=0.0, duration_s=2700.0), ControlPolicy())
    recovery = [decision.share for decision in course.after(2405).decisions]
    assert recovery[0] < 0.7
    assert recovery == sorted(recovery)
    assert recovery[-1] == 1.0


def test_the_allowed_rate_recovers_smoothly_even_with_noise() -> None:
    course = live(Conditions(_heat_wave, duration_s=2700.0), ControlPolicy())
    shares = [decision.share for decision in course.after(2405).decisions]
    highest = 0.0
    for share in shares:
        assert share >= highest - 0.05
        highest = max(highest, share)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("budget_w", [8.0, 12.0, 15.0, 20.0])
def test_mean_power_equals_the_budget(budget_w: float) -> None:
    policy = ControlPolicy(PolicyConstants(power_limit_w=budget_w))
    course = live(Conditions(always(20.0), duration_s=1200.0), policy, knows_power=True)
    assert sum(course.power_w[:1200]) / 1200 == pytest.approx(budget_w, rel=0.01)
    assert sum(course.power_w[1200:]) / 1200 == pytest.approx(budget_w, rel=0.01)
    assert course.decisions[-1].limited_by == "power_budget"
    assert f"{budget_w:.1f} W" in course.decisions[-1].detail


def test_a_short_burst_above_the_power_budget_is_compensated_later() -> None:
    policy = ControlPolicy(PolicyConstants(power_limit_w=12.0))
    now_s = 0.0

    def hold(power_w: float, for_s: float) -> list[float]:
        nonlocal now_s
        shares = []
        for _ in range(round(for_s / PERIOD_S)):
            shares.append(policy.step(PolicyInput(50.0, TRIP_C, power_w=power_w), now_s).share)
            now_s += PERIOD_S
        return shares

    assert set(hold(6.0, 60)) == {1.0}
    assert set(hold(18.0, 3)) == {1.0}
    assert hold(20.0, 30)[-1] < 0.3
    paying = hold(12.0, 10)
    assert paying[-1] < 0.5, "exactly the budget pays nothing back"
    assert hold(5.0, 60)[-1] == 1.0


def test_power_stays_below_the_limit_that_the_machine_enforces() -> None:
    decision = ControlPolicy().step(PolicyInput(50.0, power_w=10.0, power_limit_w=20.0), 0.0)
    assert decision.power_set_point_w == pytest.approx(19.0)
    decision = ControlPolicy(PolicyConstants(power_limit_w=15.0)).step(
        PolicyInput(50.0, power_w=10.0, power_limit_w=20.0), 0.0
    )
    assert decision.power_set_point_w == pytest.approx(15.0)


def test_without_a_limit_power_has_no_effect() -> None:
    policy = ControlPolicy()
    for index in range(100):
        decision = policy.step(PolicyInput(50.0, TRIP_C, power_w=1000.0), index * PERIOD_S)
    assert (decision.share, decision.power_set_point_w) == (1.0, None)


NASTY = st.one_of(
    st.none(),
    st.sampled_from([math.nan, math.inf, -math.inf, -256.0, -1.0, 0.0, 1e-320, 1e308, -1e308]),
    st.floats(-100.0, 200.0),
)
OBSERVATIONS = st.builds(
    PolicyInput,
    temperature_c=NASTY,
    trip_c=NASTY,
    critical_c=NASTY,
    margin_c=NASTY,
    power_w=NASTY,
    power_limit_w=NASTY,
    slowed_by=st.frozensets(st.sampled_from(Cause), max_size=3),
    expects=st.frozensets(st.sampled_from(["temperature", "power"])),
    silent=st.frozensets(st.sampled_from(["zone tj", "rail VDD_IN"])),
    memory_pressure_percent=NASTY.map(lambda value: 0.0 if value is None else value),
)
DELAYS_S = st.one_of(st.just(0.5), st.floats(0.0, 3.0), st.sampled_from([0.0, 1e-9, 3600.0, 1e7, -5.0]))


@given(steps=st.lists(st.tuples(OBSERVATIONS, DELAYS_S), max_size=40), budget_w=st.sampled_from([0.0, 12.0]))
def test_for_any_readings_the_allowed_rate_stays_in_range_and_moves_at_most_at_its_maximum_speed(
    steps: list[tuple[PolicyInput, float]], budget_w: float
) -> None:
    constants = PolicyConstants(power_limit_w=budget_w)
    policy = ControlPolicy(constants)
    now_s, share = 1000.0, 1.0
    for seen, delay_s in steps:
        now_s += delay_s
        decision = policy.step(seen, now_s)
        _hold(decision)
        dt_s = min(max(0.0, delay_s), 5.0)
        assert share - constants.fall_per_s * dt_s - 1e-9 <= decision.share
        assert decision.share <= share + constants.rise_per_s * dt_s + 1e-9
        share = decision.share


@given(seen=OBSERVATIONS)
def test_after_any_invalid_reading_a_cool_machine_recovers_within_a_minute(seen: PolicyInput) -> None:
    policy = ControlPolicy()
    for index in range(20):
        policy.step(PolicyInput(50.0, TRIP_C, CRITICAL_C), index * PERIOD_S)
    policy.step(seen._replace(trip_c=TRIP_C, critical_c=CRITICAL_C, margin_c=None, power_limit_w=None), 10.0)
    for index in range(1, 121):
        decision = policy.step(PolicyInput(50.0, TRIP_C, CRITICAL_C, power_w=5.0), 10.0 + index * PERIOD_S)
    assert (decision.share, decision.level, decision.detail) == (1.0, ThermalLevel.NORMAL, "")


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrong_c", [-256.0, 0.0, 20.0, 150.0, math.nan, math.inf, -math.inf])
def test_a_single_outlier_changes_nothing(wrong_c: float) -> None:
    policy = ControlPolicy()
    for index in range(60):
        temperature_c = wrong_c if index == 30 else 80.0
        decision = policy.step(PolicyInput(temperature_c, TRIP_C, CRITICAL_C), index * PERIOD_S)
        assert (decision.share, decision.level) == (1.0, ThermalLevel.NORMAL)
        assert decision.temperature_c == pytest.approx(80.0)


def test_a_constant_reading_of_minus_256_is_a_lost_sensor() -> None:
    policy = ControlPolicy()
    policy.step(PolicyInput(60.0, TRIP_C), 0.0)
    for index in range(1, 11):
        decision = policy.step(PolicyInput(-256.0, TRIP_C), index * PERIOD_S)
    assert decision.lost == {"temperature"}


def test_temperatures_below_zero_are_valid() -> None:
    policy = ControlPolicy()
    for index in range(20):
        decision = policy.step(PolicyInput(-20.0, TRIP_C), index * PERIOD_S)
    assert (decision.share, decision.lost) == (1.0, frozenset())
    assert decision.temperature_c == pytest.approx(-20.0)


def test_the_constants_equal_those_of_the_thermal_model() -> None:
    constants = ThermalModelConstants()
    assert (constants.trip_c, constants.critical_c) == (TRIP_C, CRITICAL_C)
