"""Simulator of a hot machine: compares strategies that limit heat, with equal requests on a thermal model.

The time is simulated: an hour takes a few seconds. The work is three classes of requests with deadlines for one model
on one executor, which always runs control before normal before bulk. The results are temperature, requests answered in
time, and energy.
"""

from __future__ import annotations

import enum
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from edge_server.core.priority_class import PriorityClass
from edge_server.plugins.governor.computing_time_bucket import RateAllocator
from edge_server.plugins.governor.control_policy import Cause, ControlPolicy, PolicyConstants, PolicyInput
from edge_server.plugins.governor.variant_selector import VariantRule
from tests.plugins.governor.thermal_model import ThermalModel

_TICK_S = 0.01
_MAX_WAITING = 100
"""Most waiting requests of all classes, with any strategy."""
_MODEL_PERIOD_S = 0.1
_POLICY_PERIOD_S = 0.5
_SETTLING_S = 120.0
"""Time after the start that does not count for the highest temperature and the throttled time."""


class Strategy(enum.Enum):
    """Strategies against heat. The kernel's throttling is always active in addition."""

    KERNEL_ONLY = "kernel throttling only"
    KERNEL_AND_DEADLINES = "kernel throttling, hopeless work dropped"
    BANG_BANG = "all work off at the set-point, on 5 K below"
    GOVERNOR = "governor, rates only"
    GOVERNOR_VARIANT = "governor with a lighter variant"


class ClassLoad(NamedTuple):
    """Requests of one class: rate per second, and deadline after arrival."""

    priority: PriorityClass
    per_s: float
    deadline_s: float


CLASSES = (
    ClassLoad(PriorityClass.CONTROL, 20.0, 0.060),
    ClassLoad(PriorityClass.NORMAL, 40.0, 0.150),
    ClassLoad(PriorityClass.BULK, 40.0, 1.0),
)
HEAVY_S, LIGHT_S = 0.0095, 0.0045
"""Time of a request at full clock, and with the lighter variant."""


class Scenario(NamedTuple):
    """Ambient conditions and faults, as functions of the seconds since the start.

    `sense(true_c, now_s, random)` returns the sensor's reading for the true temperature; None: no reading.
    """

    name: str
    duration_s: float = 3600.0
    ambient_c: Callable[[float], float] = lambda now_s: 25.0
    fan_factor: Callable[[float], float] = lambda now_s: 1.0
    sense: Callable[[float, float, random.Random], float | None] = lambda true_c, now_s, rnd: true_c + rnd.gauss(0, 0.3)
    over_current: Callable[[float], bool] = lambda now_s: False


def _step(now_s: float) -> float:
    return 55.0 if 1200.0 <= now_s < 2400.0 else 30.0


def _failing_sensor(true_c: float, now_s: float, rnd: random.Random) -> float | None:
    """Two percent of the reads fail, and all reads fail for one minute every ten minutes."""
    if rnd.random() < 0.02 or now_s % 600.0 >= 540.0:
        return None
    return true_c + rnd.gauss(0, 0.3)


def _constant(degrees: int) -> Callable[[float], float]:
    return lambda now_s: float(degrees)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        *(Scenario(f"ambient-{degrees}", ambient_c=_constant(degrees)) for degrees in (25, 35, 45, 55)),
        Scenario("step", ambient_c=_step),
        Scenario("dead-fan", ambient_c=lambda now_s: 30.0, fan_factor=lambda now_s: 1.8 if now_s >= 1200 else 1.0),
        Scenario("failing-sensor", ambient_c=lambda now_s: 45.0, sense=_failing_sensor),
        Scenario(
            "offset", ambient_c=lambda now_s: 45.0, sense=lambda true_c, now_s, rnd: true_c + 2.0 + rnd.gauss(0, 0.3)
        ),
        Scenario("over-current", ambient_c=lambda now_s: 35.0, over_current=lambda now_s: now_s % 60.0 < 10.0),
    )
}


@dataclass(slots=True)
class SimulationResult:
    """Totals of one run. `late` counts answers after their deadline."""

    scenario: str
    strategy: Strategy
    seconds: float
    hottest_c: float = 0.0
    throttled_s: float = 0.0
    offered: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(PriorityClass, 0))
    on_time: dict[PriorityClass, int] = field(default_factory=lambda: dict.fromkeys(PriorityClass, 0))
    late: int = 0
    switches: int = 0
    energy_j: float = 0.0
    set_point_c: float = 0.0

    @property
    def throttled_part(self) -> float:
        return self.throttled_s / max(1e-9, self.seconds - _SETTLING_S)

    def on_time_part(self, priority: PriorityClass) -> float:
        """Return the part of the requests of a class that was answered in time."""
        return self.on_time[priority] / max(1, self.offered[priority])


@dataclass(slots=True)
class _Job:
    """One request and its remaining computing time at full clock."""

    load: ClassLoad
    arrived_s: float
    left_s: float


