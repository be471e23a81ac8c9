"""Control loop of the governor, step by step, with a manual clock and scripted sensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_server.core.metric_family import MetricFamilyView, MetricSample
from edge_server.core.model_spec import ModelFile
from edge_server.core.model_statistics import VersionWork
from edge_server.plugins.governor.control_loop import GovernorLoop, ServerCallbacks
from edge_server.plugins.governor.control_policy import Cause, ControlPolicy, PolicyDecision, ThermalLevel
from edge_server.plugins.governor.energy_model import ModelWorkload
from edge_server.plugins.governor.governor_admission import GovernorAdmission
from edge_server.plugins.governor.model_load_throttle import LoadThrottle
from edge_server.plugins.governor.readings import (
    CriticalTemperature,
    EnergyCounter,
    MachineReading,
    MemoryState,
    Rail,
    TripPoints,
    Zone,
)
from edge_server.plugins.governor.sensor_thread import SensorThread
from edge_server.plugins.governor.variant_selector import ActiveVariants, VariantSelector
from edge_server.plugins.governor.work_meter import (
    CompletedWork,
    CompletedWorkMeter,
    ComputeCapacity,
    ModelWork,
    token_work,
)
from tests.kit.eventually import eventually

STEP_S = 0.5


def reading(
    at_s: float, temperature_c: float | None = 60.0, power_w: float | None = 10.0, **more: Any
) -> MachineReading:
    zone = Zone("tj", temperature_c, TripPoints(99.0, None, 104.5))
    heat = (
        None if temperature_c is None else CriticalTemperature("tj", temperature_c, 99.0 - temperature_c, 99.0, 104.5)
    )
    power_mw = None if power_w is None else round(power_w * 1000)
    rails = (Rail("VDD_IN", power_mw, True),)
    return MachineReading(at_s, zones=(zone,), heat=heat, rails=rails, power_mw=power_mw, **more)


@dataclass
class Machine:
    """A machine, its clock, and a server beside it."""

    now_s: float = 100.0
    temperature_c: float | None = 60.0
    power_w: float | None = 10.0
    more: dict[str, Any] = field(default_factory=dict)
    versions: list[VersionWork] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    chosen: list[ActiveVariants | None] = field(default_factory=list)
    resume_count: int = 0

    def __post_init__(self) -> None:
        self.admission = GovernorAdmission(clock=lambda: self.now_s)
        server = ServerCallbacks(
            work=lambda: self.versions,
            refused_frames=lambda: dict(self.refused),
            variant_pairs=lambda: self.pairs,
            use_variants=self.chosen.append,
            resume=self._resume,
            publish=lambda kind, /, **fields: self.events.append((kind, fields)),
        )
        self.sampler = GovernorLoop(
            self, ControlPolicy(), self.admission, server, interval_s=STEP_S, clock=lambda: self.now_s
        )

    def sample(self) -> MachineReading:
        return reading(self.now_s, self.temperature_c, self.power_w, **self.more)

    def close(self) -> None:
        pass

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> PolicyDecision:
        decision = self.admission.decision
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            each()
            decision = self.sampler.step()
        return decision

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def _resume(self) -> None:
        self.resume_count += 1


@pytest.fixture
def machine() -> Machine:
    return Machine()


def work(name: str, executions: int, seconds: float, size: int = 1, refused: int = 0) -> VersionWork:
    return VersionWork(name, 1, {size: (executions, round(seconds * 1e9))}, refused)


# -- state and events


def test_a_cool_machine_limits_nothing_and_reports_nothing(machine: Machine) -> None:
    decision = machine.run(10)
    assert (decision.level, decision.share, machine.admission.is_open) == (ThermalLevel.NORMAL, 1.0, True)
    assert (machine.events, machine.resume_count) == ([], 0)


def test_a_hot_machine_sheds_load_and_reports_each_change_once(machine: Machine) -> None:
    machine.run(5)
    machine.temperature_c = 98.0
    assert machine.run(5).level is ThermalLevel.HOT
    assert not machine.admission.is_open
    states = [fields["level"] for kind, fields in machine.events if kind == "governor.state"]
    assert states[-1] == "HOT"
    assert len(states) == len(set(states))
    told = len(machine.events)
    machine.run(20)
    assert len(machine.events) == told


def test_limited_models_are_scheduled_again_when_more_may_run(machine: Machine) -> None:
    machine.temperature_c = 98.0
    machine.run(10)
    assert machine.resume_count == 0
    machine.temperature_c = 70.0
    machine.run(10)
    assert machine.resume_count > 5


def test_a_silent_sensor_is_lost_after_five_seconds_and_its_return_is_reported(machine: Machine) -> None:
    machine.run(10)
    machine.temperature_c = None
    machine.more = {"silent": frozenset({"zone tj"})}
    decision = machine.run(4.5)
    assert decision.share < 1.0
    assert Cause.SENSOR_LOST in decision.causes
    assert machine.kinds().count("governor.sensor_lost") == len(decision.lost)
    machine.run(10)
    assert machine.admission.allowed_fraction == pytest.approx(0.5)
    machine.temperature_c, machine.more = 60.0, {}
    decision = machine.run(60)
    assert (decision.lost, decision.share) == (frozenset(), 1.0)
    assert machine.kinds().count("governor.sensor_back") == machine.kinds().count("governor.sensor_lost")


def test_memory_pressure_refuses_bulk_work_only(machine: Machine) -> None:
    machine.more = {"memory": MemoryState(some_percent=80.0)}
    decision = machine.run(5)
    assert (decision.sheds_bulk, decision.share, machine.admission.is_open) == (True, 1.0, False)
    assert machine.admission.refuse_frame("m", 3) is not None
    assert machine.admission.refuse_frame("m", 1) is None


# -- work, capacity, energy


def test_work_is_the_increase_of_the_counters() -> None:
    watch = CompletedWorkMeter()
    assert watch.update([work("a", 10, 1.0)], {"a": 5}).models == {}
    done = watch.update([work("a", 14, 1.5, refused=3)], {"a": 7})
    assert done.models["a"] == ModelWork(pytest.approx(0.5), 4, 5)
    assert done.batches["a", 1].inferences == 4


def tokens(prefill_s: float, prompt: int, decode_s: float, output: int) -> Iterator[MetricFamilyView]:
    """Return the families of a language model."""
    values: dict[str, list[tuple[float, dict[str, str]]]] = {
        "vllm:step_seconds_total": [(prefill_s, {"phase": "prefill"}), (decode_s, {"phase": "decode"})],
        "vllm:prompt_tokens_total": [(prompt, {})],
        "vllm:generation_tokens_total": [(output, {})],
        "vllm:num_requests_running": [(3, {})],
    }
    for name, samples in values.items():
        yield MetricFamilyView(
            name, "counter", "", tuple(MetricSample({"model": "talker", **labels}, value) for value, labels in samples)
        )


def test_work_of_a_language_model_is_counted_in_tokens() -> None:
    watch = CompletedWorkMeter()
    watch.update([work("talker", 1, 1.0), work("a", 1, 1.0)], {}, token_work(tokens(0.5, 100, 1.0, 20)))
    done = watch.update([work("talker", 9, 90.0), work("a", 3, 2.0)], {}, token_work(tokens(0.75, 300, 1.25, 30)))
    assert done.batches == {
        ("a", 1): ModelWorkload(1.0, 2),
        ("talker", "prefill"): ModelWorkload(0.25, 200),
        ("talker", "decode"): ModelWorkload(0.25, 10),
    }
    assert done.models["talker"].busy_s == pytest.approx(0.5)
    again = watch.update([], {}, token_work(tokens(0.1, 10, 0.2, 5)))
    assert again.batches["talker", "decode"] == ModelWorkload(0.2, 5)


def test_a_reload_restarts_its_counts() -> None:
    watch = CompletedWorkMeter()
    watch.update([work("a", 100, 10.0, size=4)], {})
    assert watch.update([work("a", 2, 0.25, size=4)], {}).models["a"] == ModelWork(0.25, 8, 0)


def test_capacity_is_the_recent_maximum_and_kept_while_work_is_limited() -> None:
    capacity = ComputeCapacity()
    assert capacity.update(0.0, 0.5, is_held_back=False) == 1.0
    for _ in range(60):
        most = capacity.update(2.0, 0.5, is_held_back=False)
    assert most == pytest.approx(4.0, rel=0.01)
    for _ in range(600):
        held = capacity.update(0.5, 0.5, is_held_back=True)
    assert held == most
    for _ in range(6000):
        free = capacity.update(0.25, 0.5, is_held_back=False)
    assert free == 1.0


def test_joules_per_inference_are_learned_from_power_and_busy_time(machine: Machine) -> None:
    machine.versions = [work("a", 0, 0.0)]
    machine.power_w = 5.0
    machine.run(120)

    def compute() -> None:
        executions, ns = machine.versions[0].batches[1]
        machine.versions = [work("a", executions + 10, ns / 1e9 + 0.25)]

    machine.power_w = 15.0
    machine.run(600, compute)
    assert machine.sampler.latest.costs["a", 1].joules == pytest.approx(0.5, rel=0.1)
    assert machine.sampler.latest.energy_j == pytest.approx(5 * 120 + 15 * 600, rel=0.02)


def test_energy_counters_are_reported_from_the_start_of_the_server(machine: Machine) -> None:
    machine.more = {"energy": (EnergyCounter("gpu0", 9_000_000, True),)}
    machine.run(1)
    machine.more = {"energy": (EnergyCounter("gpu0", 9_050_000, True),)}
    machine.run(1)
    assert machine.sampler.latest.gpu_energy_j == {"gpu0": 50.0}


# -- variants


def ask(machine: Machine, name: str, served: int, cost_s: float, refused: int) -> Callable[[], None]:
    """Return what lets a model serve, and refuse, so many more in each step."""

    def grow() -> None:
        known = next((item for item in machine.versions if item.name == name), None)
        count = known.batches[1][0] if known else 0
        no = known.rejected_count if known else 0
        new = work(name, count + served, (count + served) * cost_s, refused=no + refused)
        machine.versions = [*(item for item in machine.versions if item.name != name), new]

    return grow


def test_the_lighter_variant_runs_if_a_hot_machine_cannot_do_all_work(machine: Machine) -> None:
    machine.pairs = {"heavy": "light"}
    machine.run(20, ask(machine, "heavy", 9, 0.05, 0))
    assert machine.chosen == []
    machine.temperature_c = 99.5
    machine.run(30, ask(machine, "heavy", 2, 0.05, 7))
    assert [choice and choice.variant_for("heavy") for choice in machine.chosen] == ["light"]
    assert machine.sampler.latest.active_variants == {"heavy": "light"}
    told = [fields for kind, fields in machine.events if kind == "governor.variant"]
    assert [(item["model"], item["variant"]) for item in told] == [("heavy", "light")]


def test_the_heavier_model_returns_once_there_is_room_for_it(machine: Machine) -> None:
    machine.pairs = {"heavy": "light"}
    machine.run(20, ask(machine, "heavy", 9, 0.05, 0))
    machine.temperature_c = 99.5
    machine.run(30, ask(machine, "heavy", 2, 0.05, 7))
    machine.temperature_c = 70.0
    machine.run(1200, ask(machine, "light", 9, 0.02, 0))
    assert [choice and choice.variant_for("heavy") for choice in machine.chosen] == ["light", None]


def test_a_variant_that_does_not_serve_is_not_active() -> None:
    selector = VariantSelector()
    hot = PolicyDecision(ThermalLevel.HOT, share=0.2, set_point_c=95.0, predicted_c=97.0)
    busy = CompletedWork(models={"heavy": ModelWork(0.1, 2, 10)})
    for index in range(40):
        selector.step({"heavy": "light"}, busy, hot, 1.0, STEP_S, index * STEP_S)
    assert selector.active == {"heavy": "light"}
    assert selector.step({}, busy, hot, 1.0, STEP_S, 30.0) == {}


# -- threads


class Switch:
    """Sensors that fail or hang on request."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.reads = 0
        self.is_closed = False

    def read(self, now_s: float) -> MachineReading:
        self.may_answer.wait(30)
        self.reads += 1
        if self.error is not None:
            raise self.error
        return reading(now_s)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sensors() -> Iterator[Switch]:
    switch = Switch()
    yield switch
    switch.may_answer.set()


