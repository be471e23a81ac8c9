"""Thermal model, comparison of strategies against heat, and replays of recorded temperatures."""

from __future__ import annotations

import functools

import pytest

from edge_server.core.priority_class import PriorityClass
from tests.plugins.governor.simulator import SCENARIOS, Scenario, SimulationResult, Strategy, simulate
from tests.plugins.governor.thermal_model import ThermalModel, ThermalModelConstants

CONTROL, NORMAL, BULK = PriorityClass


def _short(name: str, seconds: float = 450.0) -> Scenario:
    return SCENARIOS[name]._replace(duration_s=seconds)


@functools.cache
def _run(name: str, strategy: Strategy, seconds: float = 450.0) -> SimulationResult:
    """Simulate once for all tests of this module: a simulated hour takes 4 s of the processor."""
    return simulate(_short(name, seconds), strategy)


def test_the_thermal_model_settles_at_the_temperature_of_its_resistances() -> None:
    constants = ThermalModelConstants(trip_c=400.0, critical_c=500.0, leakage_w_at_50=1e-6)
    plant = ThermalModel(constants, ambient_c=20.0)
    for _ in range(40_000):
        plant.step(1.0, 0.1)
    assert plant.power_w == pytest.approx(22.0, abs=0.01)
    assert plant.chip_c == pytest.approx(20.0 + 22.0 * 3.2, abs=0.1)
    assert plant.energy_j == pytest.approx(22.0 * 4000, rel=0.01)


def test_the_thermal_model_throttles_above_its_trip_and_recovers_below() -> None:
    plant = ThermalModel(ambient_c=60.0)
    for _ in range(9000):
        plant.step(1.0, 0.1)
    assert plant.is_throttled
    assert plant.clock < 0.8
    assert plant.chip_c == pytest.approx(99.0, abs=2.0)
    for _ in range(200):
        plant.step(0.0, 0.1)
    assert not plant.is_throttled


# In the fast part, long enough that the governor has limited the work for minutes; longer runs simulate more of it.
# "step" and "dead-fan" begin after 20 minutes; test_control_policy.py has such changes in cheaper runs.
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("ambient-45", 450.0),
        ("ambient-55", 450.0),
        ("failing-sensor", 660.0),
        ("offset", 450.0),
        ("over-current", 600.0),
        *(
            pytest.param(name, 2700.0 if name in ("step", "dead-fan") else 1500.0, marks=pytest.mark.full)
            for name in SCENARIOS
        ),
    ],
)
def test_the_governor_prevents_throttling_and_keeps_control_in_time(name: str, seconds: float) -> None:
    outcome = _run(name, Strategy.GOVERNOR, seconds)
    assert outcome.throttled_s == 0.0
    assert outcome.hottest_c <= outcome.set_point_c + 2.5
    assert outcome.on_time_part(CONTROL) >= 0.99
    assert outcome.late == 0
    assert outcome.on_time_part(CONTROL) >= outcome.on_time_part(NORMAL) >= outcome.on_time_part(BULK)


@pytest.mark.soak
def test_a_lighter_variant_serves_more_than_rate_limits_and_is_switched_rarely() -> None:
    light = _run("ambient-55", Strategy.GOVERNOR_VARIANT, 1500.0)
    rates = _run("ambient-55", Strategy.GOVERNOR, 1500.0)
    assert light.throttled_s == 0.0
    assert light.hottest_c <= light.set_point_c + 2.5
    assert 1 <= light.switches <= 2
    for priority in PriorityClass:
        assert light.on_time_part(priority) >= rates.on_time_part(priority)
    assert light.on_time_part(NORMAL) > 0.95 > rates.on_time_part(NORMAL)


def test_the_compared_strategies_throttle_or_limit_every_class() -> None:
    kernel, deadlines, bang_bang = (
        _run("ambient-55", strategy)
        for strategy in (Strategy.KERNEL_ONLY, Strategy.KERNEL_AND_DEADLINES, Strategy.BANG_BANG)
    )
    assert kernel.throttled_part > 0.5
    assert deadlines.throttled_part > 0.5
    assert deadlines.late < 0.01 * kernel.late, "what cannot be in time is not begun"
    assert deadlines.on_time_part(NORMAL) > kernel.on_time_part(NORMAL)
    assert bang_bang.throttled_part == 0.0
    assert bang_bang.on_time_part(CONTROL) < 0.9


def test_the_governor_is_not_claimed_to_do_more_work_than_lowered_clocks() -> None:
    """The honest part: at full clock fewer answers fit into the same heat. If this turns, the documents are wrong."""
    governor = _run("ambient-55", Strategy.GOVERNOR)
    kernel = _run("ambient-55", Strategy.KERNEL_AND_DEADLINES)
    assert sum(governor.on_time.values()) < sum(kernel.on_time.values())
