"""The decisions of the model table, step by step: no reconciler and no thread carries out its actions here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind, ModelFile, ModelSpec
from edge_server.core.status_reports import VersionReport
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion, Resolved, VersionSnapshot, VersionState
from edge_server.errors import LoadError, OutOfMemory
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.model_table import Load, ModelTable, PublishEvents, Unload
from edge_server.serving.timer import Alarm
from edge_server.telemetry.event_bus import EventQueue


class StubTimer:
    """A timer that never calls."""

    def call_at(self, when_ns: int, call: Callable[[], None]) -> Alarm:
        return Alarm(when_ns, call)


class StubVersion:
    """A version that serves, without a runtime."""

    in_flight = 0
    last_used_ns = 0
    reason = ""

    def __init__(self, load: Load, spec: ModelSpec) -> None:
        self.name, self.version, self.generation = load.name, load.action.version, load.generation
        self.fingerprint, self.spec = load.action.fingerprint, spec
        self.state = VersionState.READY

    def stop_accepting(self) -> None:
        self.state = VersionState.DRAINING

    def stop_for_good(self, reason: str) -> None:
        self.state, self.reason = VersionState.FAILED, reason

    def snapshot(self) -> VersionSnapshot:
        return VersionSnapshot(self.version, self.generation, self.fingerprint, self.state)

    def version_report(self, share: float, reason: str = "") -> VersionReport:
        return VersionReport(self.name, self.version, self.generation, self.state.name, 0.0, 0, reason, share)


class Steps:
    """A table, and what a reconciler would do to it, one step at a time."""

    def __init__(self) -> None:
        self.without_fallback: list[str] = []
        self.events: list[str] = []
        events = EventQueue(lambda kind, /, **fields: self.events.append(kind.removeprefix("model.")))
        self.table = ModelTable(
            StubTimer(),  # type: ignore[arg-type]
            LifecycleSettings(),
            events,
            Gpus(),
            self.without_fallback.append,
        )

    def want(self, *versions: int, mark: str = "a", name: str = "m") -> None:
        self.table.set_desired(DesiredModel(name, {number: desired(name, number, mark) for number in versions}))

    def take(self, kind: type) -> Any:
        action = self.table.next_action()
        assert type(action) is kind
        return action

    def load(self, *, on_gpu: bool = False) -> StubVersion:
        """Carry out the next action, a load."""
        load = self.take(Load)
        assert self.table.begin(load) is not None
        version = StubVersion(load, stub_spec(load.name, on_gpu))
        self.table.finish(load, version)  # type: ignore[arg-type]
        return version

    def index(self, name: str = "m") -> dict[int, tuple[str, str]]:
        with self.table.reading() as models:
            return models[name].index_rows()

    def routes(self, name: str = "m") -> list[Any]:
        routes = self.table.routes.get(name)
        return [] if routes is None else list(routes.ready.values())


def stub_spec(name: str, on_gpu: bool = False) -> ModelSpec:
    kind, gpus = (InstanceKind.GPU, (0,)) if on_gpu else (InstanceKind.CPU, ())
    groups = (InstanceGroup(name, kind, 1, gpus),)
    return ModelSpec(name, "stub", "", max_batch_size=0, inputs=(), outputs=(), instance_groups=groups)


def desired(name: str, version: int, mark: str) -> DesiredVersion:
    file = ModelFile(Path("/nowhere"), Path("/nowhere"), version)
    return DesiredVersion(mark, lambda passed_over: Resolved(stub_spec(name), file))


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_decided_load_shows_before_anybody_carries_it_out(steps: Steps) -> None:
    steps.want(1)
    assert steps.index() == {1: ("LOADING", "")}
    assert not steps.table.wait_settled(timeout_s=0)
    version = steps.load()
    assert steps.index() == {1: ("READY", "")}
    assert steps.routes() == [version]
    assert steps.table.next_action() is None
    assert steps.table.wait_settled(timeout_s=0)


def test_a_version_leaves_the_routes_in_the_step_that_retires_it(steps: Steps) -> None:
    steps.want(1)
    old = steps.load()
    steps.want(1, mark="b")
    assert steps.routes() == [old]
    new = steps.load()
    assert (steps.routes(), old.state) == ([new], VersionState.DRAINING)
    unload = steps.take(Unload)
    assert unload.version is old
    assert steps.table.loaded_versions() == [old, new]
    steps.table.finish(unload)
    assert steps.table.loaded_versions() == [new]
    assert steps.events == ["loading", "ready", "loading", "ready", "draining", "unloaded"]


def test_a_load_that_is_no_longer_desired_is_not_begun(steps: Steps) -> None:
    steps.want(1)
    late = steps.take(Load)
    steps.want(1, mark="b")
    assert steps.table.next_action() is None, "one load at a time"
    assert steps.table.begin(late) is None
    steps.table.finish(late)
    assert steps.load().fingerprint == "b"
    assert steps.events == ["loading", "ready"]


def test_a_failed_load_leaves_the_old_version_in_its_place(steps: Steps) -> None:
    steps.want(1)
    old = steps.load()
    steps.want(1, mark="b")
    steps.table.finish(steps.take(Load), LoadError("it is broken"))
    assert steps.table.next_action() is None
    assert steps.routes() == [old]
    assert steps.index()[1][0] == "READY"
    assert "it is broken" in steps.index()[1][1]


def test_a_load_without_memory_is_tried_again_when_another_model_is_unloaded(steps: Steps) -> None:
    steps.want(1, name="other")
    other = steps.load()
    steps.want(1)
    steps.table.finish(steps.take(Load), OutOfMemory("too large"))
    assert steps.table.next_action() is None
    steps.want(name="other")
    unload = steps.take(Unload)
    assert unload.version is other
    steps.table.finish(unload)
    assert steps.take(Load).name == "m"


def test_a_version_that_was_closed_is_unloaded_in_the_index_before_its_unload_is_finished(steps: Steps) -> None:
    steps.want(1)
    version = steps.load()
    steps.want()
    unload = steps.take(Unload)
    version.state = VersionState.RETIRED
    assert steps.index() == {1: ("UNAVAILABLE", "unloaded")}
    steps.table.finish(unload)
    assert steps.index() == {1: ("UNAVAILABLE", "unloaded")}


def test_the_versions_of_a_lost_gpu_are_closed_apart_and_loaded_again(steps: Steps) -> None:
    steps.want(1)
    lost = steps.load(on_gpu=True)
    steps.table.mark_gpu_lost(0, "fell off the bus")
    assert (steps.routes(), lost.state) == ([], VersionState.FAILED)
    unload = steps.take(Unload)
    assert unload.version is lost
    assert unload.has_failed
    load = steps.take(Load)
    steps.take(PublishEvents)
    steps.table.finish(load, LoadError("needs a GPU"))
    assert steps.without_fallback == ["model 'm' version 1: needs a GPU"]


def test_after_close_everything_is_unloaded_and_nothing_begins(steps: Steps) -> None:
    steps.want(1)
    version = steps.load()
    steps.want(1, 2)
    load = steps.take(Load)
    assert steps.table.close() == []
    assert steps.take(Unload).version is version
    assert steps.table.begin(load) is None
    steps.table.finish(load)
    steps.table.set_desired_state([])
    assert steps.table.next_action() is None


def test_actions_are_announced_without_the_lock(steps: Steps) -> None:
    is_free: list[bool] = []

    def look() -> None:
        thread = threading.Thread(target=steps.table.loaded_versions)
        thread.start()
        thread.join(20)
        is_free.append(not thread.is_alive())

    steps.table.on_actions = look
    steps.want(1)
    steps.load()
    steps.table.mark_gpu_lost(0, "fell off the bus")
    assert len(is_free) == 3
    assert all(is_free)
