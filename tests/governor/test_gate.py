"""The gate between the law and those who ask: from many threads, in plain words, and with counts that add up."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority import PriorityClass, priority_class
from edge_server.core.request_response import Request
from edge_server.errors import BadModelConfig, ErrorCode, Throttled
from edge_server.governor.admission_control import GovernorGate
from edge_server.governor.control_policy import Cause, PolicyDecision, ThermalLevel

CONTROL, NORMAL, BULK = PriorityClass
HOT = PolicyDecision(ThermalLevel.HOT, 0.3, heat_share=0.3, limited_by="heat", detail="96 °C, to be kept at 95 °C")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _spec(priority_class: str | None = None) -> ModelSpec:
    parameters = {} if priority_class is None else {"priority_class": priority_class}
    return ModelSpec("detector", "stub", "", 0, (), (), (), parameters=parameters)


def _request(priority: int = 0) -> Request:
    return Request("detector", {}, priority=priority)


def _exhaust(gate: GovernorGate, priority: int = 0) -> Throttled:
    for _ in range(1000):
        try:
            gate.admit(_spec(), _request(priority), 0.05)
        except Throttled as error:
            return error
    raise AssertionError("nothing was ever refused")


@pytest.mark.parametrize("text", ["control", " Bulk ", "NORMAL"])
def test_a_model_declares_its_class(text: str) -> None:
    assert priority_class(_spec(text)).name == text.strip().upper()


def test_a_model_that_declares_no_class_is_normal() -> None:
    assert priority_class(_spec()) is NORMAL


@pytest.mark.parametrize("text", ["", "urgent", "1"])
def test_a_class_that_there_is_not_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(BadModelConfig, match=r"'detector'.*'priority_class'.*control, normal or bulk, given"):
        priority_class(_spec(text))


def test_an_open_gate_charges_a_request_and_refuses_nobody() -> None:
    gate = GovernorGate()
    assert (gate.is_open, gate.share) == (True, 1.0)
    assert gate.refuse_frame(3) is None
    assert gate.state().level == "NORMAL"


def test_a_refusal_says_why_in_plain_words_and_when_to_come_back() -> None:
    clock = Clock()
    gate = GovernorGate(clock=clock)
    gate.apply(HOT, 1.0)
    error = _exhaust(gate)
    assert (error.code, error.state) == (ErrorCode.RESOURCE_EXHAUSTED, "HOT")
    assert str(error) == (
        "model 'detector' takes no more normal requests for now: the box is HOT: 96 °C, to be kept at 95 °C"
    )
    assert error.retry_after_s is not None
    assert 0.05 <= error.retry_after_s < 1.0
    clock.now_s += error.retry_after_s
    assert gate.admit(_spec(), _request(), 0.05) > 0


def test_a_request_s_own_priority_goes_before_the_model_s_class() -> None:
    gate = GovernorGate(clock=Clock())
    gate.apply(HOT, 1.0)
    _exhaust(gate)
    with pytest.raises(Throttled, match="bulk"):
        gate.admit(_spec("control"), _request(3), 0.01)
    assert gate.admit(_spec("bulk"), _request(1), 0.01) > 0
    assert gate.admit(_spec("control"), _request(), 0.01) > 0


def test_work_whose_cost_is_not_known_yet_is_charged_and_settled_by_what_it_took() -> None:
    clock = Clock()
    gate = GovernorGate(clock=clock)
    gate.apply(HOT, 1.0)
    charged_s = gate.admit(_spec(), _request(), 0.0)
    assert 0 < charged_s < 1e-6
    gate.settle(charged_s, 2.0)
    with pytest.raises(Throttled) as caught:
        gate.admit(_spec(), _request(), 0.0)
    assert caught.value.retry_after_s == pytest.approx(2.0 / 0.3, abs=0.5)


def test_a_plain_number_can_be_settled_too() -> None:
    gate = GovernorGate(clock=Clock())
    gate.apply(HOT, 1.0)
    gate.settle(0.01, 0.01)


def test_short_of_memory_only_bulk_is_refused_and_counted_as_such() -> None:
    gate = GovernorGate(clock=Clock())
    gate.apply(
        PolicyDecision(ThermalLevel.WARM, sheds_bulk=True, causes=frozenset({Cause.MEMORY}), detail="tasks wait"), 1.0
    )
    assert not gate.is_open
    assert gate.refuse_frame(3) == "the box is WARM: tasks wait"
    assert gate.refuse_frame(2) is None
    with pytest.raises(Throttled, match="tasks wait"):
        gate.admit(_spec("bulk"), _request(), 0.01)
    assert gate.shed() == {(BULK, "memory"): 2}


def test_when_critical_nothing_but_control_goes_on() -> None:
    gate = GovernorGate(clock=Clock())
    gate.apply(PolicyDecision(ThermalLevel.CRITICAL, 0.9, limited_by="heat", sheds_bulk=True, only_control=True), 1.0)
    assert gate.refuse_frame(2) is not None
    assert gate.refuse_frame(1) is None
    assert gate.shed() == {(NORMAL, "critical"): 1}


@pytest.mark.parametrize("word", ["heat", "power_budget", "sensor_lost", "thermal"])
def test_refusals_are_counted_under_what_holds_the_share_down(word: str) -> None:
    gate = GovernorGate(clock=Clock())
    causes = frozenset({Cause.OVER_CURRENT, Cause.POWER_MODE})
    gate.apply(PolicyDecision(ThermalLevel.WARM, 0.3, limited_by=word, causes=causes), 1.0)
    _exhaust(gate)
    assert gate.shed() == {(NORMAL, word): 1}


def test_a_box_that_is_well_again_opens_the_gate() -> None:
    gate = GovernorGate(clock=Clock())
    gate.apply(HOT, 1.0)
    assert (gate.is_open, gate.share, gate.state().detail) == (False, 0.3, HOT.detail)
    gate.apply(PolicyDecision(), 1.0)
    assert (gate.is_open, gate.share, gate.decision) == (True, 1.0, PolicyDecision())


@pytest.mark.sample
@pytest.mark.parametrize("share", [0.12, 0.3, 0.5])
@pytest.mark.parametrize("priority", [2, 3])
def test_equal_streams_that_come_in_step_lose_frames_evenly(share: float, priority: int) -> None:
    clock = Clock()
    gate = GovernorGate(0.0, clock, seed=1)
    gate.apply(PolicyDecision(ThermalLevel.HOT, share, limited_by="heat"), 1.0)
    taken: Counter[int] = Counter()
    for _ in range(3600):
        for stream in range(4):
            clock.now_s += 1 / 120
            if gate.refuse_frame(priority) is None:
                charged_s = gate.admit(_spec(), _request(priority), 0.01)
                gate.settle(charged_s, 0.01)
                taken[stream] += 1
    assert sum(taken.values()) * 0.01 == pytest.approx(share * 120, rel=0.05)
    assert min(taken.values()) > 0.8 * max(taken.values())


def test_asking_from_many_threads_every_refusal_is_counted_once_and_no_charge_is_lost() -> None:
    gate = GovernorGate()
    gate.apply(HOT, 1.0)
    refused: Counter[PriorityClass] = Counter()
    lock = threading.Lock()

    def ask(priority: int) -> None:
        mine = 0
        for index in range(500):
            try:
                charged_s = gate.admit(_spec(), _request(priority), 0.01)
            except Throttled:
                mine += 1
            else:
                gate.settle(charged_s, 0.0 if index % 2 else 0.01)
            if gate.refuse_frame(priority) is not None:
                mine += 1
            if index % 50 == 0:
                gate.apply(HOT, 1.0)
        with lock:
            refused[PriorityClass.of_priority(priority)] += mine

    threads = [threading.Thread(target=ask, args=(1 + index % 3,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused[BULK] > 0
    counted: Counter[PriorityClass] = Counter()
    for (priority, _), count in gate.shed().items():
        counted[priority] += count
    assert counted == refused


def test_whether_the_gate_is_open_is_a_plain_attribute_that_costs_nothing_to_look_at() -> None:
    assert "is_open" in vars(GovernorGate())
    assert not hasattr(type(GovernorGate()), "is_open")
