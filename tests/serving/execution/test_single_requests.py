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
    core: Any, monkeypatch: pytest.MonkeyPatch, batching: DynamicBatching | None
) -> None:
    version = core.load(core.spec(dynamic_batching=batching))
    offered: list[object] = []
    monkeypatch.setattr(version._scheduler._queue, "offer", lambda entry, item: offered.append(item))
    for may_run in (True, False):
        _, mailbox = core.submit(1.0, may_run=may_run)
        assert mailbox.final().error is None
        version._scheduler.close(lambda: Draining("for the moment"))
        assert version._scheduler.wait_idle(20)
        with version._scheduler._lock:
            version._scheduler._refusal = None
    assert offered == []
    assert version.statistics().queue.count == 2


def test_a_request_does_not_overtake_one_that_waits(core: Any, blocker: Any) -> None:
    core.load(core.spec(max_batch_size=1))
    answers = [core.submit(1)[1]]
    blocker.wait_blocked()
    answers += [core.submit(number, may_run=True)[1] for number in (2, 3)]
    blocker.release(3)
    assert [mailbox.final().error for mailbox in answers] == [None] * 3
    assert [int(mailbox.final().outputs[0].array[0, 0]) for mailbox in answers] == [1, 2, 3]
    assert len(core.script.ran) == 3


def test_a_batch_that_is_to_wait_for_company_waits(core: Any) -> None:
    version = core.load(core.spec(dynamic_batching=DynamicBatching((2,), max_queue_delay_us=60_000_000)))
    _, first = core.submit(1)
    assert version.statistics().pending_count == 1
    _, second = core.submit(2)
    assert first.final().error is second.final().error is None
    assert [rows for _, _, rows in core.script.ran] == [2]


def test_a_request_whose_own_time_is_over_expires_though_an_instance_is_free(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=TIMED)))
    offer = version._scheduler._queue.offer

    def offer_late(entry: Any, item: Any) -> None:
        entry.arrived_ns -= 1_000_000
        offer(entry, item)

    monkeypatch.setattr(version._scheduler._queue, "offer", offer_late)
    _, mailbox = core.submit(1, timeout_us=1)
    assert isinstance(mailbox.final().error, DeadlineExceeded)
    assert core.script.ran == []


def test_the_limit_of_a_queue_counts_those_who_wait_and_not_the_one_that_runs(core: Any, blocker: Any) -> None:
    core.load(core.spec(max_batch_size=1, dynamic_batching=DynamicBatching((1,), default_queue_policy=LIMITED)))
    _, runs = core.submit(1)
    blocker.wait_blocked()
    _, waits = core.submit(2)
    with pytest.raises(QueueFull):
        core.submit(3)
    blocker.release(2)
    assert runs.final().error is waits.final().error is None


def test_a_single_request_that_runs_is_cancelled_at_once_and_frees_its_instance_later(core: Any, blocker: Any) -> None:
    version = core.load(core.spec())
    released = threading.Event()
    ticket, mailbox = core.submit(1, release=released.set)
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert not released.is_set()
    assert version.in_flight == 1
    blocker.release(2)
    assert released.wait(20)
    assert core.submit(2)[1].final().error is None
    assert len(mailbox.responses) == 1


def test_a_running_single_request_is_answered_before_its_version_is_closed(core: Any, blocker: Any) -> None:
    core.load(core.spec())
    _, mailbox = core.submit(1)
    blocker.wait_blocked()
    core.set_desired(core.spec())
    core.service.unload_model("m")
    assert core.script.closed == []
    blocker.release()
    assert mailbox.final().error is None


def test_two_instances_take_two_single_requests_at_once(core: Any, blocker: Any) -> None:
    core.load(core.spec(instances=2))
    answers = [core.submit(number)[1] for number in (1, 2)]
    blocker.wait_blocked()
    blocker.wait_blocked()
    blocker.release(2)
    assert [mailbox.final().error for mailbox in answers] == [None, None]


def test_what_waits_behind_a_callers_run_goes_on_on_the_instances_thread(core: Any, blocker: Any) -> None:
    core.load(core.spec(max_batch_size=1))
    caller = threading.Thread(target=lambda: core.submit(1, may_run=True))
    caller.start()
    blocker.wait_blocked()
    _, waits = core.submit(2)
    blocker.release(2)
    assert waits.final().error is None
    caller.join()
    assert [thread is caller for _, thread, _ in core.script.ran] == [True, False]


def test_a_run_that_fails_past_the_queue_fails_its_request_alone(core: Any) -> None:
    version = core.load(core.spec())

    def fail(name: str, inputs: Any) -> Any:
        raise ValueError("not today")

    plain, core.script.on_run = core.script.on_run, fail
    _, failed = core.submit(1, may_run=True)
    assert isinstance(failed.final().error, EdgeServerError)
    core.script.on_run = plain
    assert core.submit(2, may_run=True)[1].final().error is None
    told = version.statistics()
    assert (told.failures["BACKEND"], told.success.count, version.in_flight) == (1, 1, 0)


def test_a_deadline_in_the_future_does_not_delay_a_single_request(core: Any) -> None:
    core.load(core.spec())
    _, mailbox = core.submit(1, may_run=True, deadline_ns=time.monotonic_ns() + 60_000_000_000)
    assert mailbox.final().error is None
