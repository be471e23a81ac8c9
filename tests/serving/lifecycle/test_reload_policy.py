"""Overlap or replace: whether the old version waits for the new one, or makes room for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind
from edge_server.core.version_lifecycle import DesiredModel, ReloadPolicy
from edge_server.errors import LoadError, NotReady

REPLACE = {"reload_policy": "replace"}


def note_order(house: Any) -> list[str]:
    order: list[str] = []
    house.script.on_open = lambda job: order.append(f"open {job.file.version}")
    house.script.on_close = lambda name: order.append("close")
    return order


def test_a_new_version_is_loaded_beside_the_old_one_unless_the_model_says_otherwise(
    house: Any, eventually: Any
) -> None:
    order = note_order(house)
    house.load(house.spec(), 1)
    house.load(house.spec(), 2)
    eventually(lambda: order == ["open 1", "open 2", "close"])


@pytest.mark.parametrize("place", ["model", "server"])
def test_with_replace_the_old_is_closed_before_the_new_is_opened(new_house: Any, place: str) -> None:
    is_own = place == "model"
    house = new_house(reload_policy=ReloadPolicy.OVERLAP if is_own else ReloadPolicy.REPLACE)
    spec = house.spec(parameters=REPLACE if is_own else {})
    order = note_order(house)
    house.load(spec, 1)
    house.load(spec, 2)
    assert order == ["open 1", "close", "open 2"]
    house.load(spec, 2, mark="changed")
    assert order[3:] == ["close", "open 2"]


def test_a_model_may_overlap_where_the_server_replaces(new_house: Any) -> None:
    house = new_house(reload_policy=ReloadPolicy.REPLACE)
    order = note_order(house)
    spec = house.spec(parameters={"reload_policy": "overlap"})
    house.load(spec, 1)
    house.load(spec, 2)
    assert order[:2] == ["open 1", "open 2"]


def test_requests_are_refused_in_between_and_asked_to_retry(house: Any, new_gate: Any) -> None:
    spec = house.spec(parameters=REPLACE)
    house.load(spec, 1)
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(spec, mark="b")
    gate.wait_entered()
    for version in (None, 1):
        with pytest.raises(NotReady) as caught:
            house.submit(version=version)
        assert caught.value.retry_after_s == 1.0
    gate.let_go()
    assert house.manager.wait_settled(["m"], 20)
    assert house.submit(1.0)[1].final().error is None


def test_the_request_in_flight_is_answered_before_its_version_goes(house: Any, gate: Any) -> None:
    spec = house.spec(parameters=REPLACE)
    house.load(spec)
    _, mailbox = house.submit(3.0)
    gate.wait_entered()
    house.set_desired(spec, mark="b")
    gate.let_go(1)
    assert mailbox.final().error is None
    assert house.manager.wait_settled(["m"], 20)
    assert house.manager.route("m", None).fingerprint == "b"


def test_a_configuration_that_cannot_be_read_leaves_even_a_replaced_model_serving(house: Any) -> None:
    old = house.load(house.spec(parameters=REPLACE))
    house.set_desired(house.spec(parameters={"reload_policy": "perhaps"}), mark="b")
    assert house.manager.wait_settled(["m"], 20)
    assert "reload_policy must be overlap or replace, got 'perhaps'" in house.manager.failure("m")
    assert house.manager.route("m", None) is old


def test_the_price_of_replace_is_that_a_file_that_does_not_load_serves_nothing(house: Any) -> None:
    spec = house.spec(parameters=REPLACE)
    house.load(spec)

    def fail(job: Any) -> None:
        raise LoadError("bad file")

    house.script.on_open = fail
    house.set_desired(spec, mark="b")
    assert house.manager.wait_settled(["m"], 20)
    assert house.manager.ready_versions("m") == []
    assert [(entry.state, entry.reason) for entry in house.manager.index()] == [("UNAVAILABLE", "bad file")]


def test_a_version_removed_while_the_old_one_drains_is_not_loaded(house: Any, gate: Any, eventually: Any) -> None:
    spec = house.spec(parameters=REPLACE)
    house.load(spec)
    house.submit(1.0)
    gate.wait_entered()
    house.set_desired(spec, mark="b")
    eventually(lambda: house.manager.ready_versions("m") == [])
    house.manager.set_desired(DesiredModel("m"))
    gate.let_go(1)
    assert house.manager.wait_settled(["m"], 20)
    assert len(house.script.opened) == 1


def test_a_model_that_waits_for_a_drain_does_not_keep_others_from_loading(new_house: Any, new_gate: Any) -> None:
    house, gate = new_house(), new_gate()
    spec = house.spec(parameters=REPLACE)
    house.load(spec)
    plain = house.script.on_run

    def run(name: str, inputs: Any) -> Any:
        gate.stop()
        return plain(name, inputs)

    house.script.on_run = run
    house.submit(1.0)
    gate.wait_entered()
    house.manager._reconciler._slots._free.acquire()  # one slot is left
    house.set_desired(spec, mark="b")
    house.load(house.spec("other"))
    house.manager._reconciler._slots._free.release()
    gate.let_go(9)
    assert house.manager.wait_settled(["m"], 20)


def test_each_answer_comes_from_one_generation_and_names_its_version(house: Any) -> None:
    stop = threading.Event()
    wrong: list[Any] = []
    house.load(house.spec(instances=2), 1)

    def work() -> None:
        last = 0
        while not stop.is_set():
            answer = house.submit(1.0, rows=3)[1].final()
            values = {float(value) for value in answer.outputs[0].array[:, 0]} if answer.error is None else set()
            if len(values) != 1 or answer.version != max(values) or answer.version < last:
                wrong.append((answer, values))
            last = answer.version

    def run(name: str, inputs: Any) -> Any:
        number = int(name.split("_")[0].removeprefix("g"))
        return {"OUT": inputs["IN"] * number}

    def spec_of(number: int) -> Any:
        return house.spec(instance_groups=(InstanceGroup(f"g{number}", InstanceKind.CPU, 2),))

    house.script.on_run = run
    house.load(spec_of(1), 1, mark="1")
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(2, 30):
        house.load(spec_of(number), number, mark=str(number))
    stop.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    (generation,) = [report.generation for report in house.manager.versions("m") if report.state == "READY"]
    assert generation == 30
