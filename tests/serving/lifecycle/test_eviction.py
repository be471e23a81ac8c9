"""More models than fit: the least recently used leaves, and comes back for the first request that asks for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import Cancelled, DeadlineExceeded, Draining, LoadError, NotReady, QueueFull, UnknownModel
from edge_server.serving.lifecycle.model_state import to_evict
from tests.kit.eventually import eventually
from tests.kit.together import together

FOR_ROOM = "unloaded: --max-resident-models are loaded; loads on request"
IDLE = "unloaded: idle; loads again on request"


def index(core: Any) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.state, entry.reason) for entry in core.router.index()}


def set_desired(core: Any, *names: str) -> None:
    for name in names:
        core.set_desired(core.spec(name))
        assert core.table.wait_settled([name], 20)


def resident(core: Any) -> set[str]:
    return {item.name for item in core.router.all_ready()}


def ask(core: Any, name: str, value: float = 1.0, **more: Any) -> Any:
    return core.submit(value, model=name, **more)[1].final()


def test_only_as_many_as_allowed_are_loaded_and_the_rest_are_offered_all_the_same(new_core: Any) -> None:
    core = new_core(max_resident_models=2)
    set_desired(core, "a", "b", "c")
    assert resident(core) == {"a", "b"}
    assert index(core) == {"a": ("READY", ""), "b": ("READY", ""), "c": ("UNAVAILABLE", FOR_ROOM)}
    assert not core.router.has_failures()
    core.service.started()
    assert core.service.is_ready()
    assert core.service.is_model_ready("c", None)
    assert core.service.is_model_ready("c", 1)
    assert core.service.model_metadata("c", None).versions == ("1",)
    assert core.service.find("c", None).spec.name == "c"
    assert core.service.find("c", 1).spec.name == "c"
    with pytest.raises(UnknownModel):
        core.service.find("c", 2)
    assert [name for name, _ in core.script.opened] == ["a_0", "b_0"], "the third was not opened to be closed again"
    (report,) = core.router.versions("c")
    assert (report.state, report.reason, report.share) == ("RETIRED", FOR_ROOM, 0.0)


def test_a_request_brings_its_model_back_in_place_of_the_one_least_recently_used(new_core: Any) -> None:
    core = new_core(max_resident_models=2)
    set_desired(core, "a", "b", "c")
    ask(core, "b")
    ask(core, "a")
    answer = ask(core, "c", 7.0)
    assert (answer.error, answer.model, answer.version) == (None, "c", 1)
    assert float(answer.outputs[0].array[0, 0]) == 7.0
    assert resident(core) == {"a", "c"}
    assert index(core)["b"] == ("UNAVAILABLE", FOR_ROOM)
    assert ("model.evicted", "b") in [(kind, fields["model"]) for kind, fields in core.events]
    assert ask(core, "b").error is None
    assert resident(core) == {"b", "c"}


def test_a_models_own_time_or_the_last_requests_decides_when_it_is_idle(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(), new_blocker()
    core.set_desired(core.spec("mine", parameters={"idle_unload_s": "0.01"}))
    set_desired(core, "stays")
    assert eventually(lambda: index(core)["mine"] == ("UNAVAILABLE", IDLE))
    assert resident(core) == {"stays"}
    stop_runs(core, blocker)
    _, busy = core.submit(model="mine")
    core.service.set_keep_alive("mine", 3600.0)
    blocker.release(1)
    assert busy.final().error is None
    core.service.set_keep_alive("stays", 0.0)
    assert eventually(lambda: resident(core) == {"mine"})
    core.service.set_keep_alive("mine", 0.0)
    assert eventually(lambda: resident(core) == set())
    blocker.release(1)
    assert ask(core, "stays").error is None


def test_a_time_that_is_given_while_a_model_is_not_loaded_does_not_hold_for_its_next_load(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    core.service.set_keep_alive("b", 0.0)
    assert ask(core, "b").error is None
    core.table.unload_idle()
    assert resident(core) == {"b"}


def test_a_time_that_is_given_for_a_load_that_fails_does_not_hold_for_the_next(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(max_resident_models=1), new_blocker()
    set_desired(core, "a", "b")

    def fail(job: Any) -> None:
        blocker.block()
        raise LoadError("corrupt")

    core.script.on_open = fail
    _, waiting = core.submit(model="b")
    blocker.wait_blocked()
    core.service.set_keep_alive("b", 0.0)
    blocker.release()
    assert isinstance(waiting.final().error, NotReady)
    assert eventually(lambda: core.table._models["b"].keep_alive_s is None)


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_an_idle_time_that_is_no_number_of_seconds_is_refused(new_core: Any, text: str) -> None:
    core = new_core()
    core.set_desired(core.spec("m", parameters={"idle_unload_s": text}))
    assert core.table.wait_settled(["m"], 20)
    assert "parameter idle_unload_s: expected a number of seconds" in index(core)["m"][1]


def test_the_old_is_closed_before_the_new_is_opened(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    order: list[str] = []
    core.script.on_open = lambda job: order.append(f"open {job.spec.name}")
    core.script.on_close = lambda name: order.append(f"close {name}")
    ask(core, "b")
    ask(core, "a")
    assert order == ["close a_0", "open b", "close b_0", "open a"]


def test_requests_that_come_while_it_loads_share_the_one_load(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    blocker = core.block_loads()
    sent = [core.submit(float(number), model="b", version=number % 2 or None) for number in range(6)]
    blocker.wait_blocked()
    assert index(core)["b"] == ("LOADING", "")
    assert core.service.is_model_ready("b", None)
    blocker.release()
    assert [float(mailbox.final().outputs[0].array[0, 0]) for _, mailbox in sent] == [0, 1, 2, 3, 4, 5]
    assert [name for name, _ in core.script.opened] == ["a_0", "b_0"]
    assert eventually(lambda: not core.table._models["b"].pending)


def stop_runs(core: Any, blocker: Any) -> None:
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        blocker.block()
        return plain(name, inputs)

    core.script.on_run = run


def test_a_model_in_use_is_not_evicted(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(max_resident_models=1), new_blocker()
    set_desired(core, "a", "b")
    stop_runs(core, blocker)
    _, busy = core.submit(model="a")
    blocker.wait_blocked()
    _, waiting = core.submit(model="b")
    assert eventually(lambda: core.table._models["b"].loading is not None)
    assert resident(core) == {"a"}
    blocker.release(1)
    assert busy.final().error is None
    blocker.release(1)
    assert waiting.final().error is None
    assert resident(core) == {"b"}


def test_a_request_that_waits_for_its_model_can_be_taken_back(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    blocker = core.block_loads()
    released: list[bool] = []
    ticket, mailbox = core.submit(model="b", release=lambda: released.append(True))
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert released == [True]
    ticket.cancel()
    blocker.release()
    assert core.table.wait_settled(["b"], 20)
    assert len(mailbox.responses) == 1
    assert released == [True]


@pytest.mark.parametrize("limit", ["the request's own", "the server's"])
def test_a_request_waits_no_longer_than_its_deadline(new_core: Any, limit: str) -> None:
    is_own = limit == "the request's own"
    core = new_core(max_resident_models=1, on_demand_timeout_s=60.0 if is_own else 0.05)
    set_desired(core, "a", "b")
    blocker = core.block_loads()
    _, mailbox = core.submit(model="b", timeout_us=50_000 if is_own else 0)
    assert isinstance(mailbox.final().error, DeadlineExceeded)
    blocker.release()


def test_a_cancel_after_the_load_reaches_the_submitted_request(new_core: Any, new_blocker: Any) -> None:
    core, blocker = new_core(max_resident_models=1), new_blocker()
    set_desired(core, "a", "b")
    stop_runs(core, blocker)
    ticket, mailbox = core.submit(model="b")
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    blocker.release()


def test_a_model_that_does_not_come_back_says_why(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")

    def fail(job: Any) -> None:
        raise LoadError("the file is gone")

    core.script.on_open = fail
    released: list[bool] = []
    _, mailbox = core.submit(model="b", release=lambda: released.append(True))
    error = mailbox.final().error
    assert isinstance(error, NotReady)
    assert "the file is gone" in error.message
    assert error.retry_after_s is None
    assert released == [True]
    assert index(core)["b"] == ("UNAVAILABLE", "the file is gone")
    assert core.router.has_failures()
    with pytest.raises(UnknownModel, match="the file is gone"):
        core.submit(model="b")


def test_a_wrong_request_is_refused_once_its_model_is_loaded_again(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    released: list[bool] = []
    answer = ask(core, "b", rows=9, release=lambda: released.append(True))
    assert "batch-size" in str(answer.error)
    assert released == [True]


def test_no_more_than_so_many_requests_wait(new_core: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge_server.serving.lifecycle.model_table._MAX_PENDING", 2)
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    blocker = core.block_loads()
    sent = [core.submit(model="b")[1] for _ in range(2)]
    with pytest.raises(QueueFull):
        core.submit(model="b")
    blocker.release()
    assert [mailbox.final().error for mailbox in sent] == [None, None]


def test_the_end_of_the_server_answers_those_that_wait(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    blocker = core.block_loads()
    _, mailbox = core.submit(model="b")
    blocker.wait_blocked()
    core.service.close(0.0)
    assert isinstance(mailbox.final().error, Draining)
    blocker.release()


def test_an_idle_model_leaves_and_comes_back(new_core: Any) -> None:
    core = new_core(idle_unload_s=0.05)
    set_desired(core, "a")
    assert eventually(lambda: index(core) == {"a": ("UNAVAILABLE", IDLE)} and len(core.script.closed) == 1)
    assert core.service.is_model_ready("a", None)
    assert ask(core, "a").error is None
    assert core.router.versions("a")[0].generation == 2


def test_an_old_generation_that_stands_in_for_bad_files_never_leaves(new_core: Any) -> None:
    core = new_core(idle_unload_s=0.02)
    set_desired(core, "a")

    def fail(job: Any) -> None:
        raise LoadError("bad")

    ask(core, "a")
    core.script.on_open = fail
    core.set_desired(core.spec("a"), mark="b")
    assert core.table.wait_settled(["a"], 20)
    if resident(core) == {"a"}:
        assert not core.table._models["a"].can_be_evicted()


def test_changed_files_of_a_model_out_of_memory_are_checked_and_wait_too(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    core.set_desired(core.spec("b", max_batch_size=4), mark="new")
    assert core.table.wait_settled(["b"], 20)
    assert index(core)["b"] == ("UNAVAILABLE", FOR_ROOM)
    assert core.service.find("b", None).spec.max_batch_size == 4


def test_a_load_call_loads_an_evicted_model_and_a_removed_model_is_not_loaded_on_demand(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    set_desired(core, "a", "b")
    core.service.load_model("b")
    assert resident(core) == {"b"}
    core.table.set_desired(DesiredModel("a"))
    assert not core.service.is_model_ready("a", None)
    with pytest.raises(UnknownModel):
        core.submit(model="a")


def test_all_versions_of_a_model_leave_and_come_back_together(new_core: Any) -> None:
    core = new_core(max_resident_models=1)
    core.load(core.spec("a"), 1, 2)
    set_desired(core, "b")
    ask(core, "b")
    assert core.service.model_metadata("a", None).versions == ("1", "2")
    assert ask(core, "a", version=1).version == 1
    assert core.table.wait_settled(["a"], 20)
    assert [item.version for item in core.router.ready_versions("a")] == [2, 1]


def test_more_models_than_fit_serve_every_request_of_many_threads(new_core: Any) -> None:
    core = new_core(max_resident_models=2)
    names = ["a", "b", "c", "d"]
    set_desired(core, *names)
    errors: list[Any] = []

    def work(start: int) -> None:
        for number in range(25):
            name = names[(start + number) % 4]
            answer = ask(core, name, float(number))
            if answer.error is not None or float(answer.outputs[0].array[0, 0]) != number or answer.model != name:
                errors.append(answer)

    together(work, range(4))
    assert errors == []
    assert len(resident(core)) <= 2


def test_nothing_waits_where_models_stay_in_memory(core: Any) -> None:
    blocker = core.block_loads()
    core.set_desired(core.spec())
    blocker.wait_blocked()
    with pytest.raises(NotReady):
        core.submit()
    blocker.release()


class Model:
    def __init__(self, used_ns: int, is_free: bool = True) -> None:
        self.used_ns, self.is_free = used_ns, is_free

    def can_be_evicted(self) -> bool:
        return self.is_free

    def last_used_ns(self) -> int:
        return self.used_ns


def test_the_least_recently_used_go_first_and_no_more_than_needed() -> None:
    old, new, busy = Model(1), Model(5), Model(0, is_free=False)
    assert to_evict([new, old, busy], 3) == [old]
    assert to_evict([new, old, busy], 2) == [old, new]
    assert to_evict([new, old, busy], 1) == [old, new]
    assert to_evict([new, old, busy], 4) == []


def test_work_of_each_second_goes_on_after_an_error_and_idle_models_leave_beside_it(new_core: Any) -> None:
    core = new_core(idle_unload_s=0.2)
    calls = threading.Semaphore(0)

    def work() -> None:
        calls.release()
        raise ValueError("a plugin's fault")

    core.service.checks.call_each_second(work)
    set_desired(core, "a")
    for _ in range(3):
        assert calls.acquire(timeout=20)
    while "a" in resident(core):
        assert calls.acquire(timeout=20)