class _SimulationRun:
    """A run of one strategy in one scenario."""

    def __init__(self, scenario: Scenario, strategy: Strategy, seed: int) -> None:
        self._scenario = scenario
        self._strategy = strategy
        self._random = random.Random(seed)
        self._model = ThermalModel(ambient_c=scenario.ambient_c(0.0))
        self._policy = ControlPolicy(PolicyConstants())
        self._allocator = RateAllocator()
        self._variant = VariantRule()
        by_importance = sorted(load.priority for load in CLASSES)
        self._queues: dict[PriorityClass, deque[_Job]] = {priority: deque() for priority in by_importance}
        self._due_s = {load.priority: 0.0 for load in CLASSES}
        self._running: _Job | None = None
        self._is_off = False
        self._share = 1.0
        self.outcome = SimulationResult(scenario.name, strategy, scenario.duration_s)
        self.outcome.set_point_c = self._model.constants.trip_c - PolicyConstants().below_trip_c

    @property
    def _is_governed(self) -> bool:
        return self._strategy in (Strategy.GOVERNOR, Strategy.GOVERNOR_VARIANT)

    def run(self) -> SimulationResult:
        ticks = round(self._scenario.duration_s / _TICK_S)
        per_model, per_policy = round(_MODEL_PERIOD_S / _TICK_S), round(_POLICY_PERIOD_S / _TICK_S)
        busy_s = 0.0
        for tick in range(ticks):
            now_s = tick * _TICK_S
            if tick % per_policy == 0:
                self._decide(now_s)
            for load in CLASSES:
                while self._due_s[load.priority] <= now_s:
                    self._due_s[load.priority] += self._random.expovariate(load.per_s)
                    self._add_request(load, now_s)
            busy_s += self._compute_tick(now_s)
            if (tick + 1) % per_model == 0:
                self._step_model(busy_s, now_s)
                busy_s = 0.0
        self.outcome.energy_j = self._model.energy_j
        self.outcome.switches = self._variant.switch_count
        return self.outcome

    def _step_model(self, busy_s: float, now_s: float) -> None:
        model, outcome = self._model, self.outcome
        model.ambient_c, model.fan_factor = self._scenario.ambient_c(now_s), self._scenario.fan_factor(now_s)
        model.step(busy_s / _MODEL_PERIOD_S, _MODEL_PERIOD_S)
        if now_s > _SETTLING_S:
            outcome.hottest_c = max(outcome.hottest_c, model.chip_c)
            outcome.throttled_s += _MODEL_PERIOD_S * model.is_throttled

    def _decide(self, now_s: float) -> None:
        sensed = self._scenario.sense(self._model.chip_c, now_s, self._random)
        if self._strategy is Strategy.BANG_BANG and sensed is not None:
            limit_c = self.outcome.set_point_c - (5.0 if self._is_off else 0.0)
            self._is_off = sensed > limit_c
        if self._is_governed:
            self._govern(sensed, now_s)

    def _govern(self, sensed: float | None, now_s: float) -> None:
        constants = self._model.constants
        slowed = {Cause.THERMAL} if self._model.is_throttled else set()
        if self._scenario.over_current(now_s):
            slowed.add(Cause.OVER_CURRENT)
        seen = PolicyInput(sensed, constants.trip_c, constants.critical_c, slowed_by=frozenset(slowed))
        decision = self._policy.step(seen, now_s)
        self._share = decision.share
        self._allocator.grant(decision.share, 1.0, now_s)
        if self._strategy is Strategy.GOVERNOR_VARIANT:
            offered = sum(load.per_s for load in CLASSES) * HEAVY_S
            room_c = None if decision.predicted_c is None else self.outcome.set_point_c - decision.predicted_c
            self._variant.step(offered, decision.share, room_c, now_s)

    def _add_request(self, load: ClassLoad, now_s: float) -> None:
        self.outcome.offered[load.priority] += 1
        cost_s = LIGHT_S if self._variant.is_light else HEAVY_S
        if self._is_off or sum(map(len, self._queues.values())) >= _MAX_WAITING:
            return
        is_held_back = self._is_governed and self._share < 1.0
        if is_held_back and self._allocator.admit(load.priority, cost_s, now_s) is None:
            return
        self._queues[load.priority].append(_Job(load, now_s, cost_s))

    def _compute_tick(self, now_s: float) -> float:
        """Compute for one tick, and return the busy seconds."""
        spent_s = 0.0
        clock = self._model.clock
        while spent_s < _TICK_S:
            job = self._running or self._next_job(now_s + spent_s)
            if job is None:
                return spent_s
            took_s = min(job.left_s / clock, _TICK_S - spent_s)
            spent_s += took_s
            job.left_s -= took_s * clock
            self._running = job if job.left_s > 1e-9 else None
            if self._running is None:
                self._finish_job(job, now_s + spent_s)
        return spent_s

    def _next_job(self, now_s: float) -> _Job | None:
        drops_hopeless = self._strategy is not Strategy.KERNEL_ONLY
        for queue in self._queues.values():
            while queue:
                job = queue.popleft()
                ends_s = now_s + job.left_s / self._model.clock
                if not (drops_hopeless and ends_s > job.arrived_s + job.load.deadline_s):
                    return job
        return None

    def _finish_job(self, job: _Job, now_s: float) -> None:
        if now_s <= job.arrived_s + job.load.deadline_s:
            self.outcome.on_time[job.load.priority] += 1
        else:
            self.outcome.late += 1


def simulate(scenario: Scenario, strategy: Strategy, *, seed: int = 1) -> SimulationResult:
    """Run one strategy in one scenario. The same seed gives the same noise and arrivals."""
    return _SimulationRun(scenario, strategy, seed).run()


if __name__ == "__main__":
    for each in Strategy:
        told = simulate(SCENARIOS[sys.argv[1]], each)
        parts = ", ".join(f"{item.name.lower()} {told.on_time_part(item):.1%}" for item in PriorityClass)
        print(f"{each.value}: {told.hottest_c:.1f} C, throttled {told.throttled_part:.0%}; in time: {parts}")
