"""The loop of the governor: look at the box, decide, let it hold, tell the difference. Once or a few times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_server.core.model_statistics import VersionStatistics
from edge_server.governor.admission_control import GovernorGate
from edge_server.governor.clock_cap import ClockCap, NoClockCap
from edge_server.governor.control_policy import ControlPolicy, PolicyDecision
from edge_server.governor.energy_model import EnergyLearner, InferenceCost, measured_j
from edge_server.governor.policy_inputs import PolicyInputReader
from edge_server.governor.readings import BoxReading, Gpu
from edge_server.governor.state_events import PublishEvent, StateEvents
from edge_server.governor.variant_selector import Chosen, VariantSelector
from edge_server.governor.work_meter import CompletedWork, CompletedWorkMeter, ComputeCapacity

_log = logging.getLogger(__name__)

MOST_COSTS = 512
"""Models and batch sizes whose energy is remembered; beyond, what is not loaded any more is forgotten."""

_END_PATIENCE_S = 3.0


def _nothing(*_: object, **__: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """What the loop asks of the server, and tells it. Called on the loop's thread; all return at once.

    `refused_frames`: counts of frames that the gate refused, by model. `pairs`: models with the lighter one that each
    names. `use_variants` is told when other models stand in than before, None when there are none. `look_again` is
    called when more may run than before. `lose_gpu` is told once of each GPU that fell off the bus or needs a reset.
    """

    statistics: Callable[[], Sequence[VersionStatistics]] = tuple
    refused_frames: Callable[[], Mapping[str, int]] = dict
    pairs: Callable[[], Mapping[str, str]] = dict
    use_variants: Callable[[Chosen | None], None] = _nothing
    look_again: Callable[[], None] = _nothing
    announce: PublishEvent = _nothing
    lose_gpu: Callable[[Gpu], None] = _nothing


@dataclass(frozen=True, slots=True)
class GovernorSnapshot:
    """What the last look came to. Never changed once published.

    `energy_j` is what the box used since the start as far as it could be measured, `gpu_energy_j` that of each GPU with
    a counter of its own, by key. `over_current` counts alarms since the start, by the name of their counter.
    """

    reading: BoxReading
    decision: PolicyDecision = field(default_factory=PolicyDecision)
    steers_by: str = ""
    capacity: float = 1.0
    busy_share: float = 0.0
    in_force: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[tuple[str, int], InferenceCost] = field(default_factory=dict)
    energy_j: float | None = None
    gpu_energy_j: Mapping[str, float] = field(default_factory=dict)
    over_current: Mapping[str, int] = field(default_factory=dict)
    clock_cap_hz: int | None = None
    clock_problem: str = ""

    @classmethod
    def empty(cls, at_s: float = 0.0) -> GovernorSnapshot:
        """Return what holds before the first look."""
        return cls(BoxReading(at_s, missing={"sensors": "the box was not looked at yet"}))


class SensorReader(Protocol):
    """Where readings come from."""

    def look(self) -> BoxReading:
        """Return what the box feels now."""

    def close(self) -> None:
        """End what reads."""


class GovernorLoop:
    """Runs `step` on a daemon thread between `start` and `close`. `latest` may be read by any thread."""

    def __init__(
        self,
        looker: SensorReader,
        law: ControlPolicy,
        gate: GovernorGate,
        side: ServerCallbacks,
        *,
        interval_s: float = 0.5,
        clock_cap: ClockCap | None = None,
        stand_ins: VariantSelector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = GovernorSnapshot.empty(clock())
        self.turned_s = clock()
        """When the loop last came round, whatever came of its turn; of `clock`."""
        self._looker = looker
        self._law = law
        self._gate = gate
        self._side = side
        self._interval_s = interval_s
        self._clock_cap = clock_cap or NoClockCap()
        self._clock = clock
        self._observer = PolicyInputReader()
        self._work = CompletedWorkMeter()
        self._capacity = ComputeCapacity()
        self._learner = EnergyLearner()
        self._stand_ins = stand_ins or VariantSelector()
        self._news = StateEvents(side.announce)
        self._totals = _Totals()
        self._lost_gpus: set[str] = set()
        self._then_s: float | None = None
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._live, name="edge-governor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and give back what was taken: the clock is let go. May be called again."""
        self._stop.set()
        self._looker.close()
        if self._thread is not None:
            self._thread.join(_END_PATIENCE_S)
        self._clock_cap.close()

    def step(self) -> PolicyDecision:
        """Look once, and let what follows hold."""
        reading = self._looker.look()
        now_s = self._clock()
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        seen = self._observer.observe(reading, is_capped_by_us=self._clock_cap.cap_hz is not None)
        decision = self._law.step(seen, now_s)
        # First of all the law: what follows only measures, and tells.
        work = self._work.feel(self._side.statistics(), self._side.refused_frames())
        before = self._gate.decision
        capacity = self._capacity.feel(work.busy_s, dt_s, is_held_back=before.share < 1.0)
        self._gate.apply(decision, capacity)
        if _allows_more(before, decision):
            self._side.look_again()
        self._switch(work, decision, capacity, dt_s, now_s)
        self._clock_cap.step(decision, now_s)
        self._news.tell_clock_cap(self._clock_cap.cap_hz)
        self._publish(reading, decision, work, capacity, dt_s)
        self._news.tell_state(decision, now_s)
        for gpu in reading.gpus:
            if gpu.is_lost and gpu.key not in self._lost_gpus:
                self._lost_gpus.add(gpu.key)
                self._side.lose_gpu(gpu)
        return decision

    def _live(self) -> None:
        due_s = self._clock()
        while not self._stop.is_set():
            try:
                self.step()
                self._problem = ""
            except Exception as error:  # noqa: BLE001 - the loop goes on: without it the last decision would hold for ever
                self._complain(error)
            self.turned_s = self._clock()
            due_s = max(due_s + self._interval_s, self.turned_s)
            self._stop.wait(due_s - self._clock())

    def _complain(self, error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            _log.exception("the governor could not take its turn")
        self._problem = problem

    def _switch(
        self, work: CompletedWork, decision: PolicyDecision, capacity: float, dt_s: float, now_s: float
    ) -> None:
        before = self._stand_ins.in_force
        after = self._stand_ins.step(self._side.pairs(), work, decision, capacity, dt_s, now_s)
        if after != before:
            self._side.use_variants(Chosen(after) if after else None)
            self._news.tell_variants(after, decision)

    def _publish(
        self, reading: BoxReading, decision: PolicyDecision, work: CompletedWork, capacity: float, dt_s: float
    ) -> None:
        before = self.latest
        energy_j = measured_j(before.reading, reading)
        if dt_s > 0:
            self._learner.learn(energy_j, dt_s, work.batches)
        self._forget_gone(work)
        self._totals.feel(reading, energy_j)
        self.latest = GovernorSnapshot(
            reading,
            decision,
            self._observer.steers_by,
            capacity,
            work.busy_s / dt_s if dt_s > 0 else 0.0,
            self._stand_ins.in_force,
            self._learner.costs(),
            self._totals.energy_j,
            dict(self._totals.gpu_energy_j),
            dict(self._totals.over_current),
            self._clock_cap.cap_hz,
            self._clock_cap.problem,
        )

    def _forget_gone(self, work: CompletedWork) -> None:
        known = self.latest.costs
        if len(known) > MOST_COSTS:
            for name in {model for model, _ in known} - work.models.keys():
                self._learner.forget(name)


@dataclass(slots=True)
class _Totals:
    """Sums since the start. Counters of the box begin at its boot: what they held at the first look is taken off."""

    energy_j: float | None = None
    gpu_energy_j: dict[str, float] = field(default_factory=dict)
    over_current: dict[str, int] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)

    def feel(self, reading: BoxReading, energy_j: float | None) -> None:
        if energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + energy_j
        for counter in reading.energy:
            grown_mj = self._grown(f"energy {counter.name}", counter.energy_mj)
            self.gpu_energy_j[counter.name] = self.gpu_energy_j.get(counter.name, 0.0) + grown_mj / 1000
        for alarm in reading.over_current:
            grown = self._grown(f"alarm {alarm.name}", alarm.count)
            self.over_current[alarm.name] = self.over_current.get(alarm.name, 0) + grown

    def _grown(self, name: str, count: int) -> int:
        before, self._known[name] = self._known.get(name), count
        if before is None:
            return 0
        return count - before if count >= before else count


def _allows_more(before: PolicyDecision, after: PolicyDecision) -> bool:
    return (
        after.share > before.share
        or (before.sheds_bulk and not after.sheds_bulk)
        or (before.only_control and not after.only_control)
    )
