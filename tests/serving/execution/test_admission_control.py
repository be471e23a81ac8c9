"""Admission control: refusals, charges that are corrected once, limits of instances and rows, and its opening."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, InputSpec, ModelSpec, OutputSpec, QueuePolicy
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType
from edge_server.errors import Cancelled, DeadlineExceeded, EdgeServerError, QueueFull, Throttled
from tests.kit.eventually import eventually
from tests.kit.together import together

BATCHING = DynamicBatching((8,))


class LimitedAdmission:
    """Limits load: charges each request another amount, and records the corrections."""

    def __init__(self, share: float = 1.0) -> None:
        self.is_open = False
        self.allowed_fraction = share
        self.refuses = False
        self.asked: list[tuple[str, float]] = []
        self.settled: dict[float, list[float]] = {}
        self._lock = threading.Lock()

    def admit(self, spec: ModelSpec, request: Request, cost_s: float) -> float:
        with self._lock:
            self.asked.append((spec.name, cost_s))
            if self.refuses:
                raise Throttled(f"model '{spec.name}' has to wait: the box is HOT", retry_after_s=0.7)
            charged_s = float(len(self.asked))
            self.settled[charged_s] = []
            return charged_s

    def correct_charge(self, charged_s: float, took_s: float) -> None:
        with self._lock:
            self.settled[charged_s].append(took_s)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was charged was settled exactly once."""
        return all(len(times) == 1 for times in self.settled.values())

    @property
    def took(self) -> list[float]:
        return [times[0] for _, times in sorted(self.settled.items())]


@pytest.fixture
def held() -> LimitedAdmission:
    return LimitedAdmission()


def test_open_admission_control_is_not_asked(new_core: Any, held: LimitedAdmission) -> None:
    held.is_open = True
    core = new_core(admission=held)
    core.load(core.spec())
    assert core.submit()[1].final().error is None
    assert held.asked == []
    assert held.settled == {}


def test_a_refused_request_gets_the_message_of_admission_control_and_is_counted(
    new_core: Any, held: LimitedAdmission
) -> None:
    core = new_core(admission=held)
    version = core.load(core.spec())
    held.refuses = True
    given_back: list[int] = []
    with pytest.raises(Throttled, match="has to wait: the box is HOT") as caught:
        core.submit(release=lambda: given_back.append(1))
    assert caught.value.retry_after_s == 0.7
    assert given_back == [1]
    assert version.statistics().failures["REJECTED"] == 1
    assert core.script.ran == []
    assert version.in_flight == 0


def test_the_cost_is_the_time_that_rows_took_before(new_core: Any, held: LimitedAdmission) -> None:
    core = new_core(admission=held)
    core.load(core.spec())
    for rows in (1, 4):
        core.submit(rows=rows)[1].final()
    assert held.asked[0] == ("m", 0.0), "nothing is known before the first run"
    assert held.asked[1][1] > 0


def test_each_charge_is_corrected_with_the_requests_part_of_the_run(
    new_core: Any, held: LimitedAdmission, eventually: Any
) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec(dynamic_batching=BATCHING))
    mailboxes = [core.submit()[1]]
    stop.wait_blocked()
    mailboxes += [core.submit(rows=rows)[1] for rows in (1, 3)]
    stop.release(2)
    assert all(mailbox.final().error is None for mailbox in mailboxes)
    assert eventually(lambda: held.is_settled)
    first, one, three = held.took
    assert first > 0
    assert three == pytest.approx(3 * one)


def test_a_failed_batch_is_settled_with_the_time_it_took(new_core: Any, held: LimitedAdmission) -> None:
    core = new_core(admission=held)
    core.script.on_run = lambda name, inputs: 1 / 0
    core.load(core.spec())
    assert core.submit()[1].final().error is not None
    assert eventually(lambda: held.is_settled)
    assert held.took[0] > 0


def test_a_cancelled_waiting_request_is_charged_nothing_and_a_running_one_its_time(
    new_core: Any, held: LimitedAdmission, eventually: Any
) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec())
    running, _ = core.submit()
    stop.wait_blocked()
    waiting, mailbox = core.submit()
    waiting.cancel()
    running.cancel()
    running.cancel()
    assert isinstance(mailbox.final().error, Cancelled)
    assert held.settled[2.0] == [0.0]
    assert held.settled[1.0] == [], "it still computes"
    stop.release()
    assert eventually(lambda: held.is_settled)
    assert held.took[0] > 0


def test_an_expired_request_is_charged_nothing(new_core: Any, held: LimitedAdmission) -> None:

    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec())
    core.submit()
    stop.wait_blocked()
    _, late = core.submit(deadline_ns=time.monotonic_ns() + 10_000_000)
    assert isinstance(late.final().error, DeadlineExceeded)
    assert eventually(lambda: held.settled[2.0] == [0.0])
    stop.release()
    assert eventually(lambda: held.is_settled)


def test_a_request_to_a_full_queue_is_charged_nothing(new_core: Any, held: LimitedAdmission) -> None:

    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec(dynamic_batching=DynamicBatching((8,), default_queue_policy=QueuePolicy(max_queue_size=1))))
    core.submit()
    stop.wait_blocked()
    core.submit()
    with pytest.raises(QueueFull):
        core.submit()
    assert held.settled[3.0] == [0.0]
    stop.release(2)


def test_those_failed_at_the_end_of_the_server_are_settled(
    new_core: Any, held: LimitedAdmission, eventually: Any
) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec())
    core.submit()
    stop.wait_blocked()
    _, waiting = core.submit()
    assert not core.service.close(0.0)
    assert waiting.final().error is not None
    assert held.settled[2.0] == [0.0]
    stop.release()
    assert eventually(lambda: held.is_settled)


