"""Overlap or replace: whether the old version waits for the new one, or makes room for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind
from edge_server.core.version_lifecycle import DesiredModel, ReloadPolicy
from edge_server.errors import LoadError, NotReady
from tests.kit.eventually import eventually

REPLACE = {"reload_policy": "replace"}


def note_order(core: Any) -> list[str]:
    order: list[str] = []
    core.script.on_open = lambda job: order.append(f"open {job.file.version}")
    core.script.on_close = lambda name: order.append("close")
    return order


def test_a_new_version_is_loaded_beside_the_old_one_unless_the_model_says_otherwise(core: Any) -> None:
    order = note_order(core)
    core.load(core.spec(), 1)
    core.load(core.spec(), 2)
    assert eventually(lambda: order == ["open 1", "open 2", "close"])


@pytest.mark.parametrize("place", ["model", "server"])
def test_with_replace_the_old_is_closed_before_the_new_is_opened(new_core: Any, place: str) -> None:
    is_own = place == "model"
    core = new_core(reload_policy=ReloadPolicy.OVERLAP if is_own else ReloadPolicy.REPLACE)
    spec = core.spec(parameters=REPLACE if is_own else {})
    order = note_order(core)
    core.load(spec, 1)
    core.load(spec, 2)
    assert order == ["open 1", "close", "open 2"]
    core.load(spec, 2, mark="changed")
    assert order[3:] == ["close", "open 2"]


def test_a_model_may_overlap_where_the_server_replaces(new_core: Any) -> None:
    core = new_core(reload_policy=ReloadPolicy.REPLACE)
    order = note_order(core)
    spec = core.spec(parameters={"reload_policy": "overlap"})
    core.load(spec, 1)
    core.load(spec, 2)
    assert order[:2] == ["open 1", "open 2"]


def test_requests_are_refused_in_between_and_asked_to_retry(core: Any) -> None:
    spec = core.spec(parameters=REPLACE)
    core.load(spec, 1)
    blocker = core.block_loads()
    core.set_desired(spec, mark="b")
    blocker.wait_blocked()
    for version in (None, 1):
        with pytest.raises(NotReady) as caught:
            core.submit(version=version)
        assert caught.value.retry_after_s == 1.0
    blocker.release()
    assert core.table.wait_settled(["m"], 20)
    assert core.submit(1.0)[1].final().error is None


def test_the_request_in_flight_is_answered_before_its_version_goes(core: Any, blocker: Any) -> None:
    spec = core.spec(parameters=REPLACE)
    core.load(spec)
    _, mailbox = core.submit(3.0)
    blocker.wait_blocked()
    core.set_desired(spec, mark="b")
    blocker.release(1)
    assert mailbox.final().error is None
    assert core.table.wait_settled(["m"], 20)
    assert core.router.route("m", None).fingerprint == "b"


def test_a_configuration_that_cannot_be_read_leaves_even_a_replaced_model_serving(core: Any) -> None:
    old = core.load(core.spec(parameters=REPLACE))
    core.set_desired(core.spec(parameters={"reload_policy": "perhaps"}), mark="b")
    assert core.table.wait_settled(["m"], 20)
    assert "reload_policy must be overlap or replace, got 'perhaps'" in core.router.failure("m")
    assert core.router.route("m", None) is old


def test_the_price_of_replace_is_that_a_file_that_does_not_load_serves_nothing(core: Any) -> None:
    spec = core.spec(parameters=REPLACE)
    core.load(spec)

    def fail(job: Any) -> None:
        raise LoadError("bad file")

    core.script.on_open = fail
    core.set_desired(spec, mark="b")
    assert core.table.wait_settled(["m"], 20)
    assert core.router.ready_versions("m") == []
    assert [(entry.state, entry.reason) for entry in core.router.index()] == [("UNAVAILABLE", "bad file")]


def test_a_version_removed_while_the_old_one_drains_is_not_loaded(core: Any, blocker: Any) -> None:
    spec = core.spec(parameters=REPLACE)
    core.load(spec)
    core.submit(1.0)
    blocker.wait_blocked()
    core.set_desired(spec, mark="b")
    assert eventually(lambda: core.router.ready_versions("m") == [])
    core.table.set_desired(DesiredModel("m"))
    blocker.release(1)
    assert core.table.wait_settled(["m"], 20)
    assert len(core.script.opened) == 1


def test_a_model_that_waits_for_a_drain_does_not_keep_others_from_loading(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(), new_blocker()
    spec = core.spec(parameters=REPLACE)
    core.load(spec)
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        blocker.block()
        return plain(name, inputs)

    core.script.on_run = run
    core.submit(1.0)
    blocker.wait_blocked()
    core.models.reconciler._loads._free.acquire()  # one slot is left
    core.set_desired(spec, mark="b")
    core.load(core.spec("other"))
    core.models.reconciler._loads._free.release()
    blocker.release(9)
    assert core.table.wait_settled(["m"], 20)


def test_each_answer_comes_from_one_generation_and_names_its_version(core: Any) -> None:
    stop = threading.Event()
    wrong: list[Any] = []
    core.load(core.spec(instances=2), 1)

    def work() -> None:
        last = 0
        while not stop.is_set():
            answer = core.submit(1.0, rows=3)[1].final()
            values = {float(value) for value in answer.outputs[0].array[:, 0]} if answer.error is None else set()
            if len(values) != 1 or answer.version != max(values) or answer.version < last:
                wrong.append((answer, values))
            last = answer.version

    def run(name: str, inputs: Any) -> Any:
        number = int(name.split("_")[0].removeprefix("g"))
        return {"OUT": inputs["IN"] * number}

    def spec_of(number: int) -> Any:
        return core.spec(instance_groups=(InstanceGroup(f"g{number}", InstanceKind.CPU, 2),))

    core.script.on_run = run
    core.load(spec_of(1), 1, mark="1")
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(2, 30):
        core.load(spec_of(number), number, mark=str(number))
    stop.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    (generation,) = [report.generation for report in core.router.versions("m") if report.state == "READY"]
    assert generation == 30
