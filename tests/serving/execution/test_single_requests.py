"""A request that meets an empty queue and a free instance goes past the queue: nothing else may be different."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from edge_server.core.model_spec import DynamicBatching, QueuePolicy
from edge_server.errors import Cancelled, DeadlineExceeded, Draining, EdgeServerError, QueueFull

PLAIN = [None, DynamicBatching((8,)), DynamicBatching((2, 8), preserve_ordering=True)]
LIMITED = QueuePolicy(max_queue_size=1)
TIMED = QueuePolicy(allow_timeout_override=True)


@pytest.mark.parametrize("batching", PLAIN)
def test_a_single_request_skips_the_queue(
    house: Any, monkeypatch: pytest.MonkeyPatch, batching: DynamicBatching | None
) -> None:
    version = house.load(house.spec(dynamic_batching=batching))
    offered: list[object] = []
    monkeypatch.setattr(version._scheduler._queue, "offer", lambda entry, item: offered.append(item))
    for may_run in (True, False):
        _, mailbox = house.submit(1.0, may_run=may_run)
        assert mailbox.final().error is None
        version._scheduler.close(lambda: Draining("for the moment"))
        assert version._scheduler.wait_idle(20)
        with version._scheduler._lock:
            version._scheduler._refusal = None
    assert offered == []
    assert version.statistics().queue.count == 2


def test_a_request_does_not_overtake_one_that_waits(house: Any, gate: Any) -> None:
    house.load(house.spec(max_batch_size=1))
    answers = [house.submit(1)[1]]
    gate.wait_entered()
    answers += [house.submit(number, may_run=True)[1] for number in (2, 3)]
    gate.let_go(3)
    assert [mailbox.final().error for mailbox in answers] == [None] * 3
    assert [int(mailbox.final().outputs[0].array[0, 0]) for mailbox in answers] == [1, 2, 3]
    assert len(house.script.ran) == 3


def test_a_batch_that_is_to_wait_for_company_waits(house: Any) -> None:
    version = house.load(house.spec(dynamic_batching=DynamicBatching((2,), max_queue_delay_us=60_000_000)))
    _, first = house.submit(1)
    assert version.statistics().pending_count == 1
    _, second = house.submit(2)
    assert first.final().error is second.final().error is None
    assert [rows for _, _, rows in house.script.ran] == [2]


def test_a_request_whose_own_time_is_over_expires_though_an_instance_is_free(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = house.load(house.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=TIMED)))
    offer = version._scheduler._queue.offer

    def offer_late(entry: Any, item: Any) -> None:
        entry.arrived_ns -= 1_000_000
        offer(entry, item)

    monkeypatch.setattr(version._scheduler._queue, "offer", offer_late)
    _, mailbox = house.submit(1, timeout_us=1)
    assert isinstance(mailbox.final().error, DeadlineExceeded)
    assert house.script.ran == []


def test_the_limit_of_a_queue_counts_those_who_wait_and_not_the_one_that_runs(house: Any, gate: Any) -> None:
    house.load(house.spec(max_batch_size=1, dynamic_batching=DynamicBatching((1,), default_queue_policy=LIMITED)))
    _, runs = house.submit(1)
    gate.wait_entered()
    _, waits = house.submit(2)
    with pytest.raises(QueueFull):
        house.submit(3)
    gate.let_go(2)
    assert runs.final().error is waits.final().error is None


def test_a_single_request_that_runs_is_cancelled_at_once_and_frees_its_instance_later(house: Any, gate: Any) -> None:
    version = house.load(house.spec())
    released = threading.Event()
    ticket, mailbox = house.submit(1, release=released.set)
    gate.wait_entered()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert not released.is_set()
    assert version.in_flight == 1
    gate.let_go(2)
    assert released.wait(20)
    assert house.submit(2)[1].final().error is None
    assert len(mailbox.responses) == 1


def test_a_running_single_request_is_answered_before_its_version_is_closed(house: Any, gate: Any) -> None:
    house.load(house.spec())
    _, mailbox = house.submit(1)
    gate.wait_entered()
    house.set_desired(house.spec())
    house.service.unload_model("m")
    assert house.script.closed == []
    gate.let_go()
    assert mailbox.final().error is None


def test_two_instances_take_two_single_requests_at_once(house: Any, gate: Any) -> None:
    house.load(house.spec(instances=2))
    answers = [house.submit(number)[1] for number in (1, 2)]
    gate.wait_entered()
    gate.wait_entered()
    gate.let_go(2)
    assert [mailbox.final().error for mailbox in answers] == [None, None]


def test_what_waits_behind_a_callers_run_goes_on_on_the_instances_thread(house: Any, gate: Any) -> None:
    house.load(house.spec(max_batch_size=1))
    caller = threading.Thread(target=lambda: house.submit(1, may_run=True))
    caller.start()
    gate.wait_entered()
    _, waits = house.submit(2)
    gate.let_go(2)
    assert waits.final().error is None
    caller.join()
    assert [thread is caller for _, thread, _ in house.script.ran] == [True, False]


def test_a_run_that_fails_past_the_queue_fails_its_request_alone(house: Any) -> None:
    version = house.load(house.spec())

    def fail(name: str, inputs: Any) -> Any:
        raise ValueError("not today")

    plain, house.script.on_run = house.script.on_run, fail
    _, failed = house.submit(1, may_run=True)
    assert isinstance(failed.final().error, EdgeServerError)
    house.script.on_run = plain
    assert house.submit(2, may_run=True)[1].final().error is None
    told = version.statistics()
    assert (told.failures["BACKEND"], told.success.count, version.in_flight) == (1, 1, 0)


def test_a_deadline_in_the_future_does_not_delay_a_single_request(house: Any) -> None:
    house.load(house.spec())
    _, mailbox = house.submit(1, may_run=True, deadline_ns=time.monotonic_ns() + 60_000_000_000)
    assert mailbox.final().error is None
