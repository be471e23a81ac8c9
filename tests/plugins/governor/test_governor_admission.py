"""Admission control of the governor: thread safety, texts of rejections, and complete counts."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from edge_server.core.model_spec import ModelSpec
from edge_server.core.priority_class import PriorityClass, priority_class
from edge_server.core.request_response import Request
from edge_server.errors import BadModelConfig, ErrorCode, Throttled
from edge_server.plugins.governor.control_policy import Cause, PolicyDecision, ThermalLevel
from edge_server.plugins.governor.governor_admission import GovernorAdmission

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


def _exhaust(admission: GovernorAdmission, priority: int = 0) -> Throttled:
    for _ in range(1000):
        try:
            admission.admit(_spec(), _request(priority), 0.05)
        except Throttled as error:
            return error
    raise AssertionError("nothing was ever refused")


@pytest.mark.parametrize("text", ["control", " Bulk ", "NORMAL"])
def test_a_model_declares_its_class(text: str) -> None:
    assert priority_class(_spec(text)).name == text.strip().upper()


def test_a_model_that_declares_no_class_is_normal() -> None:
    assert priority_class(_spec()) is NORMAL


@pytest.mark.parametrize("text", ["", "urgent", "1"])
def test_an_unknown_class_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(BadModelConfig, match=r"'detector'.*'priority_class'.*control, normal or bulk, given"):
        priority_class(_spec(text))


def test_without_limits_requests_are_charged_and_never_rejected() -> None:
    admission = GovernorAdmission()
    assert (admission.is_open, admission.allowed_fraction) == (True, 1.0)
    assert admission.refuse_frame("m", 3) is None
    assert admission.state().level == "NORMAL"


def test_a_refusal_has_a_reason_and_a_retry_time() -> None:
    clock = Clock()
    admission = GovernorAdmission(clock=clock)
    admission.apply(HOT, 1.0)
    error = _exhaust(admission)
    assert (error.code, error.state) == (ErrorCode.RESOURCE_EXHAUSTED, "HOT")
    assert str(error) == (
        "model 'detector' takes no more normal requests for now: the box is HOT: 96 °C, to be kept at 95 °C"
    )
    assert error.retry_after_s is not None
    assert 0.05 <= error.retry_after_s < 1.0
    clock.now_s += error.retry_after_s
    assert admission.admit(_spec(), _request(), 0.05) > 0


def test_the_priority_of_a_request_overrides_the_class_of_its_model() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(HOT, 1.0)
    _exhaust(admission)
    with pytest.raises(Throttled, match="bulk"):
        admission.admit(_spec("control"), _request(3), 0.01)
    assert admission.admit(_spec("bulk"), _request(1), 0.01) > 0
    assert admission.admit(_spec("control"), _request(), 0.01) > 0


def test_work_of_unknown_cost_is_charged_an_estimate_and_corrected_afterwards() -> None:
    clock = Clock()
    admission = GovernorAdmission(clock=clock)
    admission.apply(HOT, 1.0)
    charged_s = admission.admit(_spec(), _request(), 0.0)
    assert 0 < charged_s < 1e-6
    admission.correct_charge(charged_s, 2.0)
    with pytest.raises(Throttled) as caught:
        admission.admit(_spec(), _request(), 0.0)
    assert caught.value.retry_after_s == pytest.approx(2.0 / 0.3, abs=0.5)


def test_a_plain_number_can_be_corrected_too() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(HOT, 1.0)
    admission.correct_charge(0.01, 0.01)


def test_under_memory_pressure_only_bulk_is_refused() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(
        PolicyDecision(ThermalLevel.WARM, sheds_bulk=True, causes=frozenset({Cause.MEMORY}), detail="tasks wait"), 1.0
    )
    assert not admission.is_open
    assert admission.refuse_frame("m", 3) == "the box is WARM: tasks wait"
    assert admission.refuse_frame("m", 2) is None
    with pytest.raises(Throttled, match="tasks wait"):
        admission.admit(_spec("bulk"), _request(), 0.01)
    assert admission.shed() == {(BULK, "memory"): 2}


def test_in_state_critical_only_control_is_admitted() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(
        PolicyDecision(ThermalLevel.CRITICAL, 0.9, limited_by="heat", sheds_bulk=True, only_control=True), 1.0
    )
    assert admission.refuse_frame("m", 2) is not None
    assert admission.refuse_frame("m", 1) is None
    assert admission.shed() == {(NORMAL, "critical"): 1}


def test_refused_frames_are_counted_by_model_without_the_one_of_each_refused_request() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(PolicyDecision(ThermalLevel.CRITICAL, 0.9, only_control=True), 1.0)
    admission.refuse_frame("eyes", 2)
    admission.refuse_frame("eyes", 1)
    with pytest.raises(Throttled):
        admission.admit(_spec("bulk"), _request(), 0.01)
    admission.count_refused("ears", 3)
    admission.count_refused("ears", 3)
    assert admission.refused_frames() == {"eyes": 1, "ears": 2}


@pytest.mark.parametrize("word", ["heat", "power_budget", "sensor_lost", "thermal"])
def test_refusals_are_counted_by_the_limiting_cause(word: str) -> None:
    admission = GovernorAdmission(clock=Clock())
    causes = frozenset({Cause.OVER_CURRENT, Cause.POWER_MODE})
    admission.apply(PolicyDecision(ThermalLevel.WARM, 0.3, limited_by=word, causes=causes), 1.0)
    _exhaust(admission)
    assert admission.shed() == {(NORMAL, word): 1}


def test_a_recovered_machine_admits_everything_again() -> None:
    admission = GovernorAdmission(clock=Clock())
    admission.apply(HOT, 1.0)
    assert (admission.is_open, admission.allowed_fraction, admission.state().detail) == (False, 0.3, HOT.detail)
    admission.apply(PolicyDecision(), 1.0)
    assert (admission.is_open, admission.allowed_fraction, admission.decision) == (True, 1.0, PolicyDecision())


@pytest.mark.sample
@pytest.mark.parametrize("share", [0.12, 0.3, 0.5])
@pytest.mark.parametrize("priority", [2, 3])
def test_equal_synchronous_streams_lose_frames_evenly(share: float, priority: int) -> None:
    clock = Clock()
    admission = GovernorAdmission(0.0, clock, seed=1)
    admission.apply(PolicyDecision(ThermalLevel.HOT, share, limited_by="heat"), 1.0)
    taken: Counter[int] = Counter()
    for _ in range(3600):
        for stream in range(4):
            clock.now_s += 1 / 120
            if admission.refuse_frame("m", priority) is None:
                charged_s = admission.admit(_spec(), _request(priority), 0.01)
                admission.correct_charge(charged_s, 0.01)
                taken[stream] += 1
    assert sum(taken.values()) * 0.01 == pytest.approx(share * 120, rel=0.05)
    assert min(taken.values()) > 0.8 * max(taken.values())


def test_refusals_and_charges_are_exact_with_many_threads() -> None:
    admission = GovernorAdmission()
    admission.apply(HOT, 1.0)
    refused: Counter[PriorityClass] = Counter()
    lock = threading.Lock()

    def ask(priority: int) -> None:
        mine = 0
        for index in range(500):
            try:
                charged_s = admission.admit(_spec(), _request(priority), 0.01)
            except Throttled:
                mine += 1
            else:
                admission.correct_charge(charged_s, 0.0 if index % 2 else 0.01)
            if admission.refuse_frame("m", priority) is not None:
                mine += 1
            if index % 50 == 0:
                admission.apply(HOT, 1.0)
        with lock:
            refused[PriorityClass.of_priority(priority)] += mine

    threads = [threading.Thread(target=ask, args=(1 + index % 3,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused[BULK] > 0
    counted: Counter[PriorityClass] = Counter()
    for (priority, _), count in admission.shed().items():
        counted[priority] += count
    assert counted == refused


def test_is_open_is_a_plain_attribute() -> None:
    assert "is_open" in vars(GovernorAdmission())
    assert not hasattr(type(GovernorAdmission()), "is_open")
