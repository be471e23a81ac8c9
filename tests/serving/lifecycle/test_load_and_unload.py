"""Loading and unloading: the actual state follows the desired state, and no request is lost meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.core.model_spec import InstanceGroup, InstanceKind
from edge_server.core.status_reports import IndexEntry
from edge_server.core.version_lifecycle import DesiredModel, VersionState
from edge_server.errors import Draining, InvalidRequest, LoadError, NotReady, Refusal, ServingFault, UnknownModel
from tests.kit.eventually import eventually


def fail_open(message: str) -> Any:
    def fail(job: Any) -> None:
        raise LoadError(message)

    return fail


def index(core: Any) -> list[tuple[str, str, str, str]]:
    return [(entry.name, entry.version, entry.state, entry.reason) for entry in core.router.index()]


def kinds(core: Any, version: int | None = None) -> list[str]:
    return [
        kind.removeprefix("model.") for kind, fields in core.events if version is None or fields["version"] == version
    ]


def test_a_desired_version_is_loaded_announced_after_it_can_be_used_and_unloaded(core: Any) -> None:
    usable: list[bool] = []
    core.models.events.publisher = lambda kind, /, **fields: (
        core.events.append((kind, fields)),
        kind == "model.ready" and usable.append(core.service.is_model_ready("m", 1)),
    )
    core.load(core.spec())
    assert usable == [True]
    assert index(core) == [("m", "1", "READY", "")]
    core.service.unload_model("m")
    assert eventually(lambda: index(core) == [("m", "1", "UNAVAILABLE", "unloaded")])
    assert eventually(lambda: kinds(core) == ["loading", "ready", "draining", "unloaded"])


def test_warnings_about_a_model_that_serves_are_logged_as_such(core: Any, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        core.load(core.spec(warnings=("it looks doubtful",), notes=("it can batch",)))
    found = {(record.levelname, record.getMessage()) for record in caplog.records}
    assert {("WARNING", "model 'm': it looks doubtful"), ("INFO", "model 'm': it can batch")} <= found


def test_a_version_that_is_not_asked_for_by_number_is_the_highest(core: Any) -> None:
    core.load(core.spec(), 1, 3, 2)
    assert core.router.route("m", None).version == 3
    assert core.router.route("m", 2).version == 2
    assert [item.version for item in core.router.ready_versions("m")] == [3, 2, 1]
    assert core.service.model_metadata("m", None).versions == ("1", "2", "3")
    assert [item.version for item in core.service.statistics("m", None)] == [1, 2, 3]


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
    core: Any, name: str, version: int | None, kind: type[Exception], message: str
) -> None:
    core.load(core.spec())
    core.script.on_open = fail_open("no luck")
    core.set_desired(core.spec("broken"))
    core.table.set_desired(DesiredModel("unread", reason="what is this?"))
    core.table.wait_settled()
    with pytest.raises(kind) as caught:
        core.submit(model=name, version=version)
    assert message in str(caught.value)
    assert caught.value.retry_after_s is None, "to try again does not help"


def test_an_unknown_name_gets_the_nearest_one_unless_it_is_long_or_many_are_asked_for(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 7.5)
    monkeypatch.setattr("edge_server.service.time", clock)
    core.load(core.spec("same_int32"))

    def refusal(name: str, version: int | None = None) -> str:
        with pytest.raises(UnknownModel) as caught:
            core.service.find(name, version)
        return str(caught.value)

    assert "did you mean" not in refusal("same_int23"), "a client may not be allowed to list the models"
    core.service.suggests_models = True
    for name, version in (("same_int32", 99), ("same_int32" + "2" * 70, None)):
        assert "did you mean" not in refusal(name, version)
    nearest = "Request for unknown model: 'same_int23' is not found, did you mean 'same_int32'?"
    assert [refusal("same_int23") for _ in range(30)].count(nearest) == 10
    clock.monotonic = lambda: 8.5
    assert refusal("same_int23") == nearest
    clock.monotonic = lambda: 9.5
    for _ in range(10):  # A submit looks the model up once.
        with pytest.raises(UnknownModel) as caught:
            core.submit(model="same_int23")
        assert str(caught.value) == nearest


def test_a_model_that_still_loads_is_refused_for_now_and_others_answer_meanwhile(
    new_core: Any, new_blocker: Any
) -> None:
    core, blocker = new_core(has_started=False), new_blocker()
    with pytest.raises(NotReady, match=r"the server is starting: .*'m' is not found") as caught:
        core.submit()
    assert caught.value.retry_after_s == 1.0
    for ask in (core.service.find, core.service.model_metadata):
        with pytest.raises(NotReady, match="the server is starting"):
            ask("m", None)
    assert not core.service.is_model_ready("m", None)
    core.load(core.spec("ready"))
    core.script.on_open = lambda job: blocker.block()
    core.set_desired(core.spec(), 1, 2)
    blocker.wait_blocked()
    for version in (None, 1, 2):
        with pytest.raises(NotReady, match="ready state") as caught:
            core.submit(version=version)
        assert caught.value.retry_after_s == 1.0
    assert core.submit(1.0, model="ready")[1].final().error is None
    blocker.release()
    blocker.wait_blocked()
    assert core.submit(1.0, version=2)[1].final().error is None, "a version that is ready does not wait for others"
    blocker.release()
    assert core.table.wait_settled(["m"], 20)
    core.service.started()
    with pytest.raises(UnknownModel):
        core.submit(model="other")


def test_statistics_of_an_absent_model_are_refused(core: Any) -> None:
    with pytest.raises(InvalidRequest, match="requested model 'x' is not available"):
        core.service.statistics("x", None)


@pytest.mark.parametrize("reloads", [10, pytest.param(40, marks=pytest.mark.full)])
def test_reloading_under_load_loses_no_request(core: Any, reloads: int) -> None:
    core.load(core.spec(instances=2))
    stop = threading.Event()
    errors: list[Any] = []
    counts = [0] * 4

    def work(index: int) -> None:
        while not stop.is_set():
            _, mailbox = core.submit(index, may_run=bool(index % 2))
            answer = mailbox.final()
            counts[index] += 1
            if answer.error is not None or float(answer.outputs[0].array[0, 0]) != index:
                errors.append(answer)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for generation in range(reloads):
        core.load(core.spec(instances=2), *([1, 2] if generation % 3 else [1]), mark=f"mark {generation}")
    stop.set()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert min(counts) > 0


def test_a_failed_reload_keeps_the_old_generation_serving_and_says_so(core: Any) -> None:
    old = core.load(core.spec())
    core.script.on_open = fail_open("out of memory")
    core.set_desired(core.spec(), mark="b")
    assert core.table.wait_settled(["m"], 20)
    assert core.router.route("m", 1) is old
    assert core.submit(1)[1].final().error is None
    assert index(core) == [("m", "1", "READY", "an earlier generation serves; the newest failed: out of memory")]
    assert core.router.failure("m") == "version 1 is at UNAVAILABLE state: out of memory;"
    assert kinds(core) == ["loading", "ready", "loading", "failed"]
    core.set_desired(core.spec(), mark="a")
    assert index(core) == [("m", "1", "READY", "")], "the old files are back: nothing is wrong any more"
    assert core.router.failure("m") is None


def test_a_failed_new_version_keeps_the_old_version_serving(core: Any) -> None:
    core.load(core.spec(), 1)
    core.script.on_open = fail_open("bad file")
    core.set_desired(core.spec(), 2)
    assert core.table.wait_settled(["m"], 20)
    assert core.router.route("m", None).version == 1
    assert index(core) == [("m", "1", "READY", ""), ("m", "2", "UNAVAILABLE", "bad file")]
    assert core.router.has_failures()


def test_a_failed_load_is_not_tried_again_until_something_changes_or_someone_asks(core: Any) -> None:
    tries: list[str] = []

    def fail(job: Any) -> None:
        tries.append("try")
        raise LoadError("")

    core.script.on_open = fail
    for _ in range(3):
        core.set_desired(core.spec())
        assert core.table.wait_settled(["m"], 20)
    assert len(tries) == 1
    assert core.router.failure("m") == "version 1 is at UNAVAILABLE state: LoadError;"
    with pytest.raises(LoadError, match="load failed for model 'm': version 1 is at UNAVAILABLE state"):
        core.service.load_model("m")
    assert len(tries) == 2
    core.script.on_open = lambda job: None
    core.load(core.spec(), mark="b")


def test_a_failed_model_that_is_removed_leaves_the_index(core: Any) -> None:
    def fail(job: Any) -> None:
        raise LoadError("no luck")

    core.script.on_open = fail
    core.set_desired(core.spec())
    assert eventually(lambda: index(core) == [("m", "1", "UNAVAILABLE", "no luck")])
    core.table.set_desired_state([])
    assert index(core) == []
    with pytest.raises(UnknownModel, match="'m' is not found"):
        core.submit()


def test_a_model_that_is_removed_while_its_load_fails_leaves_the_index(core: Any, new_blocker: Any) -> None:
    blocker = new_blocker()

    def fail(job: Any) -> None:
        blocker.block()
        raise LoadError("no luck")

    core.script.on_open = fail
    core.set_desired(core.spec())
    blocker.wait_blocked()
    core.table.set_desired_state([])
    blocker.release()
    assert core.table.wait_settled(None, 20)
    assert index(core) == []
    assert "model.failed" not in [kind for kind, _ in core.events]


def test_a_version_removed_while_loading_leaves_nothing_behind(core: Any) -> None:
    blocker = core.block_loads()
    core.set_desired(core.spec())
    blocker.wait_blocked()
    assert index(core) == [("m", "1", "LOADING", "")]
    assert not core.service.is_model_ready("m", None)
    core.table.set_desired(DesiredModel("m"))
    blocker.release()
    assert eventually(lambda: index(core) == [("m", "1", "UNAVAILABLE", "unloaded")])
    assert [name for name, _ in core.script.closed] == ["m_0"]
    with pytest.raises(UnknownModel, match="has no available versions: they were unloaded, or its folder was removed"):
        core.submit()


def test_a_version_removed_before_its_turn_is_never_loaded(core: Any) -> None:
    blocker = core.block_loads()
    for name in ("a", "b", "c"):
        core.set_desired(core.spec(name))
    blocker.wait_blocked()
    blocker.wait_blocked()
    begun = {fields["model"] for kind, fields in core.events if kind == "model.loading"}
    (late,) = {"a", "b", "c"} - begun
    core.table.set_desired(DesiredModel(late))
    blocker.release(2)
    assert core.table.wait_settled(None, 20)
    assert {name for name, _ in core.script.opened} == {f"{name}_0" for name in begun}


def test_a_version_replaced_while_loading_ends_in_the_newest(core: Any) -> None:
    blocker = core.block_loads()
    core.set_desired(core.spec(), mark="a")
    blocker.wait_blocked()
    core.set_desired(core.spec(), mark="b")
    core.set_desired(core.spec(), mark="c")
    blocker.release(2)
    blocker.wait_blocked()
    assert core.table.wait_settled(["m"], 20)
    assert eventually(lambda: len(core.script.closed) == 1)
    assert core.router.route("m", 1).fingerprint == "c"
    assert len(core.script.opened) == 2


def test_a_model_wished_again_while_it_drains_is_loaded_beside_it(core: Any, blocker: Any) -> None:
    core.load(core.spec())
    _, mailbox = core.submit(1)
    blocker.wait_blocked()
    core.service.unload_model("m")
    assert index(core) == [("m", "1", "UNLOADING", "")]
    fresh = core.load(core.spec())
    assert fresh.generation == 2
    assert index(core) == [("m", "1", "READY", "")]
    blocker.release(1)
    assert mailbox.final().error is None
    assert eventually(lambda: len(core.script.closed) == 1)
    assert index(core) == [("m", "1", "READY", "")]


def test_loading_a_loaded_model_again_does_nothing(core: Any) -> None:
    first = core.load(core.spec())
    core.service.load_model("m")
    assert core.router.route("m", None) is first
    assert len(core.script.opened) == 1


def test_a_model_missing_from_the_desired_state_is_unloaded(core: Any) -> None:
    core.load(core.spec("a"))
    core.load(core.spec("b"))
    core.table.set_desired_state([core.desired["b"], DesiredModel("c", reason="two repositories hold it")])
    assert eventually(lambda: index(core)[0] == ("a", "1", "UNAVAILABLE", "unloaded"))
    assert index(core)[1:] == [("b", "1", "READY", ""), ("c", "", "UNAVAILABLE", "two repositories hold it")]
    assert core.router.failure("c") == "two repositories hold it"
    assert core.router.has_failures()


def test_a_model_that_can_no_longer_be_read_keeps_serving(core: Any) -> None:
    core.load(core.spec())
    core.table.set_desired(DesiredModel("m", reason="config.pbtxt: syntax error"))
    assert core.submit(1)[1].final().error is None
    assert index(core) == [("m", "1", "READY", ""), ("m", "", "UNAVAILABLE", "config.pbtxt: syntax error")]


def test_several_models_load_at_the_same_time_but_no_more_than_allowed(core: Any, new_blocker: Any) -> None:
    blocker = new_blocker()
    inside, most = [0], [0]
    lock = threading.Lock()

    def open_(job: Any) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        blocker.block()
        with lock:
            inside[0] -= 1

    core.script.on_open = open_
    for name in "abcde":
        core.set_desired(core.spec(name))
    blocker.wait_blocked()
    blocker.wait_blocked()
    blocker.release(5)
    assert core.table.wait_settled(None, 20)
    assert len(core.router.all_ready()) == 5
    assert most[0] == 2


def test_loading_an_absent_model_or_one_without_versions_is_refused(core: Any) -> None:
    with pytest.raises(ServingFault, match="failed to load 'x', failed to poll from model repository"):
        core.service.load_model("x")
    core.desired["e"] = DesiredModel("e")
    with pytest.raises(LoadError, match="at least one version must be available"):
        core.service.load_model("e")
    core.service.unload_model("never heard of")


def test_the_index_lists_models_that_were_never_loaded_by_name_alone(core: Any) -> None:
    core.load(core.spec())
    core.desired["z"] = DesiredModel("z")
    assert core.service.repository_index() == [IndexEntry("m", "1", "READY"), IndexEntry("z")]
    assert core.service.repository_index(only_ready=True) == [IndexEntry("m", "1", "READY")]


def test_close_waits_for_running_and_queued_requests_and_reports_a_clean_end(core: Any, blocker: Any) -> None:
    core.load(core.spec())
    mailboxes = [core.submit(number)[1] for number in range(3)]
    blocker.wait_blocked()
    clean: list[bool] = []
    closer = threading.Thread(target=lambda: clean.append(core.service.close(20.0)))
    closer.start()
    blocker.release(3)
    closer.join(20)
    assert clean == [True]
    assert [mailbox.final().error for mailbox in mailboxes] == [None] * 3
    assert [name for name, _ in core.script.closed] == ["m_0"]
    with pytest.raises(Draining):
        core.table.set_desired(DesiredModel("m"))
    with pytest.raises(Refusal):
        core.service.load_model("m")
    core.table.set_desired_state([])


def test_close_returns_at_its_deadline_though_a_session_hangs_and_everyone_is_answered(core: Any, blocker: Any) -> None:
    version = core.load(core.spec())
    mailboxes = [core.submit(number)[1] for number in range(3)]
    blocker.wait_blocked()
    assert not core.service.close(0.05)
    assert all(isinstance(mailbox.final().error, Draining) for mailbox in mailboxes)
    assert version.state is VersionState.DRAINING
    blocker.release(1)


@pytest.mark.parametrize("part", ["on_open", "on_close"])
def test_close_returns_though_opening_or_closing_a_session_hangs(core: Any, new_blocker: Any, part: str) -> None:
    blocker = new_blocker()
    setattr(core.script, part, lambda *given: blocker.block())
    core.set_desired(core.spec())
    waiter_said: list[bool] = []
    if part == "on_open":
        blocker.wait_blocked()
        waiter = threading.Thread(target=lambda: waiter_said.append(core.table.wait_settled(["m"])))
        waiter.start()
        assert core.service.close(0.0)
        waiter.join(20)
        assert waiter_said == [False]
    else:
        assert core.table.wait_settled(["m"], 20)
        assert core.service.close(0.0)
    blocker.release(10)


def test_what_finishes_loading_after_close_is_closed_again(core: Any) -> None:
    blocker = core.block_loads()
    core.set_desired(core.spec())
    blocker.wait_blocked()
    assert core.service.close(0.0)
    blocker.release()
    assert eventually(lambda: len(core.script.closed) == 1)
    assert core.router.all_ready() == []


def test_a_batch_that_ends_within_the_grace_is_answered_for_real(core: Any, blocker: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge_server.service.CLOSE_TIMEOUT_S", 20.0)
    core.load(core.spec())
    _, mailbox = core.submit(1)
    blocker.wait_blocked()
    clean: list[bool] = []
    closer = threading.Thread(target=lambda: clean.append(core.service.close(0.0)))
    closer.start()
    blocker.release(1)
    closer.join(20)
    assert clean == [True]
    assert mailbox.final().error is None


def test_the_slow_and_the_hung_stub_are_served_and_drained_like_any_other(core: Any) -> None:
    def stub(name: str, **parameters: str) -> Any:
        groups = (InstanceGroup(name, InstanceKind.CPU, 1),)
        return core.spec(name, backend="stub", parameters=parameters, instance_groups=groups)

    core.load(stub("slow", stub_delay_ms="5"))
    core.load(stub("bad", stub_fail="true"))
    core.load(stub("hung", stub_hang="true"))
    assert float(core.submit(3, model="slow")[1].final().outputs[0].array[0, 0]) == 6
    assert "failed as told" in str(core.submit(3, model="bad")[1].final().error)
    _, hung = core.submit(3, model="hung")
    assert not core.service.close(0.0)
    assert isinstance(hung.final().error, Draining)


@pytest.mark.soak
def test_500_reloads_leave_neither_memory_nor_threads_behind(core: Any, caplog: Any) -> None:
    # The log is captured, and that is memory too.
    caplog.set_level(logging.WARNING, "edge_server")
    before_all = set(threading.enumerate())
    spec = core.spec(backend="stub")
    core.models.events.publisher = lambda kind, /, **fields: None

    def reload(first: int, last: int) -> None:
        for number in range(first, last):
            core.load(spec, mark=str(number))
            core.submit(number)[1].final()
        assert eventually(lambda: len(core.table._models["m"].loaded) == 1 and not core.table._unfinished)
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
    assert eventually(lambda: len(set(threading.enumerate()) - before_all) == 1)


def test_a_server_that_stops_says_of_all_models_in_one_line_that_they_are_unloaded(
    core: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "edge_server")
    for name in ("gone", "one", "two"):
        core.load(core.spec(name))
    core.table.set_desired_state([core.desired["one"], core.desired["two"]])
    core.table.wait_finished(20)
    assert core.service.close(20)
    said = [record.getMessage() for record in caplog.records if "unloaded" in record.getMessage()]
    assert said == ["model 'gone' version 1 is unloaded", "2 of 2 model versions are unloaded"]
