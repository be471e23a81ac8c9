"""Cancel at each step of the trip; and whatever the end, inputs are given back once and nothing pins them."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, Cancelled, DeadlineExceeded, Draining, EdgeServerError
from edge_server.serving.execution.ticket import Ticket
from tests.kit.eventually import eventually
from tests.kit.together import together

POLICY = QueuePolicy(TimeoutAction.REJECT, 0, allow_timeout_override=True)
BATCHING = DynamicBatching((8,), default_queue_policy=POLICY)


class Loan:
    """A request whose input is watched, and which counts how often it is given back."""

    def __init__(self, value: float = 0.0, **more: Any) -> None:
        array = np.full((1, 1), value, np.float32)
        self.array = weakref.ref(array)
        self.returns = 0
        self.returned = threading.Event()
        self.request = Request("m", {"IN": Tensor("IN", DType.FP32, array)}, release=self._give_back, **more)

    def _give_back(self) -> None:
        self.returns += 1
        self.returned.set()

    def wait_returned(self) -> None:
        assert self.returned.wait(20)
        assert self.returns == 1


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    """Memory is freed here because nothing refers to it any more, not by the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_cancelled_while_waiting_is_answered_at_once_and_never_runs(core: Any, blocker: Any, new_mailbox: Any) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING))
    _, running = core.submit(1)
    blocker.wait_blocked()
    loan, mailbox = Loan(2), new_mailbox()
    ticket = core.service.submit(loan.request, mailbox)
    _, mate = core.submit(3)
    ticket.cancel()
    ticket.cancel()
    assert isinstance(mailbox.responses[0].error, Cancelled)
    loan.wait_returned()
    assert version.in_flight == 2
    blocker.release(2)
    assert float(mate.final().outputs[0].array[0, 0]) == 3
    assert running.final().error is None
    assert [rows for _, _, rows in core.script.ran] == [1, 1]
    assert len(mailbox.responses) == 1
    assert version.statistics().failures["CANCELED"] == 1


def test_cancelled_while_running_is_answered_at_once_and_its_batch_mates_are_not_disturbed(
    core: Any, blocker: Any, new_mailbox: Any
) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(1)
    blocker.wait_blocked()
    loan, mailbox = Loan(2), new_mailbox()
    ticket = core.service.submit(loan.request, mailbox)
    _, mate = core.submit(3)
    blocker.release(1)
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(mailbox.responses[0].error, Cancelled)
    assert loan.returns == 0, "the batch still reads the inputs"
    blocker.release(1)
    assert float(mate.final().outputs[0].array[0, 0]) == 3
    loan.wait_returned()
    assert len(mailbox.responses) == 1
    told = version.statistics()
    assert (told.success.count, told.fail.count, told.inference_count) == (2, 1, 2)
    assert told.batches[2].compute_infer.count == 1


def test_cancelled_after_the_answer_changes_nothing(core: Any) -> None:
    version = core.load(core.spec())
    ticket, mailbox = core.submit(1)
    mailbox.final()
    ticket.cancel()
    assert eventually(lambda: version.in_flight == 0)
    assert len(mailbox.responses) == 1
    assert version.statistics().fail.count == 0


def test_a_sink_may_cancel_its_own_and_other_tickets(core: Any, blocker: Any) -> None:
    core.load(core.spec())
    core.submit(1)
    blocker.wait_blocked()
    other, other_mailbox = core.submit(2)
    done = threading.Event()
    tickets: list[Any] = [other]

    def sink(response: Any) -> None:
        for ticket in tickets:
            ticket.cancel()
        done.set()

    tickets.append(core.service.submit(core.request(3), sink))
    tickets[1].cancel()
    assert done.is_set()
    assert isinstance(other_mailbox.responses[0].error, Cancelled)
    blocker.release(1)


@pytest.mark.parametrize("round_number", range(5))
def test_cancel_racing_the_answer_yields_exactly_one_final_response(core: Any, round_number: int) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING, instances=2))
    loans = [Loan(number) for number in range(100)]
    finals: list[list[Any]] = [[] for _ in loans]
    tickets = [
        core.service.submit(loan.request, responses.append) for loan, responses in zip(loans, finals, strict=True)
    ]
    together(lambda part: [t.cancel() for t in part], (tickets[::2], tickets[::3]))
    for loan in loans:
        loan.wait_returned()
    assert [len(responses) for responses in finals] == [1] * 100
    told = version.statistics()
    assert told.success.count + told.fail.count == 100
    assert told.failures["CANCELED"] == sum(isinstance(answers[0].error, Cancelled) for answers in finals)


@pytest.mark.parametrize("may_run", [False, True])
def test_after_success_nothing_holds_the_input(core: Any, new_mailbox: Any, may_run: bool) -> None:
    core.load(core.spec())
    loan, mailbox = Loan(1), new_mailbox()
    core.service.submit(loan.request, mailbox, hold_us=math.inf if may_run else 0.0)
    mailbox.final()
    loan.wait_returned()
    del loan.request
    core.submit(2)[1].final()
    assert loan.array() is None