def test_a_sensor_that_raises_reports_nothing_and_the_loop_continues(sensors: Switch) -> None:
    sensor_thread = SensorThread(sensors)
    sensors.error = RuntimeError("the driver is gone")
    assert "the driver is gone" in sensor_thread.sample().missing["sensors"]
    sensors.error = None
    assert sensor_thread.sample().heat is not None
    sensor_thread.close()
    assert sensors.is_closed


def test_a_sensor_that_hangs_is_not_waited_for(sensors: Switch) -> None:
    sensor_thread = SensorThread(sensors, timeout_s=0.05)
    assert sensor_thread.sample().heat is not None
    sensors.may_answer.clear()
    for _ in range(3):
        assert "do not answer" in sensor_thread.sample().missing["sensors"]
    sensors.may_answer.set()
    assert eventually(lambda: sensor_thread.sample().heat is not None)
    sensor_thread.close()


def test_the_loop_continues_after_any_failure_and_ends_on_close(sensors: Switch) -> None:
    problems = 3

    def no_work() -> list[VersionWork]:
        nonlocal problems
        problems -= 1
        if problems > 0:
            raise ValueError("a bug")
        return []

    gate = GovernorAdmission()
    sampler = GovernorLoop(SensorThread(sensors), ControlPolicy(), gate, ServerCallbacks(work=no_work), interval_s=0.01)
    sampler.start()
    assert eventually(lambda: sampler.latest.decision.temperature_c is not None)
    sampler.close()
    assert sensors.is_closed
    assert not [thread for thread in threading.enumerate() if thread.name in ("edge-governor", "edge-sensors")]


