"""Sequences on real threads: state, order, cancellation, failures, idle sequences, backlog, reload, admission control,
limiter."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.ensemble_and_sequence_spec import (
    ControlInput,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    StateTensor,
)
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, OutputSpec, RateResource
from edge_server.core.request_response import Request, SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import (
    BackendError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EdgeServerError,
    InvalidRequest,
    QueueFull,
)
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.sequence.scheduler import SequenceScheduler
from tests.kit.eventually import eventually
from tests.kit.together import together

START = ControlInput("START", ControlKind.START, DType.FP32, (0, 1))
READY = ControlInput("READY", ControlKind.READY, DType.INT32, (0, 1))
END = ControlInput("END", ControlKind.END, DType.BOOL, (False, True))
NUMBER = ControlInput("ID", ControlKind.CORRID, DType.INT32)
NAME = ControlInput("ID", ControlKind.CORRID, DType.BYTES)
SUM = StateTensor("SUM", "NEW_SUM", DType.FP32, (1,))
NEVER_FAILS = {"canary_share": "0.5", "canary_max_p99_ratio": "1000000"}
OLDEST = OldestStrategy(8)
DIRECT = DirectStrategy()


def batching(strategy: Any = DIRECT, **more: Any) -> SequenceBatching:
    settings: dict[str, Any] = {"controls": (START, READY, END, NUMBER), "states": (SUM,), "max_idle_us": 60_000_000}
    return SequenceBatching(strategy, **settings | more)


def accumulate(_: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """OUT = SUM + IN. NEW_SUM of rows that are not ready is nonsense."""
    total = inputs["SUM"] + inputs["IN"]
    ready = inputs["READY"].astype(bool)
    return {"OUT": total, "NEW_SUM": np.where(ready, total, np.float32(-1e9))}


def load(core: Any, strategy: Any = DIRECT, *, mark: str = "a", root: Path = Path("/nowhere"), **more: Any) -> Any:
    sequence = more.pop("sequence", None) or batching(strategy)
    core.script.on_run = more.pop("on_run", accumulate)
    versions = more.pop("versions", ())
    settings = {"max_batch_size": 4, "parameters": {"warmup_probe": "false"}} | more
    spec = core.spec(sequence=sequence, inputs=(InputSpec("IN", DType.FP32, (1,)),),
                      outputs=(OutputSpec("OUT", DType.FP32, (1,)),), **settings)  # fmt: skip
    return core.load(spec, *versions, mark=mark, root=root)


def step(core: Any, id: int | str, value: float, flags: str = "", **more: Any) -> tuple[Any, Any]:
    return core.submit(value, sequence=SequenceStep(id, "+" in flags, "-" in flags), **more)


def answer(mailbox: Any) -> float:
    response = mailbox.final()
    assert response.error is None, response.error
    return float(response.outputs[0].array.ravel()[0])


def walk(core: Any, id: int | str, values: list[float], *, ends: bool = True) -> list[float]:
    """Send a whole sequence, each step once the one before it is answered."""
    last = len(values) - 1
    return [
        answer(step(core, id, value, ("+" if i == 0 else "") + ("-" if ends and i == last else ""))[1])
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize("strategy", [DIRECT, DirectStrategy(2000, 0.7), OLDEST, OldestStrategy(2, (2,), 1000, True)])
@pytest.mark.parametrize("instances", [1, 2])
def test_every_sequence_has_its_own_state_however_many_run_at_once(core: Any, strategy: Any, instances: int) -> None:
    load(core, strategy, instances=instances)
    sums: dict[int, list[float]] = {}

    def camera(id: int) -> None:
        numbers = random.Random(id)
        for _ in range(3):
            values = [float(numbers.randint(1, 50)) for _ in range(7)]
            sums[id] = walk(core, id, values)
            assert sums[id] == np.cumsum(values).tolist()

    together(camera, range(1, 13))
    assert set(sums) == set(range(1, 13))


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_requests_sent_ahead_run_in_order_one_at_a_time(core: Any, strategy: Any) -> None:
    load(core, strategy, instances=2)
    flags = {0: "+", 19: "-"}
    boxes = [step(core, id, i + id, flags.get(i, ""))[1] for i in range(20) for id in (100, 200)]
    for place, id in enumerate((100, 200)):
        expected = np.cumsum([i + id for i in range(20)]).tolist()
        assert [answer(box) for box in boxes[place::2]] == expected


def test_the_model_gets_start_ready_end_and_the_id_and_unused_rows_are_not_ready(core: Any, new_blocker: Any) -> None:
    seen: list[dict[str, Any]] = []
    blocker = new_blocker()

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        seen.append({key: np.array(array) for key, array in inputs.items()})
        blocker.block()
        return accumulate(name, inputs)

    load(core, DIRECT, on_run=run)
    first = [step(core, 11, 1, "+")[1]]
    blocker.wait_blocked()
    first += [step(core, 12, 2, "+")[1], step(core, 13, 3, "+-")[1]]
    blocker.release()
    blocker.wait_blocked()
    later = [step(core, 13, 4, "+")[1]]
    blocker.release(2)
    assert [answer(box) for box in (*first, *later)] == [1, 2, 3, 4]
    told = [{key: array[:, 0].tolist() for key, array in inputs.items()} for inputs in seen]
    assert told[0] == {"IN": [1], "START": [1], "READY": [1], "END": [False], "ID": [11], "SUM": [0]}
    assert told[1] == {
        "IN": [0, 2, 3], "START": [0, 1, 1], "READY": [0, 1, 1], "END": [False, False, True], "ID": [0, 12, 13],
        "SUM": [0, 0, 0],
    }  # fmt: skip
    assert seen[1]["START"].dtype == np.float32
    assert seen[1]["END"].dtype == np.bool_
    assert seen[1]["START"].shape == (3, 1)


def test_without_a_batch_dimension_a_control_has_one_element_and_an_instance_one_sequence(
    core: Any, new_mailbox: Any
) -> None:
    seen: list[dict[str, Any]] = []

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        seen.append({key: np.array(array) for key, array in inputs.items()})
        return accumulate(name, inputs)

    version = load(core, DIRECT, max_batch_size=0, on_run=run, sequence=batching(controls=(START, READY, NAME)))
    boxes = []
    for id, value, flags in (("a", 1, "+"), ("b", 5, "+"), ("a", 2, "-"), ("b", 6, "-")):
        tensor = Tensor("IN", DType.FP32, np.full((1,), value, np.float32))
        request = Request("m", {"IN": tensor}, sequence=SequenceStep(id, "+" in flags, "-" in flags))
        boxes.append(new_mailbox())
        core.service.submit(request, boxes[-1])
    assert [answer(box) for box in boxes] == [1, 5, 3, 11]
    assert [one["ID"].tolist() for one in seen] == [[b"a"], [b"a"], [b"b"], [b"b"]]
    assert seen[0]["START"].shape == (1,)
    assert version.statistics().execution_count == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "must specify a non-zero or non-empty correlation ID: the request parameter sequence_id"),
        ({"sequence": SequenceStep(5)}, "sequence 5 to model 'm' must specify the START flag on the first request"),
        ({"sequence": SequenceStep("x")}, "its input 'ID' of type INT32: expected an integer, given the string 'x'"),
        ({"sequence": SequenceStep(2**40, True)}, "given 1099511627776"),
        ({"sequence": SequenceStep(5, True), "rows": 2}, "must specify batch-size 1"),
    ],
)
def test_a_request_that_is_no_step_of_a_sequence_is_refused_and_counted(core: Any, more: Any, message: str) -> None:
    version = load(core)
    with pytest.raises(InvalidRequest, match=message):
        core.submit(1, **more)
    assert version.statistics().failures["OTHER"] == 1
    assert version.in_flight == 0
    assert walk(core, 5, [1, 2]) == [1, 3]


def test_the_sequence_begins_anew_with_start_on_a_live_id(core: Any) -> None:
    load(core)
    assert walk(core, 5, [1, 2], ends=False) == [1, 3]
    assert walk(core, 5, [10, 20], ends=False) == [10, 30]


def test_sequences_beyond_the_slots_wait_and_run_when_one_ends(core: Any) -> None:
    version = load(core, OldestStrategy(2))
    scheduler = version._scheduler
    assert isinstance(scheduler, SequenceScheduler)
    for id in (1, 2):
        assert walk(core, id, [id], ends=False) == [id]
    waiting = [step(core, 3, 30, "+")[1], step(core, 3, 3)[1], step(core, 4, 40, "+-")[1]]
    assert (scheduler.live_count, scheduler.backlog_count, version.in_flight) == (2, 2, 3)
    (found,), (report,) = core.service.statistics("m", None), core.service.instance_reports()
    assert (
        (found.live_sequences, found.waiting_sequences) == (report.live_sequences, report.waiting_sequences) == (2, 2)
    )
    assert answer(step(core, 1, 5, "-")[1]) == 6
    assert [answer(box) for box in waiting[:2]] == [30, 33]
    assert not waiting[2].responses
    assert answer(step(core, 2, 5, "-")[1]) == 7
    assert answer(waiting[2]) == 40


def test_a_client_that_starts_and_cancels_repeatedly_leaves_nothing_and_blocks_no_other(core: Any) -> None:
    version = load(core, OldestStrategy(1))
    assert walk(core, 1, [1], ends=False) == [1]
    for id in range(2, 3002):
        ticket, box = step(core, id, id, "+")
        ticket.cancel()
        assert isinstance(box.final().error, Cancelled)
    scheduler = version._scheduler
    assert (scheduler.live_count, scheduler.backlog_count, scheduler.pending_count) == (1, 0, 0)
    assert len(scheduler._line._live) == 1
    assert version.in_flight == 0
    _, waiting = step(core, 2, 5, "+-")
    assert answer(step(core, 1, 2, "-")[1]) == 3
    assert answer(waiting) == 5


def test_more_sequences_than_may_wait_are_refused_and_one_that_goes_makes_room(core: Any) -> None:
    limits = {"warmup_probe": "false", "max_waiting_sequences": " 2 "}
    version = load(core, OldestStrategy(1), parameters=limits)
    assert walk(core, 1, [1], ends=False) == [1]
    waiting = [step(core, id, id, "+-") for id in (2, 3)]
    for id in (4, 5):
        with pytest.raises(QueueFull, match="2 sequences are waiting for a slot of model 'm' already, at most 2") as no:
            step(core, id, id, "+")
        assert no.value.retry_after_s is not None
    assert version.statistics().failures["REJECTED"] == 2
    assert eventually(lambda: (version.in_flight, version._scheduler.backlog_count) == (2, 2))
    waiting[0][0].cancel()
    late = step(core, 4, 40, "+-")[1]
    assert answer(step(core, 1, 5, "-")[1]) == 6
    assert [answer(waiting[1][1]), answer(late)] == [3, 40]


def test_more_requests_of_one_sequence_than_may_wait_are_refused_and_the_sequence_goes_on(core: Any) -> None:
    load(core, parameters={"warmup_probe": "false", "max_waiting_per_sequence": "3"})
    blocker = core.block_runs()
    boxes = [step(core, 1, 1, "+")[1]]
    blocker.wait_blocked()
    boxes += [step(core, 1, 1)[1] for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests of sequence 1 are waiting for model 'm' already, at most 3 may"):
        step(core, 1, 1, "-")
    blocker.release(10)
    assert [answer(box) for box in boxes] == [1, 2, 3, 4]
    assert answer(step(core, 1, 1, "-")[1]) == 5


@pytest.mark.sample
@pytest.mark.parametrize("key", ["max_waiting_sequences", "max_waiting_per_sequence"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5", "\u0663", "1000001", "9" * 5000])
def test_an_invalid_limit_of_waiting_requests_fails_the_load(core: Any, key: str, text: str) -> None:
    core.set_desired(core.spec(sequence=batching(), parameters={key: text}))
    assert core.table.wait_settled(["m"], 20)
    failure = core.router.failure("m")
    assert f"model 'm': parameter {key} must be a whole number of 1 to 1000000, got '{text[:80]}'" in failure


def test_starts_and_cancels_of_many_threads_leave_nothing_behind(core: Any) -> None:
    limits = {"warmup_probe": "false", "max_waiting_sequences": "5", "max_waiting_per_sequence": "2"}
    version = load(core, OldestStrategy(2), instances=2, parameters=limits)

    def client(seed: int) -> None:
        numbers = random.Random(seed)
        for number in range(150):
            try:
                sent = [step(core, seed * 1000 + number, 1, flags) for flags in ("+", "", "-")]
            except (QueueFull, InvalidRequest):
                # The slots of those whose END was refused come free, too.
                core.service.end_sequence("m", None, seed * 1000 + number)
                continue
            for ticket, _ in numbers.sample(sent, numbers.randint(0, 3)):
                ticket.cancel()
            for _, box in sent:
                box.final()

    together(client, range(1, 7))
    assert eventually(lambda: version.in_flight == 0)
    scheduler = version._scheduler
    assert eventually(lambda: (scheduler.live_count, scheduler.backlog_count, scheduler.pending_count) == (0, 0, 0))
    assert not scheduler._line._live
    assert walk(core, 7, [1, 2]) == [1, 3]


def test_an_idle_sequence_is_closed_by_the_clock_and_its_slot_given_away(core: Any) -> None:
    version = load(core, sequence=batching(OldestStrategy(1), max_idle_us=20_000))
    assert walk(core, 1, [1], ends=False) == [1]
    _, waiting = step(core, 2, 2, "+")
    assert answer(waiting) == 2
    assert eventually(lambda: version._scheduler.live_count == 0)
    with pytest.raises(InvalidRequest, match=r"sequence 1 .*idle for more than 20 ms"):
        step(core, 1, 1)


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_a_waiting_request_that_is_cancelled_is_no_part_of_its_sequence(core: Any, strategy: Any) -> None:
    version = load(core, strategy)
    blocker = core.block_runs()
    _, first = step(core, 1, 1, "+")
    blocker.wait_blocked()
    sent = [
        step(core, 1, 10),
        step(core, 1, 100),
        step(core, 2, 7, "+"),
        step(core, 2, 8),
        step(core, 1, 1000, "-"),
    ]
    for place in (0, 2):
        sent[place][0].cancel()
        assert isinstance(sent[place][1].final().error, Cancelled)
    blocker.release(10)
    assert [answer(first), answer(sent[1][1]), answer(sent[3][1]), answer(sent[4][1])] == [1, 101, 8, 1101]
    assert version.statistics().failures["CANCELED"] == 2


def test_a_request_cancelled_while_it_runs_has_run_for_its_sequence(core: Any) -> None:
    load(core)
    blocker = core.block_runs()
    ticket, cancelled = step(core, 1, 1, "+")
    blocker.wait_blocked()
    ticket.cancel()
    assert isinstance(cancelled.final().error, Cancelled)
    blocker.release(2)
    assert answer(step(core, 1, 10, "-")[1]) == 11


def test_a_deadline_that_passes_while_waiting_takes_one_request_out(core: Any) -> None:
    load(core)
    blocker = core.block_runs()
    _, first = step(core, 1, 1, "+")
    blocker.wait_blocked()
    _, late = step(core, 1, 10, deadline_ns=time.monotonic_ns() + 5_000_000)
    _, last = step(core, 1, 100, "-")
    assert isinstance(late.final().error, DeadlineExceeded)
    blocker.release(2)
    assert [answer(first), answer(last)] == [1, 101]


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_a_failed_run_leaves_each_state_as_it_was(core: Any, strategy: Any) -> None:
    failing = threading.Event()

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if failing.is_set():
            raise BackendError("failed as told")
        return accumulate(name, inputs)

    load(core, strategy, on_run=run)
    assert walk(core, 1, [1, 2], ends=False) == [1, 3]
    failing.set()
    assert isinstance(step(core, 1, 50)[1].final().error, BackendError)
    assert isinstance(step(core, 2, 50, "+")[1].final().error, BackendError)
    failing.clear()
    assert answer(step(core, 1, 10)[1]) == 13
    assert answer(step(core, 2, 10)[1]) == 10


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda total: {"OUT": total}, "did not answer its state output 'NEW_SUM'"),
        (lambda total: {"OUT": total, "NEW_SUM": total[:, 0]}, r"with float32 \[1\].*promises FP32 \[1, 1\]"),
        (lambda total: {"OUT": total, "NEW_SUM": total.astype(np.float64)}, "with float64"),
        (lambda total: {"OUT": total[:, :0], "NEW_SUM": total}, "output 'OUT' with shape"),
    ],
)
def test_a_state_or_output_that_breaks_its_promise_fails_the_run_and_keeps_the_state(
    core: Any, broken: Any, message: str
) -> None:
    is_broken = threading.Event()

    def run(name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        good = accumulate(name, inputs)
        return broken(good["OUT"]) if is_broken.is_set() else good

    load(core, on_run=run)
    assert walk(core, 1, [1], ends=False) == [1]
    is_broken.set()
    with pytest.raises(BackendError, match=message):
        raise step(core, 1, 5)[1].final().error
    is_broken.clear()
    assert answer(step(core, 1, 2)[1]) == 3


def test_several_states_from_files_and_zeros_and_a_state_that_clients_may_see(core: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m" / "initial_state"
    folder.mkdir(parents=True)
    np.array([3.0, 4.0], np.float32).tofile(folder / "pair")
    states = (
        StateTensor("PAIR", "NEXT", DType.FP32, (2,), InitialState("begin", DType.FP32, (2,), "pair")),
        StateTensor("COUNT", "COUNTED", DType.INT64, (1,), uses_same_buffer=True),
    )

    def run(_: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        pair = inputs["PAIR"] * inputs["IN"]
        return {"OUT": pair.sum(axis=1, keepdims=True), "NEXT": pair, "COUNTED": inputs["COUNT"] + 1}

    core.script.on_run = run
    spec = core.spec(
        sequence=batching(OLDEST, states=states),
        max_batch_size=4,
        inputs=(InputSpec("IN", DType.FP32, (1,)),),
        outputs=(OutputSpec("OUT", DType.FP32, (1,)), OutputSpec("COUNTED", DType.INT64, (1,))),
        parameters={"warmup_probe": "false"},
    )
    core.load(spec, root=tmp_path)
    _, box = step(core, 1, 2, "+")
    names = {tensor.name: tensor.array for tensor in box.final().outputs}
    assert (names["OUT"].tolist(), names["COUNTED"].tolist()) == ([[14]], [[1]])
    names["COUNTED"][:] = 77
    _, box = step(core, 1, 10, outputs=("COUNTED",))
    assert [(tensor.name, tensor.array.tolist()) for tensor in box.final().outputs] == [("COUNTED", [[2]])]
    _, box = step(core, 1, 1, "-", outputs=("OUT",))
    assert [(tensor.name, tensor.array.tolist()) for tensor in box.final().outputs] == [("OUT", [[140]])]


def test_an_initial_state_of_the_wrong_size_or_none_fails_the_load(core: Any, tmp_path: Path) -> None:
    state = StateTensor("SUM", "NEW_SUM", DType.FP32, (3,), InitialState("begin", DType.FP32, (3,), "sum"))
    core.script.on_run = accumulate
    spec = core.spec(sequence=batching(states=(state,)))
    core.set_desired(spec, root=tmp_path)
    assert core.table.wait_settled(["m"], 20)
    assert "cannot read" in core.router.failure("m")
    (tmp_path / "m" / "initial_state").mkdir(parents=True)
    (tmp_path / "m" / "initial_state" / "sum").write_bytes(b"123")
    core.set_desired(spec, root=tmp_path, mark="b")
    assert core.table.wait_settled(["m"], 20)
    assert "expected 12 bytes for FP32 [3], given 3" in core.router.failure("m")


def test_a_state_grows_and_sequences_of_different_lengths_run_apart(core: Any) -> None:
    state = StateTensor("PAST", "SEEN", DType.FP32, (-1,), is_growable=True)

    def run(_: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        seen = np.concatenate([inputs["PAST"], inputs["IN"]], axis=1)
        return {"OUT": seen.sum(axis=1, keepdims=True), "SEEN": seen}

    load(core, OLDEST, on_run=run, sequence=batching(OLDEST, states=(state,)))
    boxes = [step(core, id, 1, "+" if not i else "")[1] for i in range(5) for id in range(1, 5) if i < id]
    assert sorted(answer(box) for box in boxes) == sorted(i + 1 for i in range(5) for id in range(1, 5) if i < id)


def test_statistics_count_requests_batches_and_only_the_rows_that_were_asked_for(core: Any) -> None:
    version = load(core)
    blocker = core.block_runs()
    boxes = [step(core, 1, 1, "+")[1]]
    blocker.wait_blocked()
    boxes += [step(core, id, 1, "+")[1] for id in (2, 3)]
    blocker.release(2)
    for box in boxes:
        answer(box)
    found = version.statistics()
    assert (found.inference_count, found.execution_count, found.success.count) == (3, 2, 3)
    assert {size: batch.compute_infer.count for size, batch in found.batches.items()} == {1: 1, 2: 1}
    assert boxes[1].final().batch_size == 2


def test_a_reload_finishes_accepted_requests_and_forgets_live_sequences(core: Any) -> None:
    old = load(core, OldestStrategy(1))
    blocker = core.block_runs()
    boxes = [step(core, 1, 1, "+")[1], step(core, 1, 2)[1], step(core, 2, 5, "+-")[1]]
    blocker.wait_blocked()
    new = load(core, OldestStrategy(1), mark="b")
    assert new is not old
    with pytest.raises(InvalidRequest, match=r"must specify the START flag.*model was loaded anew.*sequence_start"):
        step(core, 1, 3)
    blocker.release(10)
    assert [answer(box) for box in boxes[:2]] == [1, 3]
    assert walk(core, 1, [9, 1]) == [9, 10]


def test_closing_answers_waiting_requests_and_leaves_nothing(core: Any) -> None:
    version = load(core, OldestStrategy(1))
    blocker = core.block_runs()
    _, running = step(core, 1, 1, "+")
    blocker.wait_blocked()
    waiting = [step(core, 1, 2)[1], step(core, 2, 3, "+")[1], step(core, 2, 4, "-")[1]]
    version.stop_accepting()
    assert version.abandon_waiting() == 3
    assert all(isinstance(box.final().error, Draining) for box in waiting)
    blocker.release()
    version.drain()
    assert answer(running) == 1
    assert version.in_flight == 0


def test_an_overload_of_all_endings_loses_no_request_and_keeps_every_order(core: Any) -> None:
    version = load(core, OldestStrategy(3, (), 200), instances=2, max_batch_size=4)
    lost: list[str] = []

    def client(id: int) -> None:
        numbers = random.Random(id)
        for _ in range(12):
            total, sent = 0.0, []
            length = numbers.randint(1, 6)
            for i in range(length):
                value = float(numbers.randint(1, 9))
                flags = ("+" if i == 0 else "") + ("-" if i == length - 1 else "")
                try:
                    ticket, box = step(core, id, value, flags)
                except InvalidRequest:
                    # Whoever cancels all there is before any of it runs begins again; nobody else is refused.
                    if not all(isinstance(before.final().error, Cancelled) for _, before in sent):
                        lost.append(f"{id}: refused within its sequence")
                    ticket, box = step(core, id, value, "+" + flags)
                if numbers.random() < 0.2:
                    ticket.cancel()
                sent.append((value, box))
            for value, box in sent:
                response = box.final()
                if response.error is None:
                    found = float(response.outputs[0].array.ravel()[0])
                    # What was cancelled while it ran counts in the sum, what was cancelled before does not.
                    if not total + value <= found:
                        lost.append(f"{id}: {found} after {total} + {value}")
                    total = found
                elif not isinstance(response.error, Cancelled):
                    lost.append(str(response.error))

    together(client, range(1, 17))
    assert lost == []
    version.stop_accepting()
    version.drain()
    scheduler = version._scheduler
    assert (version.in_flight, scheduler.live_count, scheduler.backlog_count, scheduler.pending_count) == (0, 0, 0, 0)


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_limited_admission_control_is_asked_and_limits_the_instances(
    new_core: Any, new_blocker: Any, strategy: Any
) -> None:
    class HalfAdmission:
        is_open = False
        allowed_fraction = 0.5

        def __init__(self) -> None:
            self.balance = 0.0
            self.asked = 0

        def admit(self, spec: Any, request: Any, cost_s: float) -> float:
            self.asked += 1
            self.balance += 1.0
            return 1.0

        def correct_charge(self, charged_s: float, took_s: float) -> None:
            self.balance -= charged_s

    governor, blocker = HalfAdmission(), new_blocker()
    core = new_core(admission=governor)

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        blocker.block()
        return accumulate(name, inputs)

    version = load(core, strategy, instances=2, on_run=run)
    boxes = [step(core, id, id, "+-")[1] for id in (1, 2, 3)]
    blocker.wait_blocked()
    assert sum(number % 2 for number in version.run_numbers.values()) == 1
    blocker.release(5)
    assert [answer(box) for box in boxes] == [1, 2, 3]
    version.stop_accepting()
    version.drain()
    assert (governor.asked, governor.balance) == (3, 0.0)


def test_instances_bound_to_sequences_take_turns_under_the_rate_limiter(new_core: Any) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    groups = (InstanceGroup("m", InstanceKind.CPU, 3, resources=(RateResource("R", 1),)),)
    running, most = [0], [0]
    lock = threading.Lock()

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        answered = accumulate(name, inputs)
        with lock:
            running[0] -= 1
        return answered

    load(core, OldestStrategy(2), instance_groups=groups, on_run=run)
    boxes = {
        id: [step(core, id, 1, "+" if not i else "-" if i == 9 else "")[1] for i in range(10)] for id in range(1, 9)
    }
    for mine in boxes.values():
        assert [answer(box) for box in mine] == list(range(1, 11))
    assert most == [1]


def test_an_instance_that_has_nothing_to_run_any_more_gives_up_its_place_at_the_rate_limiter(
    new_core: Any, new_blocker: Any
) -> None:
    core = new_core(limiter=RateLimiter({("R", None): 1}))
    blocker = new_blocker()

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        blocker.block()
        return accumulate(name, inputs)

    groups = (InstanceGroup("m", InstanceKind.CPU, 3, resources=(RateResource("R", 1),)),)
    load(core, OldestStrategy(2), instance_groups=groups, on_run=run)
    _, first = step(core, 1, 1, "+-")
    blocker.wait_blocked()
    ticket, cancelled = step(core, 2, 2, "+-")
    _, last = step(core, 3, 3, "+-")
    ticket.cancel()
    assert isinstance(cancelled.final().error, Cancelled)
    blocker.release(3)
    assert [answer(first), answer(last)] == [1, 3]
    assert walk(core, 4, [4]) == [4]


def test_an_instance_stopped_by_admission_control_does_not_stay_next_at_the_rate_limiter(
    new_core: Any, new_blocker: Any
) -> None:
    class Governor:
        is_open, allowed_fraction = True, 1.0

        def admit(self, spec: Any, request: Any, cost_s: float) -> float:
            return 0.0

        def correct_charge(self, charged_s: float, took_s: float) -> None:
            pass

    governor = Governor()
    core = new_core(admission=governor, limiter=RateLimiter({("R", None): 2}))
    steps, others = new_blocker(), new_blocker()

    def run(name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        (others if name.startswith("other") else steps).block()
        return accumulate(name, inputs) if "SUM" in inputs else {"OUT": inputs["IN"]}

    needs = (RateResource("R", 1),)
    load(core, OLDEST, instance_groups=(InstanceGroup("m", InstanceKind.CPU, 2, resources=needs),), on_run=run)
    core.load(core.spec("other", instance_groups=(InstanceGroup("other", InstanceKind.CPU, 1, resources=needs),)))
    _, other = core.submit(5, model="other")
    others.wait_blocked()
    _, first = step(core, 1, 1, "+-")
    steps.wait_blocked()
    _, second = step(core, 2, 2, "+-")  # of the other instance, for which nothing of R is left
    governor.is_open, governor.allowed_fraction = False, 0.5
    others.release(2)
    assert answer(other) == 5
    # What it held is free now, and nobody may run with it: its thread must not be kept with asking who can.
    assert answer(core.submit(6, model="other")[1]) == 6
    steps.release(2)
    assert [answer(first), answer(second)] == [1, 2]


def test_the_end_of_a_client_that_is_gone_lets_the_next_sequence_in(core: Any) -> None:
    version = load(core, OldestStrategy(1))
    assert walk(core, 1, [1], ends=False) == [1]
    _, waiting = step(core, 2, 2, "+")
    core.service.end_sequence("m", None, 1)
    core.service.end_sequence("unknown", None, 1)
    assert answer(waiting) == 2
    assert version._scheduler.live_count == 1


# -- several versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST], ids=["direct", "oldest"])
def test_a_sequence_goes_on_where_it_began_beside_a_newer_version(core: Any, strategy: Any) -> None:
    load(core, strategy)
    assert walk(core, 1, [1], ends=False) == [1]
    load(core, strategy, versions=(1, 2))
    assert (step(core, 1, 5)[1].final().version, step(core, 2, 5, "+")[1].final().version) == (1, 2)
    _, ended = step(core, 1, 4, "-")
    assert (ended.final().version, answer(ended)) == (1, 10)
    with pytest.raises(InvalidRequest, match="START flag"):
        step(core, 1, 1)


def test_a_sequence_of_a_client_that_names_its_version_is_kept_apart_from_one_with_the_same_id(core: Any) -> None:
    load(core, versions=(1, 2))
    assert answer(step(core, 7, 1, "+", version=1)[1]) == 1
    assert answer(step(core, 7, 10, "+")[1]) == 10
    assert answer(step(core, 7, 20)[1]) == 30
    assert answer(step(core, 7, 2, version=1)[1]) == 3
    core.service.end_sequence("m", None, 7)
    assert answer(step(core, 7, 3, version=1)[1]) == 6
    with pytest.raises(InvalidRequest, match="START flag"):
        step(core, 7, 1)


def test_a_sequence_that_begins_anew_leaves_no_other_in_another_version(core: Any) -> None:
    load(core, versions=(1, 2), parameters={"warmup_probe": "false", "canary_share": "0.5"})
    schedulers = [core.router.route("m", version)._scheduler for version in (1, 2)]
    versions = [step(core, 1, 1, "+")[1].final().version for _ in range(4)]
    assert versions == [1, 2, 1, 2]
    assert eventually(lambda: [scheduler.live_count for scheduler in schedulers] == [0, 1])
    assert step(core, 1, 1)[1].final().version == 2


def test_the_end_of_a_client_that_is_gone_reaches_a_version_that_is_not_the_newest(core: Any) -> None:
    older = load(core)
    walk(core, 1, [1], ends=False)
    load(core, versions=(1, 2))
    core.service.end_sequence("m", None, 1)
    assert eventually(lambda: older._scheduler.live_count == 0)


def test_no_sequence_of_many_clients_changes_its_version_while_a_canary_comes_and_is_taken_back(core: Any) -> None:
    load(core, OLDEST)
    clients: list[list[list[tuple[int, float]]]] = [[] for _ in range(4)]
    is_over = threading.Event()

    def run(first: int, sequences: list[list[tuple[int, float]]]) -> None:
        while not is_over.is_set():
            answers = []
            for flags in ("+", "", "", "-"):
                _, mailbox = step(core, first + len(sequences), 1, flags)
                answers.append((mailbox.final().version, answer(mailbox)))
            sequences.append(answers)

    threads = [threading.Thread(target=run, args=(1 + 1_000_000 * number, own)) for number, own in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        assert eventually(lambda: all(clients))
        load(core, OLDEST, versions=(1, 2), parameters={"warmup_probe": "false"} | NEVER_FAILS)
        assert eventually(lambda: any(found[0][0] == 2 for own in clients for found in own))
        core.table._end_trial(core.table.routes["m"].trial, "as told")
        counts = [len(own) for own in clients]
        # The next sequence of a client may have begun before.
        assert eventually(lambda: all(len(own) >= count + 2 for own, count in zip(clients, counts, strict=True)))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    whole = {version: [(version, float(total)) for total in range(1, 5)] for version in (1, 2)}
    assert [found for own in clients for found in own if found not in whole.values()] == []
    assert [own[-1] for own in clients] == [whole[1]] * 4


def test_sequences_of_a_canary_go_on_when_it_is_taken_back_and_when_the_older_version_goes(core: Any) -> None:
    canary = {"warmup_probe": "false", "canary_share": "0.5"}
    load(core, versions=(1, 2), parameters=canary)
    assert [step(core, number, 1, "+")[1].final().version for number in (1, 2)] == [1, 2]
    core.table._end_trial(core.table.routes["m"].trial, "as told")
    assert [step(core, number, 1, "+")[1].final().version for number in (3, 4)] == [1, 1]
    assert [step(core, number, 1)[1].final().version for number in (1, 2)] == [1, 2]
    load(core, versions=(2,), parameters=canary)
    assert answer(step(core, 2, 1)[1]) == 3
    with pytest.raises(InvalidRequest, match="START flag"):
        step(core, 1, 1)
    assert step(core, 1, 1, "+")[1].final().version == 2


# -- models that see requests ---------------------------------------------------------------------------------------


def test_a_model_of_requests_gets_the_controls_as_inputs_and_the_flags(core: Any) -> None:
    seen: list[list[tuple[Any, ...]]] = []

    def execute(executions: Any) -> None:
        seen.append([])
        for execution in executions:
            request = execution.request
            values = {name: tensor.array.ravel().tolist() for name, tensor in request.inputs.items()}
            seen[-1].append((values["READY"][0], values["START"][0], values["ID"][0], request.sequence))
            execution.send({"OUT": request.inputs["IN"].array}, is_final=True)

    core.script.on_execute = execute
    load(core, DIRECT, sequence=batching(states=()))
    assert walk(core, 7, [1], ends=False) == [1]
    assert walk(core, 8, [2], ends=False) == [2]
    assert answer(step(core, 8, 3, "-")[1]) == 3
    assert seen == [
        [(1, 1, 7, SequenceStep(7, True))],
        [(0, 0, 0, None), (1, 1, 8, SequenceStep(8, True))],
        [(0, 0, 0, None), (1, 0, 8, SequenceStep(8, False, True))],
    ]


def test_a_model_that_answers_later_gets_the_next_step_only_then(core: Any) -> None:
    held: list[Any] = []
    core.script.on_execute = held.extend
    load(core, OLDEST, sequence=batching(OLDEST, states=(), controls=(START,)))
    boxes = [step(core, 7, value, flags)[1] for value, flags in ((1, "+"), (2, ""), (3, "-"))]
    for place, box in enumerate(boxes):
        assert eventually(lambda place=place: len(held) == place + 1)
        assert not box.responses
        held[place].send({"OUT": held[place].request.inputs["IN"].array}, is_final=True)
        assert answer(box) == place + 1


def test_preserve_ordering_holds_for_models_that_answer_later(core: Any, new_blocker: Any) -> None:
    held: list[Any] = []
    blocker = new_blocker()

    def execute(executions: Any) -> None:
        blocker.block()
        held.extend(executions)

    core.script.on_execute = execute
    load(core, OldestStrategy(4, (), 0, True), sequence=batching(OldestStrategy(4, (), 0, True), states=()))
    boxes = [step(core, 1, 1, "+")[1]]
    blocker.wait_blocked()
    boxes.append(step(core, 2, 2, "+")[1])
    blocker.release(2)
    assert eventually(lambda: len(held) == 2)
    held[1].send({"OUT": held[1].request.inputs["IN"].array}, is_final=True)
    assert not boxes[1].responses
    held[0].send({"OUT": held[0].request.inputs["IN"].array}, is_final=True)
    assert [answer(box) for box in boxes] == [1, 2]


def test_a_runtime_of_requests_that_is_given_states_says_so(core: Any) -> None:
    core.script.on_execute = lambda executions: None
    load(core)
    error = step(core, 1, 1, "+")[1].final().error
    assert isinstance(error, EdgeServerError)
    assert "keeps states itself" in error.message


# -- iterative ------------------------------------------------------------------------------------------------------


def iterate(core: Any, execute: Any, strategy: Any = OLDEST, **more: Any) -> Any:
    core.script.on_execute = execute
    sequence = batching(strategy, states=(), controls=more.pop("controls", (START, NUMBER)), is_iterative=True)
    return load(core, strategy, sequence=sequence, is_decoupled=True, **more)


class Countdown:
    """Answers a request with its value, less one each time it comes; it comes again until that is 1."""

    def __init__(self) -> None:
        self.left: dict[int | str, float] = {}
        self.told: list[list[tuple[Any, bool, float]]] = []

    def __call__(self, executions: Any) -> None:
        self.told.append([])
        for execution in executions:
            request = execution.request
            step, value = request.sequence, float(request.inputs["IN"].array[0, 0])
            self.told[-1].append((step.id, step.is_start, float(request.inputs["START"].array[0, 0])))
            left = self.left[step.id] = value if step.is_start else self.left[step.id] - 1
            execution.send({"OUT": np.full((1, 1), left, np.float32)})
            if left > 1:
                execution.reschedule()
            else:
                execution.finish()


def stream(mailbox: Any) -> list[float]:
    final = mailbox.final()
    assert final.error is None, final.error
    return [float(response.outputs[0].array[0, 0]) for response in mailbox.responses if response.outputs]


@pytest.mark.parametrize("strategy", [DIRECT, OLDEST])
def test_a_request_runs_until_its_model_lets_it_go_and_needs_no_id(core: Any, strategy: Any) -> None:
    model = Countdown()
    version = iterate(core, model, strategy)
    assert stream(core.submit(3)[1]) == [3, 2, 1]
    id = model.told[0][0][0]
    assert model.told == [[(id, True, 1)], [(id, False, 0)], [(id, False, 0)]]
    assert eventually(lambda: version.in_flight == 0)
    found = version.statistics()
    assert (version._scheduler.live_count, found.pending_count) == (0, 0)
    assert (found.success.count, found.inference_count, found.execution_count) == (1, 1, 3)
    assert {place: one.success.count for place, one in found.responses.items()} == {0: 1, 1: 1, 2: 1, 3: 0}
    assert found.responses[3].empty_response.count == 1


def test_what_comes_joins_the_batch_between_two_runs_of_a_longer_one(core: Any, new_blocker: Any) -> None:
    blocker, model = new_blocker(), Countdown()

    def execute(executions: Any) -> None:
        blocker.block()
        model(executions)

    version = iterate(core, execute)
    long = core.submit(6)[1]
    blocker.wait_blocked()
    short = [core.submit(2)[1] for _ in range(5)]
    blocker.release(100)
    assert [stream(box) for box in (long, *short)] == [[6, 5, 4, 3, 2, 1], *[[2, 1]] * 5]
    assert [len(batch) for batch in model.told] == [1, 4, 4, 4, 1, 1, 1]
    assert {size: one.compute_infer.count for size, one in version.statistics().batches.items()} == {1: 4, 4: 3}


def test_preserve_ordering_holds_for_requests_that_run_again_and_holds_up_none_after_them(core: Any) -> None:
    version = iterate(core, Countdown(), OldestStrategy(8, (), 0, True))
    assert [stream(core.submit(value)[1]) for value in (3, 1, 2)] == [[3, 2, 1], [1], [2, 1]]
    version.stop_accepting()
    version.drain()


def test_an_id_that_a_client_chose_reaches_the_model_and_two_of_it_do_not_mix(core: Any) -> None:
    model = Countdown()
    iterate(core, model)
    boxes = [core.submit(value, sequence=SequenceStep(99))[1] for value in (5, 3, 4)]
    assert [stream(box) for box in boxes] == [[5, 4, 3, 2, 1], [3, 2, 1], [4, 3, 2, 1]]
    assert {id for batch in model.told for id, _, _ in batch} == {99}


def test_cancel_frees_the_slot_of_a_request_whether_it_runs_or_waits_to_run_again(core: Any, new_blocker: Any) -> None:
    blocker, model = new_blocker(), Countdown()

    def execute(executions: Any) -> None:
        blocker.block()
        model(executions)

    version = iterate(core, execute, OldestStrategy(1))
    ticket, box = core.submit(1e6)
    other = core.submit(1)[1]
    blocker.wait_blocked()
    assert (version._scheduler.live_count, version._scheduler.backlog_count) == (1, 1)
    ticket.cancel()
    assert isinstance(box.final().error, Cancelled)
    blocker.release(100)
    assert stream(other) == [1]
    assert eventually(lambda: version.in_flight == 0)
    assert [id for batch in model.told for id, _, _ in batch] == [1, 2]


def test_cancels_at_any_time_leave_nothing_behind(core: Any) -> None:
    version = iterate(core, Countdown(), instances=2)
    numbers = random.Random(3)
    running = [core.submit(numbers.randint(1, 400)) for _ in range(60)]
    for ticket, _ in numbers.sample(running, 40):
        ticket.cancel()
    for _, box in running:
        box.final()
    assert eventually(lambda: version.in_flight == 0)
    scheduler = version._scheduler
    assert (scheduler.live_count, scheduler.backlog_count, scheduler.pending_count) == (0, 0, 0)
    assert stream(core.submit(2)[1]) == [2, 1]


def test_a_deadline_ends_a_request_between_two_runs(core: Any) -> None:
    version = iterate(core, Countdown())
    _, box = core.submit(1e9, deadline_ns=time.monotonic_ns() + 50_000_000)
    assert isinstance(box.final().error, DeadlineExceeded)
    assert len(box.responses) > 1
    assert eventually(lambda: version._scheduler.live_count == 0)


def test_a_version_that_is_replaced_lets_running_requests_go_on_to_their_end(core: Any, new_blocker: Any) -> None:
    blocker, model = new_blocker(), Countdown()

    def execute(executions: Any) -> None:
        blocker.block()
        model(executions)

    iterate(core, execute)
    box = core.submit(4)[1]
    blocker.wait_blocked()
    threading.Timer(0.05, blocker.release, (100,)).start()
    iterate(core, model, mark="b")
    assert stream(box) == [4, 3, 2, 1]


def test_stopping_ends_a_request_that_would_run_for_ever(new_core: Any) -> None:
    core = new_core()
    version = iterate(core, Countdown())
    _, box = core.submit(1e9)
    box.wait(3)
    core.service.close(0.0)
    assert isinstance(box.final().error, Draining)
    assert version.in_flight == 0


def test_a_run_that_fails_ends_the_request_and_its_slot(core: Any) -> None:
    def execute(executions: Any) -> None:
        for execution in executions:
            if execution.request.sequence.is_start:
                execution.reschedule()
        if not executions[0].request.sequence.is_start:
            raise ValueError("no weights")

    version = iterate(core, execute)
    error = core.submit(1)[1].final().error
    assert isinstance(error, BackendError)
    assert "no weights" in error.message
    assert eventually(lambda: version._scheduler.live_count == 0)


def test_a_model_that_is_not_iterative_and_asks_to_run_again_fails_the_request(core: Any) -> None:
    def execute(executions: Any) -> None:
        for execution in executions:
            execution.reschedule()

    core.script.on_execute = execute
    load(core, OLDEST, sequence=batching(OLDEST, states=()))
    error = step(core, 1, 1, "+-")[1].final().error
    assert isinstance(error, BackendError)
    assert "no sequence_batching { iterative_sequence: true }" in error.message


# -- states of strings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x02\0\0\0hi\0\0\0\0", None),
        (b"\x02\0\0\0hi", "expected 2 strings, .*given 1"),
        (b"", "expected 2 strings, .*given 0"),
        (b"\0\0\0\0" * 3, "expected 2 strings, .*given more than 2"),
        (b"\x02\0\0\0hi\x09\0\0\0ho", "string 1 in 4 bytes, .*a file of 12 bytes, which ends within them"),
        (b"\x02\0\0\0hi\0\0", "string 1 in 4 bytes"),
        (b"\xff\xff\xff\xff", "string 0 in 4 bytes"),
    ],
)
def test_a_state_of_strings_begins_as_its_file_says(
    core: Any, tmp_path: Path, data: bytes, message: str | None
) -> None:
    folder = tmp_path / "m" / "initial_state"
    folder.mkdir(parents=True)
    (folder / "words").write_bytes(data)
    seen: list[list[bytes]] = []

    def run(_: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        seen.extend(inputs["WORDS"].tolist())
        return {"OUT": inputs["IN"], "NEXT": inputs["WORDS"] + b"!"}

    core.script.on_run = run
    state = StateTensor("WORDS", "NEXT", DType.BYTES, (2,), InitialState("begin", DType.BYTES, (2,), "words"))
    spec = core.spec(sequence=batching(OLDEST, states=(state,)), parameters={"warmup_probe": "false"})
    if message is None:
        core.load(spec, root=tmp_path)
        assert walk(core, 1, [1, 2]) == [1, 2]
        assert seen == [[b"hi", b""], [b"hi!", b"!"]]
        return
    core.set_desired(spec, root=tmp_path)
    assert core.table.wait_settled(["m"], 20)
    assert re.search(message, core.router.failure("m"))