@pytest.mark.sample
@pytest.mark.parametrize(
    "error",
    [BackendError("as told"), ValueError("not as told"), SystemExit(3), asyncio.CancelledError("told to stop")],
)
@pytest.mark.parametrize("may_run", [False, True])
def test_a_failing_batch_fails_each_ticket_and_pins_no_tensor_and_the_next_is_served(
    core: Any, blocker: Any, new_mailbox: Any, error: BaseException, may_run: bool
) -> None:
    version = core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(0)
    blocker.wait_blocked()
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        kept_by_the_frame = inputs["IN"]
        raise error from RuntimeError(str(kept_by_the_frame))

    loans, mailboxes = [Loan(1), Loan(2)], [new_mailbox(), new_mailbox()]
    for loan, mailbox in zip(loans, mailboxes, strict=True):
        core.service.submit(loan.request, mailbox, hold_us=math.inf if may_run else 0.0)
    core.script.on_run = run
    blocker.release(1)
    said = [mailbox.final().error for mailbox in mailboxes]
    for loan in loans:
        loan.wait_returned()
        del loan.request
    assert all(isinstance(answer, BackendError) for answer in said)
    assert all("told" in str(answer) or "SystemExit" in str(answer) for answer in said)
    assert version.statistics().failures["BACKEND"] == 2
    core.script.on_run = plain
    _, after = core.submit(3)
    blocker.release(1)
    assert float(after.final().outputs[0].array[0, 0]) == 3
    error.__traceback__ = None
    assert [loan.array() for loan in loans] == [None, None]


def test_inputs_are_released_though_the_receiver_of_the_failure_raises(core: Any, new_mailbox: Any) -> None:
    version = core.load(core.spec())
    loan, mailbox = Loan(1), new_mailbox()
    ticket = Ticket(loan.request, 1, 1, None, 0, mailbox, version._scheduler.cancel)
    version._scheduler.add(ticket)

    def run(inputs: Any, outputs: Any) -> Any:
        raise BackendError("failed as told")

    def tell(error: EdgeServerError) -> None:
        raise RuntimeError(f"cannot note: {error.message}")

    version._execute.on_failure = tell
    with pytest.raises(RuntimeError, match="cannot note: failed as told"):
        version._execute(SimpleNamespace(run=run, takes_requests=False, takes_device_memory=False), [ticket])
    assert isinstance(mailbox.final().error, BackendError)
    loan.wait_returned()
    assert version.in_flight == 0


def test_a_wrong_answer_fails_its_batch(core: Any) -> None:
    core.load(core.spec())
    core.script.on_run = lambda name, inputs: {"OUT": np.zeros((5, 1), np.float32)}
    error = core.submit(1)[1].final().error
    assert isinstance(error, BackendError)
    assert "promises" in error.message


def test_cancelled_in_the_middle_of_a_long_line_is_not_held_by_it(core: Any, blocker: Any, new_mailbox: Any) -> None:
    core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(0)
    blocker.wait_blocked()
    core.submit(1)
    loan, mailbox = Loan(2, timeout_us=60_000_000), new_mailbox()
    ticket = core.service.submit(loan.request, mailbox)
    core.submit(3)
    ticket.cancel()
    loan.wait_returned()
    del ticket, loan.request
    assert loan.array() is None
    blocker.release(2)


def test_a_ticket_held_by_its_own_sink_is_no_cycle(core: Any) -> None:
    core.load(core.spec())

    class Call:
        def __init__(self, loan: Loan) -> None:
            self.done = threading.Event()
            self.ticket = core.service.submit(loan.request, self.sink)

        def sink(self, response: Any) -> None:
            self.done.set()

    loan = Loan(1)
    call = Call(loan)
    assert call.done.wait(20)
    loan.wait_returned()
    core.submit(2)[1].final()
    del loan.request, call
    assert loan.array() is None


def test_inputs_are_given_back_once_when_refused(core: Any) -> None:
    core.load(core.spec())
    for request in (Loan(outputs=("NO",)), Loan(version=9)):
        with pytest.raises(EdgeServerError):
            core.service.submit(request.request, lambda response: None)
        request.wait_returned()


def test_inputs_are_given_back_once_when_expired(core: Any, blocker: Any, new_mailbox: Any) -> None:
    core.load(core.spec(dynamic_batching=BATCHING))
    core.submit(0)
    blocker.wait_blocked()
    loan, mailbox = Loan(1, timeout_us=1), new_mailbox()
    core.service.submit(loan.request, mailbox)
    assert isinstance(mailbox.final().error, DeadlineExceeded)
    loan.wait_returned()
    blocker.release(1)


def test_inputs_are_given_back_once_when_the_drain_runs_out_of_time(core: Any, blocker: Any, new_mailbox: Any) -> None:
    core.load(core.spec())
    loans, mailboxes = [Loan(0), Loan(1)], [new_mailbox(), new_mailbox()]
    for loan, mailbox in zip(loans, mailboxes, strict=True):
        core.service.submit(loan.request, mailbox)
    blocker.wait_blocked()
    assert not core.service.close(0.0)
    assert all(isinstance(mailbox.final().error, Draining) for mailbox in mailboxes)
    loans[1].wait_returned()
    assert loans[0].returns == 0, "the hung batch still reads it"
    blocker.release(1)
    loans[0].wait_returned()
    assert [len(mailbox.responses) for mailbox in mailboxes] == [1, 1]


def test_refusing_again_and_again_collects_no_frames(core: Any) -> None:
    version = core.load(core.spec())
    core.service.close(1.0)
    depths = []
    for _ in range(3):
        with pytest.raises(Draining) as caught:
            version.submit(core.request(), lambda response: None, hold_us=0.0)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1
