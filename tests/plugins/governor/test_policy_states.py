"""States of the control policy: levels, causes, lost sensors, memory pressure, and defaults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from edge_server.plugins.governor.control_policy import (
    RECOVERING_TEXT,
    Cause,
    ControlPolicy,
    PolicyConstants,
    PolicyDecision,
    PolicyInput,
    ThermalLevel,
    cause_texts,
)

PERIOD_S = 0.5
COOL = PolicyInput(60.0, 99.0, 104.5)


class Machine:
    """A policy that is shown one thing after the other, every half second."""

    def __init__(self) -> None:
        self.policy = ControlPolicy()
        self.now_s = 0.0

    def see(self, seen: PolicyInput, for_s: float = PERIOD_S) -> list[PolicyDecision]:
        decisions = []
        for _ in range(max(1, round(for_s / PERIOD_S))):
            decisions.append(self.policy.step(seen, self.now_s))
            self.now_s += PERIOD_S
        return decisions


def _changes(levels: Iterable[ThermalLevel]) -> int:
    items = list(levels)
    return sum(now is not then for then, now in itertools.pairwise(items))


def test_the_state_follows_the_temperature() -> None:
    table = [
        (60.0, ThermalLevel.NORMAL),
        (90.0, ThermalLevel.NORMAL),
        (91.5, ThermalLevel.WARM),
        (94.0, ThermalLevel.WARM),
        (95.0, ThermalLevel.HOT),
        (101.0, ThermalLevel.HOT),
        (102.0, ThermalLevel.CRITICAL),
        (110.0, ThermalLevel.CRITICAL),
    ]
    assert [
        (temperature_c, ControlPolicy().step(COOL._replace(temperature_c=temperature_c), 0.0).level)
        for temperature_c, _ in table
    ] == table


def test_a_worse_state_applies_at_once_and_a_better_one_after_a_delay() -> None:
    machine = Machine()
    machine.see(COOL, 5)
    hot = machine.see(COOL._replace(temperature_c=97.0), 10)
    assert hot[-1].level is ThermalLevel.HOT
    cooling = [decision.level for decision in machine.see(COOL, 60)]
    assert cooling[0] is ThermalLevel.HOT
    assert cooling[-1] is ThermalLevel.NORMAL
    assert cooling == sorted(cooling, reverse=True)


@pytest.mark.sample
@pytest.mark.parametrize("edge_c", [91.0, 93.0, 94.5, 101.5])
@pytest.mark.parametrize("seed", range(3))
def test_noise_near_a_threshold_does_not_toggle_the_state(edge_c: float, seed: int) -> None:
    rnd = random.Random(seed)
    machine = Machine()
    levels = []
    for _ in range(1200):
        seen = COOL._replace(temperature_c=None if rnd.random() < 0.02 else edge_c + rnd.gauss(0, 0.3))
        levels += [decision.level for decision in machine.see(seen)]
    for start in range(0, len(levels) - 120, 20):
        assert _changes(levels[start : start + 120]) <= 3


def test_missing_readings_change_neither_state_nor_allowed_rate() -> None:
    machine = Machine()
    hot = machine.see(COOL._replace(temperature_c=96.0), 30)[-1]
    missed = machine.see(COOL._replace(temperature_c=None), 1.0)[-1]
    assert (missed.level, missed.set_point_c, missed.lost) == (hot.level, hot.set_point_c, frozenset())
    assert missed.share == hot.share


def test_a_machine_that_never_had_a_sensor_is_not_governed() -> None:
    decisions = Machine().see(PolicyInput(), 60)
    assert decisions[-1] == PolicyDecision()


@pytest.mark.parametrize("temperature_c", [60.0, 92.0, 95.0, 98.0, 103.0])
def test_a_lost_sensor_is_reported_after_five_seconds_in_every_state(
    temperature_c: float,
) -> None:
    machine = Machine()
    before = machine.see(COOL._replace(temperature_c=temperature_c), 20)[-1]
    lost = machine.see(PolicyInput(), 4.5)[-1]
    assert lost.lost == {"temperature"}
    assert Cause.SENSOR_LOST in lost.causes
    assert "no reading of temperature" in lost.detail
    assert "50%" in lost.detail
    assert lost.detail != before.detail
    assert lost.level >= ThermalLevel.WARM
    assert (lost.temperature_c, lost.predicted_c, lost.set_point_c) == (None, None, None)
    blind = machine.see(PolicyInput(), 60)[-1]
    assert blind.share <= PolicyConstants().lost_share
    assert blind.level is ThermalLevel.WARM
    back = machine.see(COOL, 120)
    assert back[0].lost == frozenset()
    shares = [decision.share for decision in back]
    assert shares == sorted(shares)
    assert (back[-1].share, back[-1].level, back[-1].detail) == (1.0, ThermalLevel.NORMAL, "")


def test_a_sensor_is_lost_even_if_another_replaces_it() -> None:
    machine = Machine()
    machine.see(COOL, 10)
    lost = machine.see(COOL._replace(temperature_c=50.0, silent=frozenset({"zone tj-thermal"})), 4.5)[-1]
    assert lost.lost == {"zone tj-thermal"}
    assert lost.share < 1.0
    assert "zone tj-thermal" in lost.detail
    assert machine.see(COOL)[-1].lost == frozenset()


def test_an_expected_sensor_that_never_reports_is_lost() -> None:
    machine = Machine()
    decision = machine.see(PolicyInput(expects=frozenset({"temperature"})), 5)[-1]
    assert decision.lost == {"temperature"}


def test_a_lost_power_sensor_limits_only_if_power_is_controlled() -> None:
    for limit_w, share in ((None, 1.0), (30.0, 0.5)):
        machine = Machine()
        machine.see(COOL._replace(power_w=10.0, power_limit_w=limit_w), 10)
        decision = machine.see(COOL, 60)[-1]
        assert decision.lost == {"power"}
        assert decision.share == pytest.approx(share)
        assert decision.level is ThermalLevel.WARM
        assert ("at most" in decision.detail) == (limit_w is not None)


def test_a_missing_reading_after_a_suspend_is_not_a_loss() -> None:
    policy = ControlPolicy()
    policy.step(COOL, 0.0)
    policy.step(COOL, 0.5)
    assert policy.step(COOL._replace(temperature_c=None), 3600.0).lost == frozenset()
    awake = policy.step(COOL, 3600.5)
    assert (awake.share, awake.level, awake.lost) == (1.0, ThermalLevel.NORMAL, frozenset())


def test_after_a_suspend_the_readings_start_again() -> None:
    policy = ControlPolicy()
    for index in range(200):
        policy.step(COOL._replace(temperature_c=99.0), index * PERIOD_S)
    awake = policy.step(COOL._replace(temperature_c=20.0), 9000.0)
    assert awake.temperature_c == pytest.approx(20.0, abs=0.1)
    assert awake.predicted_c == pytest.approx(20.0, abs=0.5)


def test_a_clock_that_goes_back_is_harmless() -> None:
    policy = ControlPolicy()
    policy.step(COOL, 100.0)
    assert policy.step(COOL, 50.0).share == 1.0
    assert policy.step(COOL._replace(temperature_c=None), 50.5).lost == frozenset()


def test_the_nvml_margin_alone_controls_like_a_temperature() -> None:
    machine = Machine()
    assert machine.see(PolicyInput(margin_c=40.0), 10)[-1].level is ThermalLevel.NORMAL
    near = machine.see(PolicyInput(margin_c=1.0), 30)[-1]
    assert (near.level, near.limited_by) == (ThermalLevel.HOT, "heat")
    assert near.share < 0.9
    assert machine.see(PolicyInput(), 5)[-1].lost == {"temperature"}


def test_a_margin_with_a_temperature_gives_the_trip_which_is_remembered() -> None:
    machine = Machine()
    assert machine.see(PolicyInput(60.0, margin_c=27.0))[-1].set_point_c == pytest.approx(83.0)
    assert machine.see(PolicyInput(70.0))[-1].set_point_c == pytest.approx(83.0)
    assert machine.see(PolicyInput(margin_c=5.0), 10)[-1].temperature_c == pytest.approx(82.0, abs=0.5)


def test_without_a_trip_the_critical_temperature_or_a_default_is_used() -> None:
    assert ControlPolicy().step(PolicyInput(60.0, critical_c=114.5), 0.0).set_point_c == pytest.approx(104.5)
    assert ControlPolicy().step(PolicyInput(60.0), 0.0).set_point_c == pytest.approx(91.0)
    assert ControlPolicy().step(PolicyInput(60.0, trip_c=0.0), 0.0).set_point_c == pytest.approx(91.0)


def test_a_temperature_limit_lowers_the_set_point_and_never_raises_it() -> None:
    assert ControlPolicy(PolicyConstants(temperature_limit_c=70.0)).step(COOL, 0.0).set_point_c == pytest.approx(70.0)
    assert ControlPolicy(PolicyConstants(temperature_limit_c=120.0)).step(COOL, 0.0).set_point_c == pytest.approx(95.0)


def test_near_shutdown_only_control_is_admitted() -> None:
    decision = ControlPolicy().step(COOL._replace(temperature_c=103.0), 0.0)
    assert (decision.level, decision.only_control, decision.sheds_bulk) == (ThermalLevel.CRITICAL, True, True)
    assert not decision.may_load
    assert not ControlPolicy().step(COOL._replace(temperature_c=101.0), 0.0).only_control


def test_without_a_critical_temperature_no_state_is_critical() -> None:
    assert ControlPolicy().step(PolicyInput(150.0, 99.0), 0.0).level is ThermalLevel.HOT


@pytest.mark.parametrize("cause", [Cause.THERMAL, Cause.POWER_CAP, Cause.POWER_BRAKE, Cause.UNDER_VOLTAGE])
def test_a_throttling_machine_is_reported_and_limited(cause: Cause) -> None:
    machine = Machine()
    machine.see(COOL, 5)
    slowed = machine.see(COOL._replace(slowed_by=frozenset({cause})), 3)
    shares = [decision.share for decision in slowed]
    assert slowed[0].level is ThermalLevel.THROTTLED
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(0.85**3, abs=0.02)
    assert slowed[-1].limited_by == cause.value
    held = machine.see(COOL, 9)
    assert {decision.share for decision in held} == {shares[-1]}, "for ten seconds nothing rises"
    assert held[-1].limited_by == cause.value
    assert held[-1].detail.endswith(RECOVERING_TEXT)
    free = machine.see(COOL, 60)[-1]
    assert (free.share, free.level, free.limited_by, free.detail) == (1.0, ThermalLevel.NORMAL, "", "")


@pytest.mark.parametrize("cause", [Cause.OVER_CURRENT, Cause.POWER_MODE])
def test_causes_that_less_load_does_not_change_are_only_reported(cause: Cause) -> None:
    decisions = Machine().see(COOL._replace(slowed_by=frozenset({cause})), 60)
    assert {(decision.share, decision.level) for decision in decisions} == {(1.0, ThermalLevel.NORMAL)}
    assert decisions[-1].detail == cause_texts({cause.value})[0]


def test_bursts_of_over_current_do_not_change_the_allowed_rate() -> None:
    machine = Machine()
    for index in range(240):
        slowed_by = frozenset({Cause.OVER_CURRENT}) if index % 20 < 6 else frozenset[Cause]()
        assert machine.see(COOL._replace(slowed_by=slowed_by))[-1].share == 1.0


def test_a_gpu_at_its_power_cap_is_controlled_by_power_and_may_load() -> None:
    machine = Machine()
    decision = machine.see(
        COOL._replace(power_w=250.0, power_limit_w=300.0, slowed_by=frozenset({Cause.POWER_CAP})), 30
    )[-1]
    assert (decision.share, decision.level, decision.may_load) == (1.0, ThermalLevel.THROTTLED, True)


@pytest.mark.parametrize("cause", [Cause.THERMAL, Cause.POWER_BRAKE, Cause.UNDER_VOLTAGE])
def test_loads_wait_in_a_limited_state(cause: Cause) -> None:
    assert not ControlPolicy().step(COOL._replace(slowed_by=frozenset({cause})), 0.0).may_load
    assert not ControlPolicy().step(COOL._replace(temperature_c=96.0), 0.0).may_load
    assert ControlPolicy().step(COOL, 0.0).may_load


def test_memory_pressure_sheds_bulk_and_delays_loads_until_it_clearly_falls() -> None:
    machine = Machine()
    short = machine.see(COOL._replace(memory_pressure_percent=45.0))[-1]
    assert (short.sheds_bulk, short.may_load, short.level) == (True, False, ThermalLevel.WARM)
    assert (short.share, short.only_control) == (1.0, False)
    assert Cause.MEMORY in short.causes
    assert "memory" in short.detail
    assert machine.see(COOL._replace(memory_pressure_percent=35.0))[-1].sheds_bulk
    eased = machine.see(COOL._replace(memory_pressure_percent=5.0), 15)[-1]
    assert (eased.sheds_bulk, eased.may_load, eased.level) == (False, True, ThermalLevel.NORMAL)


def test_every_cause_has_its_own_message() -> None:
    told = [cause_texts({cause.value}) for cause in Cause if cause is not Cause.SENSOR_LOST]
    assert all(len(sentences) == 1 for sentences in told)
    assert len({sentences[0] for sentences in told}) == len(told)
    keys = {
        Cause.THERMAL: "too hot",
        Cause.POWER_CAP: "power limit",
        Cause.OVER_CURRENT: "over-current",
        Cause.POWER_MODE: "setting, not heat",
        Cause.UNDER_VOLTAGE: "power supply and its cable",
        Cause.POWER_BRAKE: "brake",
    }
    for cause, key in keys.items():
        assert [other for other in keys if key in cause_texts({other.value})[0]] == [cause]
    machine = Machine()
    machine.see(COOL, 5)
    assert "temperature" in machine.see(COOL._replace(temperature_c=None), 5)[-1].detail


def test_of_several_causes_heat_is_reported_first() -> None:
    slowed_by = frozenset({Cause.POWER_MODE, Cause.OVER_CURRENT, Cause.THERMAL})
    detail = ControlPolicy().step(COOL._replace(slowed_by=slowed_by), 0.0).detail
    order = (Cause.THERMAL, Cause.OVER_CURRENT, Cause.POWER_MODE)
    places = [detail.index(cause_texts({cause.value})[0]) for cause in order]
    assert places == sorted(places)