def test_a_stream_of_responses_is_settled_when_it_ends(new_core: Any, held: LimitedAdmission) -> None:
    core = new_core(admission=held)
    going: list[Any] = []
    core.script.on_execute = going.extend
    shape = {"max_batch_size": 0, "is_decoupled": True}
    core.load(
        core.spec(
            inputs=(InputSpec("IN", DType.FP32, (1, 1)),), outputs=(OutputSpec("OUT", DType.FP32, (1, 1)),), **shape
        )
    )
    mailboxes = [core.submit()[1] for _ in range(3)]
    assert eventually(lambda: len(going) == 3)
    answer = {"OUT": np.zeros((1, 1), np.float32)}
    going[0].send(answer)
    mailboxes[0].wait()
    assert held.settled[1.0] == []
    going[0].finish()
    going[0].finish()
    going[1].fail(EdgeServerError("no"))
    going[2].send(answer, is_final=True)
    for mailbox in mailboxes:
        mailbox.final()
    assert eventually(lambda: held.is_settled)
    assert all(took > 0 for took in held.took)


def test_a_share_below_one_caps_how_many_instances_run(new_core: Any, held: LimitedAdmission) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec(instances=4))
    held.allowed_fraction = 0.5
    mailboxes = [core.submit()[1] for _ in range(4)]
    stop.wait_blocked()
    stop.wait_blocked()
    assert len(core.script.ran) == 2
    stop.release(4)
    assert all(mailbox.final().error is None for mailbox in mailboxes)


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_one_instance_and_one_row_run_whatever_the_share_is(
    new_core: Any, held: LimitedAdmission, share: float
) -> None:
    core = new_core(admission=held)
    core.load(core.spec(instances=2, dynamic_batching=BATCHING))
    held.allowed_fraction = share
    mailboxes = [core.submit(number)[1] for number in range(6)]
    assert all(mailbox.final().error is None for mailbox in mailboxes)
    assert {rows for _, _, rows in core.script.ran} == {1}


def test_a_share_below_one_caps_how_many_rows_run_together_but_splits_no_request(
    new_core: Any,
    held: LimitedAdmission,
) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec(dynamic_batching=BATCHING))
    held.allowed_fraction = 0.5
    mailboxes = [core.submit()[1]]
    stop.wait_blocked()
    mailboxes += [core.submit(rows=rows)[1] for rows in (2, 2, 1, 6, 1)]
    stop.release(20)
    assert all(mailbox.final().error is None for mailbox in mailboxes)
    assert [rows for _, _, rows in core.script.ran] == [1, 4, 1, 6, 1]


def test_opening_admission_control_starts_the_requests_that_it_held_back(
    new_core: Any,
    held: LimitedAdmission,
) -> None:
    core = new_core(admission=held)
    stop = core.block_runs()
    for name in ("a", "b"):
        core.load(core.spec(name, instances=3))
    held.allowed_fraction = 0.2
    mailboxes = [core.submit(model=name)[1] for _ in range(3) for name in ("a", "b")]
    stop.wait_blocked()
    stop.wait_blocked()
    assert len(core.script.ran) == 2
    held.is_open = True
    core.service.resume()
    for _ in range(4):
        stop.wait_blocked()
    stop.release(6)
    assert all(mailbox.final().error is None for mailbox in mailboxes)


def test_being_capped_while_a_queue_delay_is_over_does_not_keep_the_timer_busy(
    new_core: Any,
    held: LimitedAdmission,
) -> None:

    core = new_core(admission=held)
    stop = core.block_runs()
    core.load(core.spec(instances=2, dynamic_batching=DynamicBatching((8,), max_queue_delay_us=1000)))
    held.allowed_fraction = 0.5
    _, first = core.submit()
    stop.wait_blocked()
    count = 0
    plain = core.timer.call_at

    def counted(when_ns: int, call: Any) -> Any:
        nonlocal count
        count += 1
        return plain(when_ns, call)

    core.timer.call_at = counted
    _, second = core.submit()
    passed = threading.Event()
    plain(time.monotonic_ns() + 30_000_000, passed.set)
    assert passed.wait(20)
    assert count <= 2
    stop.release(2)
    assert first.final().error is second.final().error is None


def test_charges_are_settled_once_in_a_storm_of_all_endings(new_core: Any, held: LimitedAdmission) -> None:

    core = new_core(admission=held)
    plain = core.script.on_run
    luck = random.Random(3)

    def run(name: str, inputs: Any) -> Any:
        if luck.random() < 0.2:
            raise RuntimeError("now and then")
        return plain(name, inputs)

    core.script.on_run = run
    core.load(core.spec(instances=2, dynamic_batching=BATCHING))

    def work(seed: int) -> None:
        mine = random.Random(seed)
        mailboxes = []
        for _ in range(120):
            more = {"deadline_ns": time.monotonic_ns() + 300_000} if mine.random() < 0.3 else {}
            held.allowed_fraction = mine.choice((0.2, 0.6, 1.0))
            try:
                ticket, mailbox = core.submit(may_run=mine.random() < 0.5, **more)
            except EdgeServerError:
                continue
            mailboxes.append(mailbox)
            if mine.random() < 0.3:
                ticket.cancel()
        for mailbox in mailboxes:
            mailbox.final()

    together(work, range(4))
    assert eventually(lambda: held.is_settled)
    assert len(held.settled) == len(held.asked)
