"""What cannot be finished in time is not begun: on arrival, in the queue, and while the model is being loaded."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import BackendError, DeadlineExceeded, Throttled
from edge_server.serving.execution import model_version as version_module
from edge_server.serving.execution.counters import VersionCounters
from tests.kit.eventually import eventually

MS = 1_000_000
SECOND = 1_000 * MS


def in_ms(ms: float) -> int:
    return time.monotonic_ns() + int(ms * MS)


def learned(core: Any, run_ms: float, **more: Any) -> Any:
    """Load a model with a recorded run time; no run takes place."""
    version = core.load(core.spec(**more))
    now_ns = time.monotonic_ns()
    start_ns = now_ns - int(run_ms * MS)
    version._counters.record_batch([start_ns], 1, 1, start_ns, now_ns, now_ns, now_ns)
    return version


def test_a_request_with_time_enough_is_answered(core: Any) -> None:
    core.load(core.spec())
    assert core.submit(1, deadline_ns=in_ms(60_000))[1].final().error is None


def test_a_deadline_that_has_passed_is_refused_on_arrival(core: Any) -> None:
    version = core.load(core.spec())
    with pytest.raises(DeadlineExceeded, match="deadline of the request to model 'm' passed before"):
        core.submit(deadline_ns=in_ms(-1))
    assert core.script.ran == []
    assert version.statistics().failures["REJECTED"] == 1


def test_what_takes_longer_than_there_is_time_is_refused_on_arrival(core: Any) -> None:
    learned(core, 500)
    with pytest.raises(DeadlineExceeded, match=r"takes about 500\.0 ms, and the request's deadline is in \d"):
        core.submit(deadline_ns=in_ms(100))
    assert core.script.ran == []


def test_a_waiting_request_expires_when_it_is_too_late_to_begin(core: Any, blocker: Any) -> None:
    learned(core, 30_000)
    core.submit()
    blocker.wait_blocked()
    asked_ns = time.monotonic_ns()
    _, waiting = core.submit(deadline_ns=in_ms(30_050))
    assert isinstance(waiting.final().error, DeadlineExceeded)
    assert time.monotonic_ns() - asked_ns < 30 * SECOND
    blocker.release()


def test_a_deadline_counts_also_where_the_queue_serves_late_requests(core: Any, blocker: Any) -> None:
    """Timeout action DELAY: the timeout only puts it behind the others, the deadline ends it."""
    policy = QueuePolicy(TimeoutAction.DELAY, 1_000, True)
    core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=policy)))
    core.submit()
    blocker.wait_blocked()
    _, late = core.submit(1)
    _, lost = core.submit(2, deadline_ns=in_ms(20))
    assert isinstance(lost.final().error, DeadlineExceeded)
    blocker.release(2)
    assert late.final().error is None


def test_a_model_that_became_faster_finds_out_although_all_requests_have_deadlines(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = learned(core, 20)
    monkeypatch.setattr(version_module, "_RETRY_AFTER_NS", 0)
    end = time.monotonic() + 20
    refused = answered = 0
    while answered < 3:
        assert time.monotonic() < end, "it is refused for ever"
        try:
            _, mailbox = core.submit(deadline_ns=in_ms(15))
        except DeadlineExceeded:
            refused += 1
            continue
        answered += mailbox.final().error is None
    assert refused > 0
    assert version.statistics().execution_count >= 4


def test_while_a_model_runs_nothing_hopeless_is_tried(core: Any) -> None:
    learned(core, 500)
    for _ in range(20):
        with pytest.raises(DeadlineExceeded):
            core.submit(deadline_ns=in_ms(100))


def test_a_pending_request_is_given_up_at_its_deadline(new_core: Any) -> None:
    core = new_core(idle_unload_s=0.05)
    core.set_desired(core.spec())
    assert eventually(lambda: bool(core.router.versions("m")) and core.router.versions("m")[0].state == "RETIRED")
    stop = core.block_loads()
    _, waiting = core.submit(deadline_ns=in_ms(50))
    stop.wait_blocked()
    assert isinstance(waiting.final().error, DeadlineExceeded)
    stop.release()


def test_one_slow_run_says_less_than_one_fast_run() -> None:
    counters = VersionCounters("m", 1)

    def run(ms: int) -> float:
        counters.record_batch([0], 1, 1, 0, 0, 0, ms * MS)
        return counters.run_ns / MS

    assert run(10) == 10
    assert run(110) == pytest.approx(20)
    assert run(10) == pytest.approx(15)


def test_the_time_of_a_row_is_its_part_of_the_batch() -> None:
    counters = VersionCounters("m", 1)
    counters.record_batch([0], 4, 4, 0, 0, 0, 40 * MS)
    assert (counters.run_ns, counters.item_ns) == (40 * MS, 10 * MS)


def test_heat_is_a_rejection_but_no_fault_of_the_version() -> None:
    counters = VersionCounters("m", 1)
    seen: list[int | None] = []
    counters.observe(seen.append)
    counters.record_failure(Throttled("hot"), 0, 1)
    assert counters.snapshot(0).failures["REJECTED"] == 1
    assert seen == []
    counters.record_failure(BackendError("broken"), 0, 1, in_backend=True)
    assert seen == [None]


def test_answers_say_when_they_began_and_with_how_many(core: Any) -> None:
    before_ns = time.monotonic_ns()
    core.load(core.spec())
    response = core.submit(rows=3)[1].final()
    assert before_ns < response.started_ns < time.monotonic_ns()
    assert response.batch_size == 3
    assert np.asarray(response.outputs[0].array).shape == (3, 1)
