"""The manager: reality follows the wish, whatever happens meanwhile, and no request is lost over it."""

from __future__ import annotations

import gc
import logging
import threading
import tracemalloc
from typing import Any

import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind
from edge_server.core.status_reports import IndexEntry
from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.errors import Draining, InvalidRequest, LoadError, NotReady, Refusal, ServingFault, UnknownModel


def fail_open(message: str) -> Any:
    def fail(job: Any) -> None:
        raise LoadError(message)

    return fail


def index(house: Any) -> list[tuple[str, str, str, str]]:
    return [(entry.name, entry.version, entry.state, entry.reason) for entry in house.manager.index()]


def kinds(house: Any, version: int | None = None) -> list[str]:
    return [
        kind.removeprefix("model.") for kind, fields in house.events if version is None or fields["version"] == version
    ]


def test_a_desired_version_is_loaded_announced_after_it_can_be_used_and_unloaded(house: Any, eventually: Any) -> None:
    usable: list[bool] = []
    house.manager._events.publisher = lambda kind, /, **fields: (
        house.events.append((kind, fields)),
        kind == "model.ready" and usable.append(house.service.is_model_ready("m", 1)),
    )
    house.load(house.spec())
    assert usable == [True]
    assert index(house) == [("m", "1", "READY", "")]
    house.service.unload_model("m")
    eventually(lambda: index(house) == [("m", "1", "UNAVAILABLE", "unloaded")])
    eventually(lambda: kinds(house) == ["loading", "ready", "draining", "unloaded"])


def test_warnings_about_a_model_that_serves_are_logged_as_such(house: Any, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        house.load(house.spec(warnings=("it looks doubtful",), notes=("it can batch",)))
    found = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert {("WARNING", "model 'm': it looks doubtful"), ("INFO", "model 'm': it can batch")} <= found


def test_a_version_that_is_not_asked_for_by_number_is_the_highest(house: Any) -> None:
    house.load(house.spec(), 1, 3, 2)
    assert house.manager.route("m", None).version == 3
    assert house.manager.route("m", 2).version == 2
    assert [item.version for item in house.manager.ready_versions("m")] == [3, 2, 1]
    assert house.service.model_metadata("m", None).versions == ("1", "2", "3")
    assert [item.version for item in house.service.statistics("m", None)] == [1, 2, 3]


ROUTES = [
    ("other", None, UnknownModel, "Request for unknown model: 'other' is not found"),
    ("m", 9, UnknownModel, "Request for unknown model: 'm' version 9 is not found"),
    ("broken", 1, NotReady, "'broken' version 1 is not at ready state: no luck"),
    (
        "broken",
        None,
        UnknownModel,
        "Request for unknown model: 'broken' has no available versions: version 1 is UNAVAILABLE (no luck)",
    ),
    ("unread", None, UnknownModel, "Request for unknown model: 'unread' has no available versions: what is this?"),
]


@pytest.mark.parametrize(("name", "version", "kind", "message"), ROUTES)
def test_a_request_without_a_route_gets_the_reason_in_tritons_words(
    house: Any, name: str, version: int | None, kind: type[Exception], message: str
) -> None:
    house.load(house.spec())
    house.script.on_open = fail_open("no luck")
    house.set_desired(house.spec("broken"))
    house.manager.set_desired(DesiredModel("unread", reason="what is this?"))
    house.manager.wait_settled()
    with pytest.raises(kind) as caught:
        house.submit(model=name, version=version)
    assert message in str(caught.value)
    assert caught.value.retry_after_s is None, "to try again does not help"


def test_a_model_that_still_loads_is_refused_for_now_and_others_answer_meanwhile(new_house: Any, new_gate: Any) -> None:
    house, gate = new_house(has_started=False), new_gate()
    with pytest.raises(NotReady, match=r"the server is starting: .*'m' is not found") as caught:
        house.submit()
    assert caught.value.retry_after_s == 1.0
    for ask in (house.service.find, house.service.model_metadata):
        with pytest.raises(NotReady, match="the server is starting"):
            ask("m", None)
    assert not house.service.is_model_ready("m", None)
    house.load(house.spec("ready"))
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec(), 1, 2)
    gate.wait_entered()
    for version in (None, 1, 2):
        with pytest.raises(NotReady, match="ready state") as caught:
            house.submit(version=version)
        assert caught.value.retry_after_s == 1.0
    assert house.submit(1.0, model="ready")[1].final().error is None
    gate.let_go()
    gate.wait_entered()
    assert house.submit(1.0, version=2)[1].final().error is None, "a version that is ready does not wait for others"
    gate.let_go()
    assert house.manager.wait_settled(["m"], 20)
    house.service.started()
    with pytest.raises(UnknownModel):
        house.submit(model="other")


