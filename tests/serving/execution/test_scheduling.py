"""Scheduling with real threads and sessions that block: batches, instances, order."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import DeadlineExceeded, InvalidRequest, QueueFull
from tests.kit.eventually import eventually
from tests.kit.together import together

BATCHING = DynamicBatching((8,))


def value(response: Any) -> float:
    assert response.error is None
    return float(response.outputs[0].array.flat[0])


@pytest.mark.sample
@pytest.mark.parametrize("batching", [None, BATCHING, DynamicBatching((4,), max_queue_delay_us=200)])
@pytest.mark.parametrize("may_run", [False, True])
def test_many_submitters_each_get_their_own_answer_and_the_counts_agree(
    core: Any, batching: DynamicBatching | None, may_run: bool
) -> None:
    version = core.load(core.spec(instances=2, dynamic_batching=batching))
    start = threading.Barrier(8)
    wrong: list[float] = []

    def work(first: int) -> None:
        start.wait()
        mailboxes = [(number, core.submit(number, may_run=may_run)[1]) for number in range(first, first + 50)]
        wrong.extend(number for number, mailbox in mailboxes if value(mailbox.final()) != number)

    together(lambda index: work(1000 * index), range(8))
    assert wrong == []
    told = version.statistics()
    assert told.success.count == told.queue.count == told.compute_infer.count == told.inference_count == 400
    assert told.execution_count == len(core.script.ran)
    assert {size: batch.compute_infer.count for size, batch in told.batches.items()} == Counter(
        rows for _, _, rows in core.script.ran
    )
    assert sum(rows for _, _, rows in core.script.ran) == 400
    assert told.fail.count == told.pending_count == 0
    assert told.last_inference_ms > 0


def test_batches_form_while_the_instance_is_busy(core: Any, blocker: Any) -> None:
    core.load(core.spec(dynamic_batching=BATCHING))
    _, first = core.submit(1)
    blocker.wait_blocked()
    others = [core.submit(number, rows=2)[1] for number in (2, 3, 4, 5, 6)]
    blocker.release(3)
    assert [value(mailbox.final()) for mailbox in [first, *others]] == [1, 2, 3, 4, 5, 6]
    assert [rows for _, _, rows in core.script.ran] == [1, 8, 2]


def test_two_free_instances_take_two_batches_from_one_event(core: Any, blocker: Any) -> None:
    """A request that fills no batch with those before it, and is one itself, leaves nothing to wait for."""
    core.load(core.spec(instances=2, dynamic_batching=DynamicBatching((8,), max_queue_delay_us=60_000_000)))
    _, small = core.submit(1, rows=6)
    _, big = core.submit(2, rows=8)
    blocker.wait_blocked()
    blocker.wait_blocked()
    blocker.release(2)
    assert (value(small.final()), value(big.final())) == (1, 2)


def test_the_queue_delay_ends_without_a_further_request(core: Any) -> None:
    core.load(core.spec(dynamic_batching=DynamicBatching((8,), max_queue_delay_us=2_000)))
    mailboxes = [core.submit(number)[1] for number in (1, 2)]
    assert [value(mailbox.final()) for mailbox in mailboxes] == [1, 2]


def test_requests_of_different_shapes_run_apart(core: Any, blocker: Any) -> None:
    core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(0)
    blocker.wait_blocked()
    mailboxes = [core.submit(number, width=width)[1] for number, width in ((1, 2), (2, 2), (3, 5), (4, 2))]
    blocker.release(4)
    assert [mailbox.final().outputs[0].shape for mailbox in mailboxes] == [(1, 2), (1, 2), (1, 5), (1, 2)]
    assert [rows for _, _, rows in core.script.ran] == [1, 2, 1, 1]


def test_a_caller_that_may_run_computes_its_answer_itself(core: Any) -> None:
    core.load(core.spec())
    _, mailbox = core.submit(7, may_run=True)
    assert value(mailbox.responses[0]) == 7
    assert mailbox.threads == [threading.current_thread()]
    assert core.script.ran[0][1] is threading.current_thread()


def test_one_that_may_not_run_never_does(core: Any) -> None:
    core.load(core.spec())
    core.submit(7)[1].final()
    assert core.script.ran[0][1] is core.script.opened[0][1]


def test_a_caller_works_for_one_batch_only_and_the_queue_goes_on_to_the_instances_thread(
    core: Any, blocker: Any
) -> None:
    core.load(core.spec())
    own: list[Any] = []
    caller = threading.Thread(target=lambda: own.append(core.submit(1, may_run=True)[1]))
    caller.start()
    blocker.wait_blocked()
    waiting = [core.submit(number, may_run=True)[1] for number in (2, 3, 4)]
    blocker.release(1)
    caller.join(20)
    assert not caller.is_alive()
    blocker.release(3)
    assert [value(mailbox.final()) for mailbox in [*own, *waiting]] == [1, 2, 3, 4]
    instance_thread = core.script.opened[0][1]
    assert [thread for _, thread, _ in core.script.ran] == [caller, *[instance_thread] * 3]


def test_a_full_queue_refuses_at_once_and_counts_it_as_rejected(core: Any, blocker: Any) -> None:
    policy = QueuePolicy(max_queue_size=2)
    version = core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=policy)))
    released: list[str] = []
    core.submit(1)
    blocker.wait_blocked()
    waiting = [core.submit(number)[1] for number in (2, 3)]
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        core.submit(4, release=lambda: released.append("four"))
    assert released == ["four"]
    assert version.statistics().failures["REJECTED"] == 1
    assert version.statistics().pending_count == 2
    blocker.release(2)
    assert [value(mailbox.final()) for mailbox in waiting] == [2, 3]


def test_a_wrong_request_is_refused_before_it_is_queued(core: Any) -> None:
    version = core.load(core.spec())
    with pytest.raises(InvalidRequest, match="batch-size must be <= 8"):
        core.submit(rows=9)
    assert version.in_flight == 0


def test_a_request_expires_promptly_while_the_only_instance_hangs(core: Any, blocker: Any) -> None:
    policy = QueuePolicy(TimeoutAction.REJECT, 60_000_000, allow_timeout_override=True)
    version = core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=policy)))
    _, hung = core.submit(1)
    blocker.wait_blocked()
    _, patient = core.submit(2)
    _, impatient = core.submit(3, timeout_us=1_000)
    error = impatient.final().error
    assert isinstance(error, DeadlineExceeded)
    assert "Request timeout expired" in error.message
    assert hung.responses == patient.responses == []
    assert version.statistics().failures["REJECTED"] == 1
    assert eventually(lambda: version.in_flight == 2)
    blocker.release(2)
    assert (value(hung.final()), value(patient.final())) == (1, 2)


def test_a_time_limit_beyond_all_clocks_does_not_hurt_the_timer(core: Any, blocker: Any) -> None:
    policy = QueuePolicy(TimeoutAction.REJECT, 0, allow_timeout_override=True)
    core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=policy)))
    core.submit(1)
    blocker.wait_blocked()
    _, eternal = core.submit(2, timeout_us=2**70)
    _, impatient = core.submit(3, timeout_us=1)
    assert isinstance(impatient.final().error, DeadlineExceeded)
    _, impatient = core.submit(4, timeout_us=1)
    assert isinstance(impatient.final().error, DeadlineExceeded)
    blocker.release(2)
    assert value(eternal.final()) == 2


def test_a_late_request_is_served_after_others_when_its_policy_says_so(core: Any, blocker: Any) -> None:
    policy = QueuePolicy(TimeoutAction.DELAY, 1, allow_timeout_override=False)
    version = core.load(
        core.spec(max_batch_size=1, dynamic_batching=DynamicBatching((1,), default_queue_policy=policy))
    )
    core.submit(0)
    blocker.wait_blocked()
    _, late = core.submit(1)
    blocker.release(2)
    assert value(late.final()) == 1
    assert version.statistics().fail.count == 0


def test_answers_keep_the_order_of_requests_though_instances_differ_in_speed(core: Any, new_blocker: Any) -> None:
    gates = {"m_0": new_blocker(), "m_1": new_blocker()}

    took: dict[float, str] = {}

    def run(name: str, inputs: Any) -> Any:
        took[float(inputs["IN"].flat[0])] = name
        gates[name].block()
        return {"OUT": np.array(inputs["IN"])}

    core.script.on_run = run
    version = core.load(
        core.spec(instances=2, max_batch_size=1, dynamic_batching=DynamicBatching((1,), preserve_ordering=True))
    )
    arrived: list[float] = []
    done = threading.Event()

    def sink(response: Any) -> None:
        arrived.append(value(response))
        if len(arrived) == 3:
            done.set()

    core.service.submit(core.request(1), sink)
    core.service.submit(core.request(2), sink)
    for blocker in gates.values():
        blocker.wait_blocked()
    core.service.submit(core.request(3), sink)
    slow = took[1.0]
    fast = next(name for name in gates if name != slow)
    gates[fast].release()
    gates[fast].wait_blocked()
    gates[fast].release()
    assert eventually(lambda: version.in_flight == 1)
    assert arrived == []
    gates[slow].release()
    assert done.wait(20)
    assert arrived == [1, 2, 3]


def test_a_cancelled_request_does_not_block_the_ordered_ones_behind_it(core: Any, blocker: Any) -> None:
    core.load(core.spec(max_batch_size=1, dynamic_batching=DynamicBatching((1,), preserve_ordering=True)))
    _, first = core.submit(1)
    blocker.wait_blocked()
    ticket, second = core.submit(2)
    _, third = core.submit(3)
    ticket.cancel()
    blocker.release(2)
    assert value(first.final()) == 1
    assert second.final().error is not None
    assert value(third.final()) == 3


def test_a_sink_that_raises_costs_only_its_own_request(core: Any, blocker: Any, caplog: Any) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(0)
    blocker.wait_blocked()

    def broken(response: Any) -> None:
        raise RuntimeError("event loop is closed")

    core.service.submit(core.request(1, id="r1", release=lambda: 1 / 0), broken)
    _, mate = core.submit(2)
    blocker.release(2)
    assert value(mate.final()) == 2
    _, later = core.submit(3, may_run=False)
    blocker.release(1)
    assert value(later.final()) == 3
    assert eventually(lambda: version.in_flight == 0)
    assert "a response to request 'r1' could not be delivered" in caplog.text
    assert "giving back the inputs of request 'r1' failed" in caplog.text


def test_counters_of_a_batch_of_four_add_its_time_four_times(core: Any, blocker: Any) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING))
    _, first = core.submit(0)
    blocker.wait_blocked()
    mailboxes = [core.submit(number)[1] for number in range(4)]
    blocker.release(1)
    first.final()
    blocker.wait_blocked()
    before = version.statistics()
    blocker.release(1)
    for mailbox in mailboxes:
        mailbox.final()
    told = version.statistics()
    assert told.execution_count == 2
    assert told.batches[4].compute_infer.count == 1
    spent_ns = told.compute_infer.ns - before.compute_infer.ns
    assert spent_ns == 4 * told.batches[4].compute_infer.ns
