"""Energy model: never more than the measured energy, and correct where the true values are known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.governor.energy_model import LONGEST_GAP_S, EnergyModel, ModelWorkload, measured_j
from edge_server.plugins.governor.readings import EnergyCounter, MachineReading, Rail

Key = tuple[str, int]

works = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([1, 4, 8])),
    st.builds(
        ModelWorkload,
        st.floats(-1, 4) | st.sampled_from([math.nan, math.inf]),
        st.integers(-3, 10_000),
    ),
    max_size=5,
)


@given(
    intervals=st.lists(
        st.tuples(
            st.none() | st.floats(0, 1e5) | st.sampled_from([math.nan, math.inf, -1.0]), st.floats(-1, 1e4), works
        ),
        max_size=30,
    )
)
def test_energy_charged_to_models_is_never_more_than_was_measured(
    intervals: list[tuple[float | None, float, Mapping[Key, ModelWorkload]]],
) -> None:
    learner = EnergyModel()
    given_j = measured_so_far_j = 0.0
    for energy_j, duration_s, work in intervals:
        shares = learner.learn(energy_j, duration_s, work)
        given_j += math.fsum(shares.values())
        assert all(joules >= 0 for joules in shares.values())
        if energy_j is None or not math.isfinite(energy_j):
            assert shares == {}
        else:
            # A run longer than an interval is also given those before, which nothing else was given.
            measured_so_far_j += max(0.0, energy_j)
        assert given_j <= measured_so_far_j * (1 + 1e-9)
    for cost in learner.costs().values():
        assert math.isfinite(cost.joules)
        assert cost.joules >= 0
        assert 0 <= cost.confidence <= 1


class SimulatedMachine:
    """A machine that draws `idle_w`, plus the given watts while a model is busy."""

    def __init__(self, idle_w: float, watts: dict[Key, float], inference_s: dict[Key, float], seed: int) -> None:
        self.idle_w, self.watts, self.inference_s = idle_w, watts, inference_s
        self._random = random.Random(seed)

    def interval(self, only: Key | None = None, noise: float = 0.0) -> tuple[float, dict[Key, ModelWorkload]]:
        """Return the energy of one second, and what was done in it."""
        work = {}
        for key in self.watts:
            if only in (None, key):
                count = self._random.randrange(0, 40)
                work[key] = ModelWorkload(count * self.inference_s[key], count)
        above_w = sum(self.watts[key] * item.busy_s for key, item in work.items())
        return (self.idle_w + above_w) * (1 + self._random.gauss(0, noise)), work

    def joules(self, key: Key) -> float:
        return self.watts[key] * self.inference_s[key]


def cost_of(learner: EnergyModel, key: Key) -> Any:
    cost = learner.costs().get(key)
    assert cost is not None
    return cost


def truth(seed: int = 1) -> SimulatedMachine:
    keys: list[Key] = [("big", 1), ("big", 8), ("small", 1)]
    return SimulatedMachine(
        5.0, dict(zip(keys, (17.0, 22.0, 6.0), strict=True)), dict(zip(keys, (0.01, 0.004, 0.003), strict=True)), seed
    )


@pytest.mark.parametrize(("seed", "noise", "within"), [(seed, 0.0, 0.05) for seed in range(5)] + [(1, 0.05, 0.15)])
def test_the_energy_of_models_in_changing_mixtures_is_recovered(seed: int, noise: float, within: float) -> None:
    machine, learner = truth(seed), EnergyModel()
    learner.learn(machine.idle_w * 60, 60.0, {})
    for _ in range(3000):
        energy_j, work = machine.interval(noise=noise)
        learner.learn(energy_j, 1.0, work)
    for key in machine.watts:
        cost = cost_of(learner, key)
        assert cost.joules == pytest.approx(machine.joules(key), rel=within)
        assert cost.watts == pytest.approx(machine.watts[key], rel=within)
        assert cost.confidence > (0.95 if noise == 0.0 else 0.0)


def test_missing_measurements_only_lower_the_number_of_samples() -> None:
    machine, learner = truth(), EnergyModel()
    learner.learn(machine.idle_w * 60, 60.0, {})
    for second in range(600):
        energy_j, work = machine.interval(only=("big", 1))
        learner.learn(None if second % 3 else energy_j, 1.0, work)
    cost = cost_of(learner, ("big", 1))
    assert cost.joules == pytest.approx(machine.joules(("big", 1)), rel=1e-6)


def test_the_energy_per_inference_follows_recent_measurements() -> None:
    learner = EnergyModel(half_life_s=60.0)
    learner.learn(0.0, 60.0, {})
    for joules, seconds in ((1.0, 600), (3.0, 600)):
        for _ in range(seconds):
            learner.learn(joules * 10, 1.0, {("m", 1): ModelWorkload(0.5, 10)})
    cost = cost_of(learner, ("m", 1))
    assert cost.joules == pytest.approx(3.0, rel=0.01)
    assert cost.inferences < 10 * 60 / math.log(2) + 10
    assert cost.total_j == pytest.approx(40.0 * 600)


def test_idle_power_is_not_attributed_to_models() -> None:
    learner = EnergyModel()
    for _ in range(10):
        assert learner.learn(5.0, 1.0, {}) == {}
    assert learner.idle_w == 5.0
    assert learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(0.5, 50)}) == {("m", 1): 7.0}


def test_a_lower_power_under_load_corrects_the_idle_power() -> None:
    learner = EnergyModel()
    learner.learn(9.0, 1.0, {})
    for _ in range(60):
        assert learner.learn(6.0, 1.0, {("m", 1): ModelWorkload(0.5, 5)}) == {("m", 1): 0.0}
    assert learner.idle_w == pytest.approx(6.0, abs=0.01)


def test_one_reading_of_zero_does_not_make_the_idle_power_zero() -> None:
    learner = EnergyModel()
    learner.learn(9.0, 1.0, {})
    learner.learn(0.0, 0.5, {("m", 1): ModelWorkload(0.2, 5)})
    assert learner.idle_w == pytest.approx(9.0, rel=0.1)


def test_estimates_from_before_the_idle_power_was_known_are_replaced() -> None:
    learner = EnergyModel()
    for _ in range(20):
        learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(0.5, 10)})
    before = learner.costs().get(("m", 1))
    assert before is not None
    assert before.joules == pytest.approx(1.2)
    learner.learn(5.0, 1.0, {})
    for _ in range(20):
        learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(0.5, 10)})
    after = learner.costs().get(("m", 1))
    assert after is not None
    assert after.joules == pytest.approx(0.7)
    assert after.total_j == pytest.approx(20 * 12.0 + 20 * 7.0), "what a counter showed is not taken back"


@pytest.mark.parametrize("interval_s", [0.5, 1.0])
@pytest.mark.parametrize("run_s", [2.0, 7.0])
def test_a_run_longer_than_an_interval_gets_all_its_energy(run_s: float, interval_s: float) -> None:
    """20 W above 5 W at rest while it runs, reported when a run ends."""
    learner = EnergyModel()
    learner.learn(5.0 * 60, 60.0, {})
    for _ in range(100):
        steps = int(run_s / interval_s)
        for step in range(steps):
            work = {("slow", 1): ModelWorkload(run_s, 1)} if step == steps - 1 else {}
            learner.learn(25.0 * interval_s, interval_s, work)
        for _ in range(steps):
            learner.learn(5.0 * interval_s, interval_s, {})
    cost = cost_of(learner, ("slow", 1))
    assert learner.idle_w == pytest.approx(5.0, rel=0.05)
    assert cost.joules == pytest.approx(20.0 * run_s, rel=0.05)


@pytest.mark.parametrize("energy_j", [-1.0, -1e300, 1e300, math.nan, math.inf, None])
def test_impossible_energy_is_ignored(energy_j: float | None) -> None:
    learner = EnergyModel()
    learner.learn(5.0, 1.0, {})
    for _ in range(10):
        learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(0.5, 10)})
    before = learner.costs().get(("m", 1))
    assert learner.learn(energy_j, 1e-3, {("m", 1): ModelWorkload(0.5, 10)}) == {}
    after = learner.costs().get(("m", 1))
    assert before is not None
    assert after is not None
    assert (after.joules, after.total_j) == (before.joules, before.total_j)
    assert learner.idle_w == 5.0


@pytest.mark.parametrize("busy_s", [-1.0, 0.0, 1e300, math.nan, math.inf])
def test_impossible_work_gets_no_energy(busy_s: float) -> None:
    learner = EnergyModel()
    learner.learn(5.0, 1.0, {})
    assert learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(busy_s, 10)}) == {}
    assert learner.costs() == {}


def test_a_year_of_intervals_overflows_nothing() -> None:
    learner = EnergyModel(half_life_s=60.0)
    learner.learn(5.0, 1.0, {})
    for _ in range(2000):
        learner.learn(12.0 * 600, 600.0, {("m", 1): ModelWorkload(300.0, 6000)})
    learner.learn(None, 1e12, {})
    learner.learn(12.0, 1.0, {("m", 1): ModelWorkload(0.5, 10)})
    cost = cost_of(learner, ("m", 1))
    assert cost.joules == pytest.approx(0.7)


def test_confidence_is_small_after_one_interval() -> None:
    learner = EnergyModel()
    learner.learn(5.0, 1.0, {("m", 1): ModelWorkload(0.5, 5)})
    cost = cost_of(learner, ("m", 1))
    assert cost.confidence == pytest.approx(1 / 6)


def test_models_that_never_ran_or_were_forgotten_have_no_estimate() -> None:
    learner = EnergyModel()
    assert learner.costs().get(("m", 1)) is None
    learner.learn(5.0, 1.0, {("m", 1): ModelWorkload(0.5, 5), ("n", 1): ModelWorkload(0.5, 5)})
    learner.forget("m")
    assert learner.costs().get(("m", 1)) is None
    assert set(learner.costs()) == {("n", 1)}


def test_forgetting_a_model_keeps_the_estimates_of_others() -> None:
    machine, learner = truth(), EnergyModel()
    learner.learn(machine.idle_w * 60, 60.0, {})
    for _ in range(600):
        learner.learn(*_with_second(machine.interval()))
    learner.forget("small")
    for _ in range(600):
        energy_j, work = machine.interval()
        small_j = machine.watts["small", 1] * work.pop(("small", 1)).busy_s
        learner.learn(energy_j - small_j, 1.0, work)
    cost = cost_of(learner, ("big", 1))
    assert cost.joules == pytest.approx(machine.joules(("big", 1)), rel=0.05)


def test_models_that_always_run_together_share_energy_by_busy_time() -> None:
    learner = EnergyModel()
    learner.learn(0.0, 60.0, {})
    for _ in range(100):
        shares = learner.learn(12.0, 1.0, {("a", 1): ModelWorkload(0.5, 10), ("b", 1): ModelWorkload(0.25, 5)})
    assert shares == {("a", 1): pytest.approx(8.0, rel=1e-3), ("b", 1): pytest.approx(4.0, rel=1e-3)}


def _with_second(measured: tuple[float, dict[Key, ModelWorkload]]) -> tuple[float, float, dict[Key, ModelWorkload]]:
    return measured[0], 1.0, measured[1]


def reading(
    at_s: float, power_mw: int | None, counters: dict[str, int], counted: str = "gpu0 package-0"
) -> MachineReading:
    rails = tuple(Rail(name, power_mw, True) for name in counted.split())
    energy = tuple(EnergyCounter(name, mj, True) for name, mj in counters.items())
    return MachineReading(at_s, rails=rails, power_mw=power_mw, energy=energy)


def test_energy_counters_are_preferred_to_power() -> None:
    before = reading(10.0, 1000, {"gpu0": 5000, "package-0": 100, "psys": 1})
    after = reading(60.0, 1000, {"gpu0": 8000, "package-0": 600, "psys": 9999})
    assert measured_j(before, after) == 3.5


def test_power_is_used_if_a_rail_has_no_counter_and_the_gap_is_short() -> None:
    before, after = reading(10.0, 4000, {"gpu0": 1}), reading(12.0, 6000, {"gpu0": 2})
    assert measured_j(before, after) == 10.0
    assert measured_j(before, reading(10.1 + LONGEST_GAP_S, 6000, {"gpu0": 2})) is None


def test_a_jump_of_a_counter_is_not_counted_as_energy() -> None:
    before, after = reading(10.0, 1000, {"gpu0": 5}, "gpu0"), reading(11.0, 1000, {"gpu0": 10**12}, "gpu0")
    assert measured_j(before, after) is None
    assert measured_j(after, reading(12.0, 1000, {"gpu0": 5}, "gpu0")) is None


def test_no_energy_is_measured_while_a_rail_appears_vanishes_or_is_silent() -> None:
    before = reading(10.0, 4000, {}, "gpu0")
    assert measured_j(before, reading(11.0, 4000, {})) is None
    assert measured_j(before, reading(11.0, None, {}, "gpu0")) is None
    assert measured_j(before, reading(10.0, 4000, {}, "gpu0")) is None


def test_a_token_of_each_phase_of_a_language_model_has_its_own_energy() -> None:
    learner = EnergyModel()
    for _ in range(50):
        learner.learn(5.0, 1.0, {})
        learner.learn(15.0, 1.0, {("talker", "prefill"): ModelWorkload(1.0, 200)})
        learner.learn(11.0, 1.0, {("talker", "decode"): ModelWorkload(1.0, 20)})
    costs = learner.costs()
    assert costs["talker", "prefill"].joules == pytest.approx(10 / 200, rel=0.1)
    assert costs["talker", "decode"].joules == pytest.approx(6 / 20, rel=0.1)