def test_statistics_of_an_absent_model_are_refused(house: Any) -> None:
    with pytest.raises(InvalidRequest, match="requested model 'x' is not available"):
        house.service.statistics("x", None)


def test_reloading_under_load_loses_no_request(house: Any) -> None:
    house.load(house.spec(instances=2))
    stop = threading.Event()
    errors: list[Any] = []
    counts = [0] * 4

    def work(index: int) -> None:
        while not stop.is_set():
            _, mailbox = house.submit(index, may_run=bool(index % 2))
            answer = mailbox.final()
            counts[index] += 1
            if answer.error is not None or float(answer.outputs[0].array[0, 0]) != index:
                errors.append(answer)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for generation in range(40):
        house.load(house.spec(instances=2), *([1, 2] if generation % 3 else [1]), mark=f"mark {generation}")
    stop.set()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert min(counts) > 0


def test_a_failed_reload_keeps_the_old_generation_serving_and_says_so(house: Any) -> None:
    old = house.load(house.spec())
    house.script.on_open = fail_open("out of memory")
    house.set_desired(house.spec(), mark="b")
    assert house.manager.wait_settled(["m"], 20)
    assert house.manager.route("m", 1) is old
    assert house.submit(1)[1].final().error is None
    assert index(house) == [("m", "1", "READY", "an earlier generation serves; the newest failed: out of memory")]
    assert house.manager.failure("m") == "version 1 is at UNAVAILABLE state: out of memory;"
    assert kinds(house) == ["loading", "ready", "loading", "failed"]
    house.set_desired(house.spec(), mark="a")
    assert index(house) == [("m", "1", "READY", "")], "the old files are back: nothing is wrong any more"
    assert house.manager.failure("m") is None


def test_a_failed_new_version_keeps_the_old_version_serving(house: Any) -> None:
    house.load(house.spec(), 1)
    house.script.on_open = fail_open("bad file")
    house.set_desired(house.spec(), 2)
    assert house.manager.wait_settled(["m"], 20)
    assert house.manager.route("m", None).version == 1
    assert index(house) == [("m", "1", "READY", ""), ("m", "2", "UNAVAILABLE", "bad file")]
    assert house.manager.has_failures()


def test_a_failed_load_is_not_tried_again_until_something_changes_or_someone_asks(house: Any) -> None:
    tries: list[str] = []

    def fail(job: Any) -> None:
        tries.append("try")
        raise LoadError("")

    house.script.on_open = fail
    for _ in range(3):
        house.set_desired(house.spec())
        assert house.manager.wait_settled(["m"], 20)
    assert len(tries) == 1
    assert house.manager.failure("m") == "version 1 is at UNAVAILABLE state: LoadError;"
    with pytest.raises(LoadError, match="load failed for model 'm': version 1 is at UNAVAILABLE state"):
        house.service.load_model("m")
    assert len(tries) == 2
    house.script.on_open = lambda job: None
    house.load(house.spec(), mark="b")


def test_a_failed_model_that_is_removed_leaves_the_index(house: Any, eventually: Any) -> None:
    def fail(job: Any) -> None:
        raise LoadError("no luck")

    house.script.on_open = fail
    house.set_desired(house.spec())
    eventually(lambda: index(house) == [("m", "1", "UNAVAILABLE", "no luck")])
    house.manager.set_desired_state([])
    assert index(house) == []
    with pytest.raises(UnknownModel, match="'m' is not found"):
        house.submit()


def test_a_model_that_is_removed_while_its_load_fails_leaves_the_index(house: Any, new_gate: Any) -> None:
    gate = new_gate()

    def fail(job: Any) -> None:
        gate.stop()
        raise LoadError("no luck")

    house.script.on_open = fail
    house.set_desired(house.spec())
    gate.wait_entered()
    house.manager.set_desired_state([])
    gate.let_go()
    assert house.manager.wait_settled(None, 20)
    assert index(house) == []
    assert "model.failed" not in [kind for kind, _ in house.events]


def test_a_version_removed_while_loading_leaves_nothing_behind(house: Any, new_gate: Any, eventually: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec())
    gate.wait_entered()
    assert index(house) == [("m", "1", "LOADING", "")]
    assert not house.service.is_model_ready("m", None)
    house.manager.set_desired(DesiredModel("m"))
    gate.let_go()
    eventually(lambda: index(house) == [("m", "1", "UNAVAILABLE", "unloaded")])
    assert [name for name, _ in house.script.closed] == ["m_0"]
    with pytest.raises(UnknownModel, match="has no available versions: they were unloaded, or its folder was removed"):
        house.submit()


