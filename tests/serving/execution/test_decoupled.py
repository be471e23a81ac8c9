"""Models that see requests: any number of responses, from any thread, closed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, InputSpec, OutputSpec
from edge_server.core.model_statistics import LAST_POSITION
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, Cancelled, Draining
from tests.kit.eventually import eventually


def out(value: float) -> dict[str, np.ndarray]:
    return {"OUT": np.full((1, 1), value, np.float32)}


def values(responses: Sequence[Any]) -> list[Any]:
    return [float(item.outputs[0].array[0, 0]) if item.outputs else item.error for item in responses]


class Hands:
    """Takes executions and leaves them to the test."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self._arrived = threading.Condition()

    def __call__(self, executions: Sequence[Any]) -> None:
        with self._arrived:
            self.taken.extend(executions)
            self._arrived.notify_all()

    def wait(self, count: int = 1) -> list[Any]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.taken) >= count, 20)
            return self.taken


@pytest.fixture
def hands(core: Any) -> Hands:
    made = Hands()
    core.script.on_execute = made
    return made


def test_responses_come_in_order_and_the_stream_ends_with_an_empty_one(core: Any, hands: Hands) -> None:
    version = core.load(core.spec(is_decoupled=True))
    _, mailbox = core.submit()
    execution = hands.wait()[0]
    execution.send(out(1))
    execution.send(out(2))
    assert [response.is_final for response in mailbox.responses] == [False, False]
    execution.finish()
    assert values(mailbox.responses) == [1, 2, None]
    assert mailbox.responses[-1].is_empty
    assert eventually(lambda: version.in_flight == 0)
    told = version.statistics()
    assert (told.success.count, told.execution_count, told.inference_count) == (1, 1, 1)
    assert [(told.responses[i].success.count, told.responses[i].empty_response.count) for i in range(3)] == [
        (1, 0), (1, 0), (0, 1),
    ]  # fmt: skip


def test_the_counters_of_a_stream_that_runs_for_days_do_not_grow(core: Any, hands: Hands) -> None:
    version = core.load(core.spec(is_decoupled=True))
    core.submit()
    execution = hands.wait()[0]
    for number in range(5 * LAST_POSITION):
        execution.send(out(number))
    told = version.statistics()
    assert list(told.responses) == list(range(LAST_POSITION + 1))
    assert [told.responses[i].success.count for i in (0, LAST_POSITION - 1)] == [1, 1]
    assert told.responses[LAST_POSITION].success.count == 4 * LAST_POSITION
    execution.finish()


def test_the_last_response_may_say_that_it_is_the_last(core: Any, hands: Hands) -> None:
    core.load(core.spec(is_decoupled=True))
    _, mailbox = core.submit()
    hands.wait()[0].send(out(1), is_final=True)
    assert [response.is_final for response in mailbox.responses] == [True]
    assert not mailbox.responses[0].is_empty


def test_a_stream_may_fail_after_some_responses(core: Any, hands: Hands) -> None:
    version = core.load(core.spec(is_decoupled=True))
    _, mailbox = core.submit()
    execution = hands.wait()[0]
    execution.send(out(1))
    execution.fail(BackendError("lost"))
    first, last = mailbox.responses
    assert (first.is_final, last.is_final, str(last.error)) == (False, True, "lost")
    told = version.statistics()
    assert (told.fail.count, told.failures["BACKEND"], told.responses[1].fail.count) == (1, 1, 1)


@pytest.mark.sample
@pytest.mark.parametrize("first", ["send", "finish", "fail"])
@pytest.mark.parametrize("second", ["send", "late", "finish", "fail"])
def test_whatever_comes_after_the_close_is_dropped_and_not_counted(
    core: Any, hands: Hands, first: str, second: str
) -> None:
    version = core.load(core.spec(is_decoupled=True))
    released: list[int] = []
    mailbox: list[Any] = []
    core.service.submit(core.request(release=lambda: released.append(1)), mailbox.append)
    execution = hands.wait()[0]
    for act in (first, second):
        if act == "finish":
            execution.finish()
        elif act == "fail":
            execution.fail(BackendError("x"))
        else:
            execution.send(out(1), is_final=act == "send")
    assert len(mailbox) == 1
    assert released == [1]
    assert version.in_flight == 0
    told = version.statistics()
    assert told.success.count + told.fail.count == 1
    assert list(told.responses) == [0]


def test_a_cancelled_stream_is_answered_at_once_and_its_late_responses_are_dropped(core: Any, hands: Hands) -> None:
    version = core.load(core.spec(is_decoupled=True))
    released: list[int] = []
    mailbox: list[Any] = []
    ticket = core.service.submit(core.request(release=lambda: released.append(1)), mailbox.append)
    execution = hands.wait()[0]
    execution.send(out(1))
    assert not execution.is_cancelled()
    ticket.cancel()
    assert execution.is_cancelled()
    execution.send(out(2))
    assert [type(response.error) for response in mailbox] == [type(None), Cancelled]
    assert released == [], "the backend has not let go yet"
    execution.finish()
    assert released == [1]
    assert version.in_flight == 0
    assert version.statistics().failures["CANCELED"] == 1