# -- loads


FILE = ModelFile(Path("m/1/model.onnx"), Path("m"), 1)


def test_a_load_waits_until_the_machine_has_cooled() -> None:
    decisions = iter([PolicyDecision(ThermalLevel.HOT, may_load=False)] * 2 + [PolicyDecision()] * 10)
    throttle = LoadThrottle(lambda: next(decisions), 60.0)
    assert throttle.wrap(lambda file, count: None)(FILE, 1) is None


def test_a_load_continues_after_its_maximum_wait() -> None:
    times = iter(range(0, 1000, 30))
    throttle = LoadThrottle(
        lambda: PolicyDecision(ThermalLevel.HOT, may_load=False), 60.0, clock=lambda: float(next(times))
    )
    assert throttle.wrap(lambda file, count: None)(FILE, 1) is None


def test_a_machine_near_shutdown_loads_nothing() -> None:
    throttle = LoadThrottle(lambda: PolicyDecision(ThermalLevel.CRITICAL, may_load=False, detail="102 °C"), 60.0)
    assert throttle.wrap(lambda file, count: None)(FILE, 1) == "the box is CRITICAL: 102 °C"


def test_loads_stop_waiting_for_cooling_when_the_server_stops() -> None:
    throttle = LoadThrottle(lambda: PolicyDecision(ThermalLevel.HOT, may_load=False), 600.0)
    throttle.close()
    assert throttle.wrap(lambda file, count: None)(FILE, 1) == "the server stops"


def test_memory_is_checked_before_and_after_the_wait() -> None:
    decisions = iter([PolicyDecision(ThermalLevel.HOT, may_load=False), PolicyDecision()])
    answers = iter([None, "memory is short"])
    throttle = LoadThrottle(lambda: next(decisions), 60.0)
    assert throttle.wrap(lambda file, count: next(answers))(FILE, 1) == "memory is short"
