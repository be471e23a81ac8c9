"""More models than fit: the least recently used leaves, and comes back for the first request that asks for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import Cancelled, DeadlineExceeded, Draining, LoadError, NotReady, QueueFull, UnknownModel
from edge_server.serving.lifecycle.model_state import to_evict

FOR_ROOM = "unloaded: --max-resident-models are loaded; loads on request"
IDLE = "unloaded: idle; loads again on request"


def index(house: Any) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.state, entry.reason) for entry in house.manager.index()}


def set_desired(house: Any, *names: str) -> None:
    for name in names:
        house.set_desired(house.spec(name))
        assert house.manager.wait_settled([name], 20)


def resident(house: Any) -> set[str]:
    return {item.name for item in house.manager.all_ready()}


def ask(house: Any, name: str, value: float = 1.0, **more: Any) -> Any:
    return house.submit(value, model=name, **more)[1].final()


def test_only_as_many_as_allowed_are_loaded_and_the_rest_are_offered_all_the_same(new_house: Any) -> None:
    house = new_house(max_resident_models=2)
    set_desired(house, "a", "b", "c")
    assert resident(house) == {"a", "b"}
    assert index(house) == {"a": ("READY", ""), "b": ("READY", ""), "c": ("UNAVAILABLE", FOR_ROOM)}
    assert not house.manager.has_failures()
    house.service.started()
    assert house.service.is_ready()
    assert house.service.is_model_ready("c", None)
    assert house.service.is_model_ready("c", 1)
    assert house.service.model_metadata("c", None).versions == ("1",)
    assert house.service.find("c", None).spec.name == "c"
    assert house.service.find("c", 1).spec.name == "c"
    with pytest.raises(UnknownModel):
        house.service.find("c", 2)
    assert [name for name, _ in house.script.opened] == ["a_0", "b_0"], "the third was not opened to be closed again"
    (report,) = house.manager.versions("c")
    assert (report.state, report.reason, report.share) == ("RETIRED", FOR_ROOM, 0.0)


def test_a_request_brings_its_model_back_in_place_of_the_one_least_recently_used(new_house: Any) -> None:
    house = new_house(max_resident_models=2)
    set_desired(house, "a", "b", "c")
    ask(house, "b")
    ask(house, "a")
    answer = ask(house, "c", 7.0)
    assert (answer.error, answer.model, answer.version) == (None, "c", 1)
    assert float(answer.outputs[0].array[0, 0]) == 7.0
    assert resident(house) == {"a", "c"}
    assert index(house)["b"] == ("UNAVAILABLE", FOR_ROOM)
    assert ("model.evicted", "b") in [(kind, fields["model"]) for kind, fields in house.events]
    assert ask(house, "b").error is None
    assert resident(house) == {"b", "c"}


def test_a_models_own_time_or_the_last_requests_decides_when_it_is_idle(new_house: Any, eventually: Any) -> None:
    house = new_house()
    house.set_desired(house.spec("mine", parameters={"idle_unload_s": "0.01"}))
    set_desired(house, "stays")
    eventually(lambda: index(house)["mine"] == ("UNAVAILABLE", IDLE))
    assert resident(house) == {"stays"}
    house.service.set_keep_alive("mine", 3600.0)
    assert ask(house, "mine").error is None
    house.service.set_keep_alive("stays", 0.0)
    eventually(lambda: resident(house) == {"mine"})
    house.service.set_keep_alive("mine", 0.0)
    eventually(lambda: resident(house) == set())
    assert ask(house, "stays").error is None


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_an_idle_time_that_is_no_number_of_seconds_is_refused(new_house: Any, text: str) -> None:
    house = new_house()
    house.set_desired(house.spec("m", parameters={"idle_unload_s": text}))
    assert house.manager.wait_settled(["m"], 20)
    assert "parameter idle_unload_s: expected a number of seconds" in index(house)["m"][1]


def test_the_old_is_closed_before_the_new_is_opened(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    order: list[str] = []
    house.script.on_open = lambda job: order.append(f"open {job.spec.name}")
    house.script.on_close = lambda name: order.append(f"close {name}")
    ask(house, "b")
    ask(house, "a")
    assert order == ["close a_0", "open b", "close b_0", "open a"]


def test_requests_that_come_while_it_loads_share_the_one_load(new_house: Any, new_gate: Any, eventually: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    sent = [house.submit(float(number), model="b", version=number % 2 or None) for number in range(6)]
    gate.wait_entered()
    assert index(house)["b"] == ("LOADING", "")
    assert house.service.is_model_ready("b", None)
    gate.let_go()
    assert [float(mailbox.final().outputs[0].array[0, 0]) for _, mailbox in sent] == [0, 1, 2, 3, 4, 5]
    assert [name for name, _ in house.script.opened] == ["a_0", "b_0"]
    eventually(lambda: not house.manager.table._models["b"].pending)


def stop_runs(house: Any, gate: Any) -> None:
    plain = house.script.on_run

    def run(name: str, inputs: Any) -> Any:
        gate.stop()
        return plain(name, inputs)

    house.script.on_run = run


def test_a_model_in_use_is_not_evicted(new_house: Any, new_gate: Any, eventually: Any) -> None:
    house, gate = new_house(max_resident_models=1), new_gate()
    set_desired(house, "a", "b")
    stop_runs(house, gate)
    _, busy = house.submit(model="a")
    gate.wait_entered()
    _, waiting = house.submit(model="b")
    eventually(lambda: house.manager.table._models["b"].loading is not None)
    assert resident(house) == {"a"}
    gate.let_go(1)
    assert busy.final().error is None
    gate.let_go(1)
    assert waiting.final().error is None
    assert resident(house) == {"b"}


def test_a_request_that_waits_for_its_model_can_be_taken_back(new_house: Any, new_gate: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    released: list[bool] = []
    ticket, mailbox = house.submit(model="b", release=lambda: released.append(True))
    gate.wait_entered()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert released == [True]
    ticket.cancel()
    gate.let_go()
    assert house.manager.wait_settled(["b"], 20)
    assert len(mailbox.responses) == 1
    assert released == [True]


@pytest.mark.parametrize("limit", ["the request's own", "the server's"])
def test_a_request_waits_no_longer_than_its_deadline(new_house: Any, new_gate: Any, limit: str) -> None:
    is_own = limit == "the request's own"
    house = new_house(max_resident_models=1, on_demand_timeout_s=60.0 if is_own else 0.05)
    set_desired(house, "a", "b")
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    _, mailbox = house.submit(model="b", timeout_us=50_000 if is_own else 0)
    assert isinstance(mailbox.final().error, DeadlineExceeded)
    gate.let_go()


def test_a_cancel_after_the_load_reaches_the_submitted_request(new_house: Any, new_gate: Any) -> None:
    house, gate = new_house(max_resident_models=1), new_gate()
    set_desired(house, "a", "b")
    stop_runs(house, gate)
    ticket, mailbox = house.submit(model="b")
    gate.wait_entered()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    gate.let_go()


def test_a_model_that_does_not_come_back_says_why(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")

    def fail(job: Any) -> None:
        raise LoadError("the file is gone")

    house.script.on_open = fail
    released: list[bool] = []
    _, mailbox = house.submit(model="b", release=lambda: released.append(True))
    error = mailbox.final().error
    assert isinstance(error, NotReady)
    assert "the file is gone" in error.message
    assert error.retry_after_s is None
    assert released == [True]
    assert index(house)["b"] == ("UNAVAILABLE", "the file is gone")
    assert house.manager.has_failures()
    with pytest.raises(UnknownModel, match="the file is gone"):
        house.submit(model="b")


def test_a_wrong_request_is_refused_once_its_model_is_loaded_again(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    released: list[bool] = []
    answer = ask(house, "b", rows=9, release=lambda: released.append(True))
    assert "batch-size" in str(answer.error)
    assert released == [True]


def test_no_more_than_so_many_requests_wait(new_house: Any, new_gate: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge_server.serving.lifecycle.model_table._MAX_PENDING", 2)
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    sent = [house.submit(model="b")[1] for _ in range(2)]
    with pytest.raises(QueueFull):
        house.submit(model="b")
    gate.let_go()
    assert [mailbox.final().error for mailbox in sent] == [None, None]


def test_the_end_of_the_server_answers_those_that_wait(new_house: Any, new_gate: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    _, mailbox = house.submit(model="b")
    gate.wait_entered()
    house.manager.close(0.0)
    assert isinstance(mailbox.final().error, Draining)
    gate.let_go()


def test_an_idle_model_leaves_and_comes_back(new_house: Any, eventually: Any) -> None:
    house = new_house(idle_unload_s=0.05)
    set_desired(house, "a")
    eventually(lambda: index(house) == {"a": ("UNAVAILABLE", IDLE)} and len(house.script.closed) == 1)
    assert house.service.is_model_ready("a", None)
    assert ask(house, "a").error is None
    assert house.manager.versions("a")[0].generation == 2


def test_an_old_generation_that_stands_in_for_bad_files_never_leaves(new_house: Any, eventually: Any) -> None:
    house = new_house(idle_unload_s=0.02)
    set_desired(house, "a")

    def fail(job: Any) -> None:
        raise LoadError("bad")

    ask(house, "a")
    house.script.on_open = fail
    house.set_desired(house.spec("a"), mark="b")
    assert house.manager.wait_settled(["a"], 20)
    if resident(house) == {"a"}:
        assert not house.manager.table._models["a"].can_be_evicted()


def test_changed_files_of_a_model_out_of_memory_are_checked_and_wait_too(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    house.set_desired(house.spec("b", max_batch_size=4), mark="new")
    assert house.manager.wait_settled(["b"], 20)
    assert index(house)["b"] == ("UNAVAILABLE", FOR_ROOM)
    assert house.service.find("b", None).spec.max_batch_size == 4


def test_a_load_call_loads_an_evicted_model_and_a_removed_model_is_not_loaded_on_demand(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    set_desired(house, "a", "b")
    house.service.load_model("b")
    assert resident(house) == {"b"}
    house.manager.set_desired(DesiredModel("a"))
    assert not house.service.is_model_ready("a", None)
    with pytest.raises(UnknownModel):
        house.submit(model="a")


def test_all_versions_of_a_model_leave_and_come_back_together(new_house: Any) -> None:
    house = new_house(max_resident_models=1)
    house.load(house.spec("a"), 1, 2)
    set_desired(house, "b")
    ask(house, "b")
    assert house.service.model_metadata("a", None).versions == ("1", "2")
    assert ask(house, "a", version=1).version == 1
    assert house.manager.wait_settled(["a"], 20)
    assert [item.version for item in house.manager.ready_versions("a")] == [2, 1]


def test_more_models_than_fit_serve_every_request_of_many_threads(new_house: Any) -> None:
    house = new_house(max_resident_models=2)
    names = ["a", "b", "c", "d"]
    set_desired(house, *names)
    errors: list[Any] = []

    def work(start: int) -> None:
        for number in range(25):
            name = names[(start + number) % 4]
            answer = ask(house, name, float(number))
            if answer.error is not None or float(answer.outputs[0].array[0, 0]) != number or answer.model != name:
                errors.append(answer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(resident(house)) <= 2


def test_nothing_waits_where_models_stay_in_memory(house: Any, new_gate: Any) -> None:
    gate = new_gate()
    house.script.on_open = lambda job: gate.stop()
    house.set_desired(house.spec())
    gate.wait_entered()
    with pytest.raises(NotReady):
        house.submit()
    gate.let_go()


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