def test_a_response_that_breaks_the_promise_ends_the_stream_and_does_not_raise_into_the_backend(
    core: Any, hands: Hands
) -> None:
    core.load(core.spec(is_decoupled=True))
    _, mailbox = core.submit()
    execution = hands.wait()[0]
    execution.send({"OTHER": np.zeros((1, 1), np.float32)})
    assert isinstance(mailbox.final().error, BackendError)
    execution.finish()
    assert len(mailbox.responses) == 1


@pytest.mark.parametrize(
    "error",
    [
        BackendError("as told"), ValueError("not as told"), SystemExit("told to exit"), KeyboardInterrupt("told"),
        asyncio.CancelledError("told to stop"),
    ],
)  # fmt: skip
def test_what_execute_raises_fails_every_execution_that_is_not_closed(core: Any, error: BaseException) -> None:
    def execute(executions: Sequence[Any]) -> None:
        executions[0].send(out(1), is_final=True)
        raise error

    hold = threading.Event()
    core.script.on_execute = lambda executions: hold.wait(20) and executions[0].finish()
    version = core.load(core.spec(is_decoupled=True, dynamic_batching=DynamicBatching((8,))))
    core.submit()
    mailboxes = [core.submit()[1] for _ in range(3)]
    core.script.on_execute = execute
    hold.set()
    answers = [mailbox.final() for mailbox in mailboxes]
    assert values(answers)[0] == 1
    assert all("told" in str(answer.error) for answer in answers[1:])
    told = version.statistics()
    assert (told.success.count, told.failures["BACKEND"]) == (2, 2)
    assert told.execution_count == 2


def test_a_drain_waits_for_open_streams_and_for_the_thread_inside_execute(core: Any, hands: Hands) -> None:
    """A stream may be closed while `execute` has not returned: the session must not be closed under its feet."""
    inside, leave = threading.Event(), threading.Event()

    def execute(executions: Sequence[Any]) -> None:
        executions[0].finish()
        inside.set()
        assert leave.wait(20)
        order.append("execute returns")

    order: list[str] = []
    core.script.on_execute = execute
    core.script.on_close = lambda name: order.append("close")
    version = core.load(core.spec(is_decoupled=True))
    caller = threading.Thread(target=core.submit, kwargs={"may_run": True})
    caller.start()
    assert inside.wait(20)
    assert version.in_flight == 0
    core.service.unload_model("m")
    assert core.router.index()[0].state == "UNLOADING"
    leave.set()
    assert eventually(lambda: "close" in order)
    caller.join(20)
    assert order == ["execute returns", "close"]


def test_streams_that_never_end_are_failed_when_the_time_to_drain_is_over(core: Any, hands: Hands) -> None:
    core.load(core.spec(is_decoupled=True))
    _, mailbox = core.submit()
    execution = hands.wait()[0]
    assert not core.service.close(0.0)
    assert isinstance(mailbox.final().error, Draining)
    assert execution.is_cancelled()
    execution.finish()


def test_a_model_that_is_not_decoupled_fills_no_response_statistics(core: Any, hands: Hands) -> None:
    version = core.load(core.spec())
    core.submit()
    hands.wait()[0].send(out(1), is_final=True)
    assert version.statistics().responses == {}


def test_the_shipped_repeat_model_answers_each_element_in_its_time(core: Any) -> None:
    spec = core.spec(
        "r", backend="repeat", is_decoupled=True, max_batch_size=0,
        inputs=(
            InputSpec("IN", DType.INT32, (-1,)), InputSpec("DELAY", DType.UINT32, (-1,)),
            InputSpec("WAIT", DType.UINT32, (1,)),
        ),
        outputs=(OutputSpec("OUT", DType.INT32, (1,)), OutputSpec("IDX", DType.UINT32, (1,))),
    )  # fmt: skip
    core.load(spec)
    request = core.request(model="r")
    request.inputs = {
        "IN": Tensor("IN", DType.INT32, np.array([7, 8, 9], "<i4")),
        "DELAY": Tensor("DELAY", DType.UINT32, np.array([0, 1, 0], "<u4")),
        "WAIT": Tensor("WAIT", DType.UINT32, np.array([0], "<u4")),
    }
    done = threading.Event()
    responses: list[Any] = []

    def sink(response: Any) -> None:
        responses.append(response)
        if response.is_final:
            done.set()

    core.service.submit(request, sink)
    assert done.wait(20)
    assert [int(item.outputs[0].array[0]) for item in responses if item.outputs] == [7, 8, 9]
    assert responses[-1].is_final
