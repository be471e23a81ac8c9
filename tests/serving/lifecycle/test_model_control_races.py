"""Orders that come between two steps of a load, and threads that the system does not grant."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import OutOfMemory


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`refuse(name, count)`: the system grants no thread whose name begins so, the first `count` times."""
    left: dict[str, int] = {}
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        name = next((name for name, count in left.items() if count and thread.name.startswith(name)), None)
        if name is not None:
            left[name] -= 1
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr("edge_server.serving.lifecycle.reconciler._THREAD_RETRY_NS", 1_000_000, raising=False)

    def choose(name: str, count: int) -> dict[str, int]:
        left[name] = count
        return left

    return choose


def test_a_version_removed_while_its_load_begins_leaves_nothing_that_loads_for_ever(house: Any) -> None:
    manager = house.manager
    plain = manager.table._is_wanted
    asked: list[bool] = []

    def is_wanted(model: Any, action: Any) -> bool:
        answer: bool = plain(model, action)
        asked.append(answer)
        # What the load has to look at twice must not change in between: nobody may have the lock for that.
        if not manager.table._changed._is_owned():
            manager.set_desired(DesiredModel("m"))
        return answer

    manager.table._is_wanted = is_wanted
    house.set_desired(house.spec())
    assert manager.wait_settled(["m"], 20)
    assert asked[0]
    manager.table._is_wanted = plain
    house.service.load_model("m")
    assert house.service.is_model_ready("m", None)


def test_a_load_waits_for_a_thread_when_the_system_grants_none(house: Any, refuse: Any, caplog: Any) -> None:
    left = refuse("edge-load", 3)
    house.load(house.spec())
    assert left["edge-load"] == 0
    assert house.submit(2.0)[1].final().error is None
    assert caplog.text.count("no thread 'edge-load' for now") == 1
    assert not house.manager.table._proceeding


def test_a_drain_waits_for_a_thread_when_the_system_grants_none(house: Any, refuse: Any, eventually: Any) -> None:
    house.load(house.spec())
    left = refuse("edge-drain", 2)
    house.service.unload_model("m")
    eventually(lambda: house.manager.loaded_versions() == [])
    assert left["edge-drain"] == 0
    assert [name for name, _ in house.script.closed] == ["m_0"]
    house.load(house.spec())


def test_a_shutdown_closes_what_serves_though_the_system_grants_no_thread_at_first(house: Any, refuse: Any) -> None:
    house.load(house.spec("a"))
    house.load(house.spec("b"))
    refuse("edge-drain", 3)
    assert house.manager.close(20.0)
    assert sorted(name for name, _ in house.script.closed) == ["a_0", "b_0"]


def test_an_instance_that_gets_no_thread_is_tried_again_as_one_without_memory(
    house: Any, refuse: Any, eventually: Any
) -> None:
    refuse("edge-m_0", 1)
    house.set_desired(house.spec())
    eventually(lambda: house.service.is_model_ready("m", None))
    (failed,) = [fields for kind, fields in house.events if kind == "model.failed"]
    assert "the system grants no thread for instance m_0" in failed["reason"]
    assert failed["retry_in_s"] == 1.0


def test_a_version_that_comes_back_with_the_same_files_is_tried_again(house: Any, eventually: Any) -> None:
    errors: list[Exception] = [OutOfMemory("does not fit")]

    def on_open(job: Any) -> None:
        if errors:
            raise errors.pop()

    house.script.on_open = on_open
    house.set_desired(house.spec())
    assert house.manager.wait_settled(["m"], 20)
    assert "does not fit" in house.manager.failure("m")
    house.manager.set_desired(DesiredModel("m"))
    house.set_desired(house.spec())
    eventually(lambda: house.service.is_model_ready("m", None))


def test_an_order_for_what_serves_already_does_not_keep_it_in_memory_for_ever(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    for name in ("a", "b"):
        house.set_desired(house.spec(name))
        assert house.manager.wait_settled([name], 20)
    # Version 1 of `a` leaves memory for `b`, and version 2 takes its place on disk.
    assert house.submit(1.0, model="b")[1].final().error is None
    house.wishes["a"] = DesiredModel("a", {2: house.desired_version(house.spec("a"), 2)})
    for _ in range(2):
        house.service.load_model("a")
    assert house.submit(1.0, model="b")[1].final().error is None
    assert {item.name for item in house.manager.all_ready()} == {"b"}


def test_what_was_ordered_by_name_before_the_first_scan_goes_on_serving(house: Any) -> None:
    house.wishes["ordered"] = DesiredModel("ordered", {1: house.desired_version(house.spec("ordered"))})
    house.service.load_model("ordered")
    first = DesiredModel("first", {1: house.desired_version(house.spec("first"))})
    house.service.set_desired_state({"first": first})
    assert house.manager.wait_settled(None, 20)
    assert house.service.is_model_ready("ordered", None)
    assert house.service.is_model_ready("first", None)
    house.service.unload_model("ordered")
    assert house.manager.ready_versions("ordered") == []
