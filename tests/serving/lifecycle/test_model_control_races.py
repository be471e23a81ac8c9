"""Orders that come between two steps of a load, and threads that the system does not grant."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import OutOfMemory
from tests.kit.eventually import eventually


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


def test_a_version_removed_while_its_load_begins_leaves_nothing_that_loads_for_ever(core: Any) -> None:
    table = core.table
    plain = table._is_wanted
    asked: list[bool] = []

    def is_wanted(model: Any, action: Any) -> bool:
        answer: bool = plain(model, action)
        asked.append(answer)
        # What the load has to look at twice must not change in between: nobody may have the lock for that.
        if not table._changed._is_owned():
            table.set_desired(DesiredModel("m"))
        return answer

    table._is_wanted = is_wanted
    core.set_desired(core.spec())
    assert table.wait_settled(["m"], 20)
    assert asked[0]
    table._is_wanted = plain
    core.service.load_model("m")
    assert core.service.is_model_ready("m", None)


def test_a_load_waits_for_a_thread_when_the_system_grants_none(core: Any, refuse: Any, caplog: Any) -> None:
    left = refuse("edge-load", 3)
    core.load(core.spec())
    assert left["edge-load"] == 0
    assert core.submit(2.0)[1].final().error is None
    assert caplog.text.count("no thread 'edge-load' for now") == 1
    assert not core.table._updating


def test_a_drain_waits_for_a_thread_when_the_system_grants_none(core: Any, refuse: Any) -> None:
    core.load(core.spec())
    left = refuse("edge-drain", 2)
    core.service.unload_model("m")
    assert eventually(lambda: core.table.loaded_versions() == [])
    assert left["edge-drain"] == 0
    assert [name for name, _ in core.script.closed] == ["m_0"]
    core.load(core.spec())


def test_a_shutdown_closes_what_serves_though_the_system_grants_no_thread_at_first(core: Any, refuse: Any) -> None:
    core.load(core.spec("a"))
    core.load(core.spec("b"))
    refuse("edge-drain", 3)
    assert core.service.close(20.0)
    assert sorted(name for name, _ in core.script.closed) == ["a_0", "b_0"]


def test_an_instance_that_gets_no_thread_is_tried_again_as_one_without_memory(core: Any, refuse: Any) -> None:
    refuse("edge-m_0", 1)
    core.set_desired(core.spec())
    assert eventually(lambda: core.service.is_model_ready("m", None))
    (failed,) = [fields for kind, fields in core.events if kind == "model.failed"]
    assert "the system grants no thread for instance m_0" in failed["reason"]
    assert failed["retry_in_s"] == 1.0


def test_a_version_that_comes_back_with_the_same_files_is_tried_again(core: Any) -> None:
    errors: list[Exception] = [OutOfMemory("does not fit")]

    def on_open(job: Any) -> None:
        if errors:
            raise errors.pop()

    core.script.on_open = on_open
    core.set_desired(core.spec())
    assert core.table.wait_settled(["m"], 20)
    assert "does not fit" in core.router.failure("m")
    core.table.set_desired(DesiredModel("m"))
    core.set_desired(core.spec())
    assert eventually(lambda: core.service.is_model_ready("m", None))


def test_a_load_call_for_a_serving_model_does_not_keep_it_in_memory_for_ever(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    for name in ("a", "b"):
        core.set_desired(core.spec(name))
        assert core.table.wait_settled([name], 20)
    # Version 1 of `a` leaves memory for `b`, and version 2 takes its place on disk.
    assert core.submit(1.0, model="b")[1].final().error is None
    core.desired["a"] = DesiredModel("a", {2: core.desired_version(core.spec("a"), 2)})
    for _ in range(2):
        core.service.load_model("a")
    assert core.submit(1.0, model="b")[1].final().error is None
    assert {item.name for item in core.router.all_ready()} == {"b"}


def test_a_model_loaded_by_name_before_the_first_scan_goes_on_serving(core: Any) -> None:
    core.desired["ordered"] = DesiredModel("ordered", {1: core.desired_version(core.spec("ordered"))})
    core.service.load_model("ordered")
    first = DesiredModel("first", {1: core.desired_version(core.spec("first"))})
    core.service.set_desired_state({"first": first})
    assert core.table.wait_settled(None, 20)
    assert core.service.is_model_ready("ordered", None)
    assert core.service.is_model_ready("first", None)
    core.service.unload_model("ordered")
    assert core.router.ready_versions("ordered") == []
