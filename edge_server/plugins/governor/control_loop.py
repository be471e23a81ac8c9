"""Control loop of the governor: reads the sensors, decides, applies the decision and publishes changes, several times
a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple, Protocol

from edge_server.core.model_statistics import VersionWork
from edge_server.plugins.governor.clock_cap import ClockCap
from edge_server.plugins.governor.control_policy import ControlPolicy, PolicyDecision
from edge_server.plugins.governor.energy_model import EnergyModel, InferenceCost, WorkKey, measured_j
from edge_server.plugins.governor.governor_admission import GovernorAdmission
from edge_server.plugins.governor.policy_inputs import PolicyInputReader
from edge_server.plugins.governor.readings import Gpu, MachineReading
from edge_server.plugins.governor.state_events import StateEvents
from edge_server.plugins.governor.variant_selector import ActiveVariants, VariantSelector
from edge_server.plugins.governor.work_meter import CompletedWork, CompletedWorkMeter, ComputeCapacity, TokenWork
from edge_server.record import record
from edge_server.telemetry.event_bus import PublishEvent

_log = logging.getLogger(__name__)

MAX_COSTS = 512
"""Most models and batch sizes with a known energy cost. Above this, models that are not loaded any more are dropped."""

_STOP_TIMEOUT_S = 3.0


def _do_nothing(*_: object, **__: object) -> None:
    pass


class ServerCallbacks(NamedTuple):
    """Functions of the server that the loop calls on its thread. All return at once.

    `work` returns the work of all serving versions, `token_work` that of language models. `refused_frames` returns the
    number of frames that the governor rejected, by model. `variant_pairs` returns the lighter variant of each model
    that has one. `use_variants` gets the active variants after each change, None if there are none. `resume` is called
    when more work may run than before. `gpu_lost` is called once for each GPU that fell off the bus or needs a reset.
    """

    work: Callable[[], Sequence[VersionWork]] = tuple
    token_work: Callable[[], TokenWork] = dict
    refused_frames: Callable[[], Mapping[str, int]] = dict
    variant_pairs: Callable[[], Mapping[str, str]] = dict
    use_variants: Callable[[ActiveVariants | None], None] = _do_nothing
    resume: Callable[[], None] = _do_nothing
    publish: PublishEvent = _do_nothing
    gpu_lost: Callable[[Gpu], None] = _do_nothing


@record(frozen=True, slots=True)
class GovernorSnapshot:
    """Result of the last step of the loop. Immutable.

    `energy_j` is the measured energy of the machine since the start. `gpu_energy_j` is that of each GPU with an energy
    counter, by key. `over_current` counts alarms since the start, by the name of the counter. `control_zone` is the
    zone whose temperature is controlled. `control_share` is the part of full work that control keeps.
    """

    reading: MachineReading
    decision: PolicyDecision = field(default_factory=PolicyDecision)
    control_zone: str = ""
    capacity: float = 1.0
    control_share: float = 0.0
    busy_share: float = 0.0
    active_variants: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[WorkKey, InferenceCost] = field(default_factory=dict)
    energy_j: float | None = None
    gpu_energy_j: Mapping[str, float] = field(default_factory=dict)
    over_current: Mapping[str, int] = field(default_factory=dict)
    clock_cap_hz: int | None = None
    clock_problem: str = ""

    @classmethod
    def empty(cls, at_s: float = 0.0) -> GovernorSnapshot:
        """Return the snapshot before the first step."""
        return cls(MachineReading(at_s, missing={"sensors": "the sensors were not read yet"}))


class SensorReader(Protocol):
    """Source of readings for the loop."""

    def sample(self) -> MachineReading:
        """Return the current sensor readings."""

    def close(self) -> None:
        """Stop reading."""


class GovernorLoop:
    """Calls `step` on a daemon thread between `start` and `close`. Any thread may read `latest`."""

    def __init__(
        self,
        sensors: SensorReader,
        policy: ControlPolicy,
        admission: GovernorAdmission,
        server: ServerCallbacks,
        *,
        interval_s: float = 0.5,
        clock_cap: ClockCap | None = None,
        variants: VariantSelector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.latest = GovernorSnapshot.empty(clock())
        self.last_step_s = clock()
        """Time of `clock` at which the last step ended, with or without an error."""
        self._sensors = sensors
        self._policy = policy
        self._admission = admission
        self._server = server
        self._interval_s = interval_s
        self._clock_cap = clock_cap
        self._clock = clock
        self._inputs = PolicyInputReader()
        self._work = CompletedWorkMeter()
        self._capacity = ComputeCapacity()
        self._energy = EnergyModel()
        self._variants = variants or VariantSelector()
        self._events = StateEvents(server.publish)
        self._totals = _Totals()
        self._lost_gpus: set[str] = set()
        self._then_s: float | None = None
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="edge-governor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and remove the clock cap. May be called again."""
        self._stop.set()
        self._sensors.close()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        if self._clock_cap is not None:
            self._clock_cap.close()

    def step(self) -> PolicyDecision:
        """Read the sensors once, decide, and apply the decision."""
        reading = self._sensors.sample()
        now_s = self._clock()
        dt_s = 0.0 if self._then_s is None else max(0.0, now_s - self._then_s)
        self._then_s = now_s
        cap = self._clock_cap
        decision = self._policy.step(
            self._inputs.reduce(reading, is_capped_by_us=cap is not None and cap.cap_hz is not None), now_s
        )
        # The decision is made first. Everything after it only applies it, measures and reports.
        server = self._server
        work = self._work.update(server.work(), server.refused_frames(), server.token_work())
        before = self._admission.decision
        capacity = self._capacity.update(work.busy_s, dt_s, is_held_back=before.share < 1.0)
        self._admission.apply(decision, capacity)
        if (
            decision.share > before.share
            or (before.sheds_bulk and not decision.sheds_bulk)
            or (before.only_control and not decision.only_control)
        ):
            self._server.resume()
        variants_before = self._variants.active
        active = self._variants.step(self._server.variant_pairs(), work, decision, capacity, dt_s, now_s)
        if active != variants_before:
            self._server.use_variants(ActiveVariants(active) if active else None)
            self._events.report_variants(active, decision)
        if cap is not None:
            cap.step(decision, now_s)
            self._events.report_clock_cap(cap.cap_hz)
        self._publish_snapshot(reading, decision, work, capacity, dt_s)
        self._events.report_state(decision, now_s)
        for gpu in reading.gpus:
            if gpu.is_lost and gpu.key not in self._lost_gpus:
                self._lost_gpus.add(gpu.key)
                self._server.gpu_lost(gpu)
        return decision

    def _run(self) -> None:
        due_s = self._clock()
        while not self._stop.is_set():
            try:
                self.step()
                self._problem = ""
            except Exception as error:  # noqa: BLE001 - the loop continues: else the last decision would stay for ever
                problem = f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    _log.exception("the governor's control step failed; it is tried again")
                self._problem = problem
            self.last_step_s = self._clock()
            due_s = max(due_s + self._interval_s, self.last_step_s)
            self._stop.wait(due_s - self._clock())

    def _publish_snapshot(
        self, reading: MachineReading, decision: PolicyDecision, work: CompletedWork, capacity: float, dt_s: float
    ) -> None:
        before = self.latest
        energy_j = measured_j(before.reading, reading)
        if dt_s > 0:
            self._energy.learn(energy_j, dt_s, work.batches)
        if len(before.costs) > MAX_COSTS:
            for name in {model for model, _ in before.costs} - work.models.keys():
                self._energy.forget(name)
        self._totals.update(reading, energy_j)
        cap = self._clock_cap
        self.latest = GovernorSnapshot(
            reading,
            decision,
            self._inputs.control_zone,
            capacity,
            self._admission.control_share,
            work.busy_s / dt_s if dt_s > 0 else 0.0,
            self._variants.active,
            self._energy.costs(),
            self._totals.energy_j,
            dict(self._totals.gpu_energy_j),
            dict(self._totals.over_current),
            None if cap is None else cap.cap_hz,
            "" if cap is None else cap.problem,
        )


@record(slots=True)
class _Totals:
    """Sums since the start. The machine's counters begin at boot, so their first value is subtracted."""

    energy_j: float | None = None
    gpu_energy_j: dict[str, float] = field(default_factory=dict)
    over_current: dict[str, int] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)

    def update(self, reading: MachineReading, energy_j: float | None) -> None:
        """Add the growth of all counters since the last reading."""
        if energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + energy_j
        for counter in reading.energy:
            grown_mj = self._growth(f"energy {counter.name}", counter.energy_mj)
            self.gpu_energy_j[counter.name] = self.gpu_energy_j.get(counter.name, 0.0) + grown_mj / 1000
        for alarm in reading.over_current:
            grown = self._growth(f"alarm {alarm.name}", alarm.count)
            self.over_current[alarm.name] = self.over_current.get(alarm.name, 0) + grown

    def _growth(self, name: str, count: int) -> int:
        before, self._known[name] = self._known.get(name), count
        if before is None:
            return 0
        return count - before if count >= before else count