def test_a_version_removed_before_its_turn_is_never_loaded(house: Any, new_gate: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    for name in ("a", "b", "c"):
        house.set_desired(house.spec(name))
    gate.wait_entered()
    gate.wait_entered()
    begun = {fields["model"] for kind, fields in house.events if kind == "model.loading"}
    (late,) = {"a", "b", "c"} - begun
    house.manager.set_desired(DesiredModel(late))
    gate.let_go(2)
    assert house.manager.wait_settled(None, 20)
    assert {name for name, _ in house.script.opened} == {f"{name}_0" for name in begun}


def test_a_version_replaced_while_loading_ends_in_the_newest(house: Any, new_gate: Any, eventually: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec(), mark="a")
    gate.wait_entered()
    house.set_desired(house.spec(), mark="b")
    house.set_desired(house.spec(), mark="c")
    gate.let_go(2)
    gate.wait_entered()
    assert house.manager.wait_settled(["m"], 20)
    eventually(lambda: len(house.script.closed) == 1)
    assert house.manager.route("m", 1).fingerprint == "c"
    assert len(house.script.opened) == 2


def test_a_model_wished_again_while_it_drains_is_loaded_beside_it(house: Any, gate: Any, eventually: Any) -> None:
    house.load(house.spec())
    _, mailbox = house.submit(1)
    gate.wait_entered()
    house.service.unload_model("m")
    assert index(house) == [("m", "1", "UNLOADING", "")]
    fresh = house.load(house.spec())
    assert fresh.generation == 2
    assert index(house) == [("m", "1", "READY", "")]
    gate.let_go(1)
    assert mailbox.final().error is None
    eventually(lambda: len(house.script.closed) == 1)
    assert index(house) == [("m", "1", "READY", "")]


def test_loading_a_loaded_model_again_does_nothing(house: Any) -> None:
    first = house.load(house.spec())
    house.service.load_model("m")
    assert house.manager.route("m", None) is first
    assert len(house.script.opened) == 1


def test_a_model_missing_from_the_desired_state_is_unloaded(house: Any, eventually: Any) -> None:
    house.load(house.spec("a"))
    house.load(house.spec("b"))
    house.manager.set_desired_state([house.wishes["b"], DesiredModel("c", reason="two repositories hold it")])
    eventually(lambda: index(house)[0] == ("a", "1", "UNAVAILABLE", "unloaded"))
    assert index(house)[1:] == [("b", "1", "READY", ""), ("c", "", "UNAVAILABLE", "two repositories hold it")]
    assert house.manager.failure("c") == "two repositories hold it"
    assert house.manager.has_failures()


def test_a_model_that_can_no_longer_be_read_keeps_serving(house: Any) -> None:
    house.load(house.spec())
    house.manager.set_desired(DesiredModel("m", reason="config.pbtxt: syntax error"))
    assert house.submit(1)[1].final().error is None
    assert index(house) == [("m", "1", "READY", ""), ("m", "", "UNAVAILABLE", "config.pbtxt: syntax error")]


def test_several_models_load_at_the_same_time_but_no_more_than_allowed(house: Any, new_gate: Any) -> None:
    gate = new_gate()
    inside, most = [0], [0]
    lock = threading.Lock()

    def open_(job: Any) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gate.stop()
        with lock:
            inside[0] -= 1

    house.script.on_open = open_
    for name in "abcde":
        house.set_desired(house.spec(name))
    gate.wait_entered()
    gate.wait_entered()
    gate.let_go(5)
    assert house.manager.wait_settled(None, 20)
    assert len(house.manager.all_ready()) == 5
    assert most[0] == 2


def test_loading_an_absent_model_or_one_without_versions_is_refused(house: Any) -> None:
    with pytest.raises(ServingFault, match="failed to load 'x', failed to poll from model repository"):
        house.service.load_model("x")
    house.wishes["e"] = DesiredModel("e")
    with pytest.raises(LoadError, match="at least one version must be available"):
        house.service.load_model("e")
    house.service.unload_model("never heard of")


def test_the_index_lists_what_was_never_loaded_by_name_alone(house: Any) -> None:
    house.load(house.spec())
    house.wishes["z"] = DesiredModel("z")
    assert house.service.repository_index() == [IndexEntry("m", "1", "READY"), IndexEntry("z")]
    assert house.service.repository_index(only_ready=True) == [IndexEntry("m", "1", "READY")]


def test_close_waits_for_what_runs_and_waits_and_reports_a_clean_end(house: Any, gate: Any) -> None:
    house.load(house.spec())
    mailboxes = [house.submit(number)[1] for number in range(3)]
    gate.wait_entered()
    clean: list[bool] = []
    closer = threading.Thread(target=lambda: clean.append(house.manager.close(20.0)))
    closer.start()
    gate.let_go(3)
    closer.join(20)
    assert clean == [True]
    assert [mailbox.final().error for mailbox in mailboxes] == [None] * 3
    assert [name for name, _ in house.script.closed] == ["m_0"]
    with pytest.raises(Draining):
        house.manager.set_desired(DesiredModel("m"))
    with pytest.raises(Refusal):
        house.service.load_model("m")
    house.manager.set_desired_state([])


def test_close_returns_at_its_deadline_though_a_session_hangs_and_everyone_is_answered(house: Any, gate: Any) -> None:
    version = house.load(house.spec())
    mailboxes = [house.submit(number)[1] for number in range(3)]
    gate.wait_entered()
    assert not house.manager.close(0.05)
    assert all(isinstance(mailbox.final().error, Draining) for mailbox in mailboxes)
    assert version.state is VersionState.DRAINING
    gate.let_go(1)


@pytest.mark.parametrize("part", ["on_open", "on_close"])
def test_close_returns_though_opening_or_closing_a_session_hangs(house: Any, new_gate: Any, part: str) -> None:
    gate = new_gate()
    setattr(house.script, part, lambda *given: gate.stop())
    house.set_desired(house.spec())
    waiter_said: list[bool] = []
    if part == "on_open":
        gate.wait_entered()
        waiter = threading.Thread(target=lambda: waiter_said.append(house.manager.wait_settled(["m"])))
        waiter.start()
        assert house.manager.close(0.0)
        waiter.join(20)
        assert waiter_said == [False]
    else:
        assert house.manager.wait_settled(["m"], 20)
        assert house.manager.close(0.0)
    gate.let_go(10)


def test_what_finishes_loading_after_close_is_closed_again(house: Any, new_gate: Any, eventually: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec())
    gate.wait_entered()
    assert house.manager.close(0.0)
    gate.let_go()
    eventually(lambda: len(house.script.closed) == 1)
    assert house.manager.all_ready() == []


def test_a_batch_that_ends_within_the_grace_is_answered_for_real(house: Any, gate: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge_server.serving.lifecycle.manager._GRACE_S", 20.0)
    house.load(house.spec())
    _, mailbox = house.submit(1)
    gate.wait_entered()
    clean: list[bool] = []
    closer = threading.Thread(target=lambda: clean.append(house.manager.close(0.0)))
    closer.start()
    gate.let_go(1)
    closer.join(20)
    assert clean == [True]
    assert mailbox.final().error is None


def test_the_slow_and_the_hung_stub_are_served_and_drained_like_any_other(house: Any, eventually: Any) -> None:
    def stub(name: str, **parameters: str) -> Any:
        groups = (InstanceGroup(name, InstanceKind.CPU, 1),)
        return house.spec(name, backend="stub", parameters=parameters, instance_groups=groups)

    house.load(stub("slow", stub_delay_ms="5"))
    house.load(stub("bad", stub_fail="true"))
    house.load(stub("hung", stub_hang="true"))
    assert float(house.submit(3, model="slow")[1].final().outputs[0].array[0, 0]) == 6
    assert "failed as told" in str(house.submit(3, model="bad")[1].final().error)
    _, hung = house.submit(3, model="hung")
    assert not house.manager.close(0.0)
    assert isinstance(hung.final().error, Draining)


@pytest.mark.soak
def test_500_reloads_leave_neither_memory_nor_threads_behind(house: Any, eventually: Any, caplog: Any) -> None:
    # The log is captured, and that is memory too.
    caplog.set_level(logging.WARNING, "edge_server")
    before_all = set(threading.enumerate())
    spec = house.spec(backend="stub")
    house.manager._events.publisher = lambda kind, /, **fields: None

    def reload(first: int, last: int) -> None:
        for number in range(first, last):
            house.load(spec, mark=str(number))
            house.submit(number)[1].final()
        eventually(lambda: len(house.manager.table._models["m"].loaded) == 1 and not house.manager.table._unfinished)
        gc.collect()

    reload(0, 50)
    tracemalloc.start()
    try:
        reload(50, 100)
        before = tracemalloc.get_traced_memory()[0]
        reload(100, 500)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 400 * 200, f"{grown / 400:.0f} bytes stay behind for each reload"
    # The one that serves now.
    eventually(lambda: len(set(threading.enumerate()) - before_all) == 1)
