"""Scheduler of sequence models (Triton's sequence batcher, strategies direct and oldest): runs a sequence's requests in
order on one instance."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from edge_server.core.batch import BatchPlan
from edge_server.core.batch_queue import QueueEntry
from edge_server.core.ensemble_and_sequence_spec import OldestStrategy, SequenceBatching
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import SequenceStep
from edge_server.core.sequence_batcher import SequenceEntry, SequenceQueue, WaitingLimits
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.executor import BatchExecutor
from edge_server.serving.execution.instance import Instance
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.execution.scheduler import Run, Scheduler
from edge_server.serving.execution.ticket import OrderedDelivery, Ticket
from edge_server.serving.sequence.control_tensors import Controls, StateTensors
from edge_server.serving.sequence.executor import SequenceBatch, SequenceExecutor
from edge_server.serving.timer import Timer

_MAX_SEQUENCE_ID = 0x7FFFFFFF
_MAX_WAITING = 1_000_000


class SequenceScheduler(Scheduler):
    """Like the default scheduler, but a batch belongs to the instance to which its sequences are bound.

    Requests, not sequences, keep a version from being closed. A sequence without a request in flight ends with its
    version; its next request, if it has no START, is refused by the successor.

    For an iterative model each request is a sequence, with the id of the request or one that is made here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        batching: SequenceBatching,
        controls: Controls,
        counters: VersionCounters,
        timer: Timer,
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
    ) -> None:
        super().__init__(spec, counters, timer, admission_control, limiter)
        self._line: SequenceQueue[Ticket] = SequenceQueue(
            spec.max_batch_size, batching, spec.name, waiting_limits(spec)
        )
        self._queue = self._line
        self._controls = controls
        self._numbers: dict[Instance, int] = {}
        self._is_iterative = batching.is_iterative
        self._made_ids = itertools.count()
        strategy = batching.strategy
        self._keeps_order = isinstance(strategy, OldestStrategy) and strategy.preserve_ordering
        self._orders: list[OrderedDelivery] = []

    @property
    def live_count(self) -> int:
        """Number of sequences with a slot."""
        return self._line.live_count

    @property
    def backlog_count(self) -> int:
        """Number of sequences that wait for a slot."""
        return self._line.backlog_count

    def open(self, instances: Sequence[Instance]) -> None:
        self._numbers = {instance: number for number, instance in enumerate(instances)}
        self._orders = [OrderedDelivery() for _ in instances] if self._keeps_order else []
        self._line.open(len(instances))
        super().open(instances)

    def submit(self, ticket: Ticket, *, is_inline: bool) -> None:
        """As in any scheduler; also raises InvalidRequest for a request that is not a valid step of a sequence."""
        ticket.sequence_entry = self._new_entry(ticket)
        super().submit(ticket, is_inline=is_inline)

    def release(self, tickets: Sequence[Ticket]) -> None:
        """As in any scheduler; the sequences of the tickets continue."""
        now_ns = time.monotonic_ns()
        with self._lock:
            for ticket in tickets:
                if ticket.sequence_entry is not None:
                    self._line.finish(ticket.sequence_entry, now_ns)
        super().release(tickets)
        self.resume()

    def run_again(self, ticket: Ticket) -> None:
        now_ns = time.monotonic_ns()
        runs: list[Run] = []
        expired: list[Ticket] = []
        with self._lock:
            # A cancelling thread closes the ticket first, and then checks under the lock whether it waits.
            goes_on = not ticket.is_closed and not self._is_abandoned
            if goes_on:
                assert ticket.sequence_entry is not None
                self._line.requeue(ticket.sequence_entry, ticket, now_ns)
                runs, expired = self._decide()
        if goes_on:
            self._carry_out(runs, expired)
            return
        self._fail([ticket], self._has_stopped())
        self.release([ticket])

    def end_sequence(self, sequence_id: int | str) -> None:
        """End a sequence whose client has disconnected. Returns at once: another thread starts what may run now."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self._line.end(sequence_id, now_ns)
            has_waiting = self._line.size > 0
        if has_waiting:
            self._timer.call_at(now_ns, self.resume)

    def has_sequence(self, sequence_id: int | str) -> bool:
        with self._lock:
            return self._line.has_routed(sequence_id)

    def _entry(self, ticket: Ticket) -> QueueEntry[Ticket]:
        return ticket if ticket.sequence_entry is None else ticket.sequence_entry

    def _new_entry(self, ticket: Ticket) -> SequenceEntry[Ticket]:
        step = ticket.request.sequence
        if self._is_iterative:
            # A generated number fits every type of correlation id, including INT32.
            step = SequenceStep(next(self._made_ids) % _MAX_SEQUENCE_ID + 1 if step is None else step.id, is_start=True)
        elif step is None:
            raise InvalidRequest(
                f"inference request to model '{self._name}' must specify a non-zero or non-empty correlation ID: "
                "the request parameter sequence_id"
            )
        if ticket.item_count > 1:
            raise InvalidRequest(
                f"inference request to model '{self._name}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, got {ticket.item_count}"
            )
        self._controls.check_id(step.id)
        return SequenceEntry(
            item_count=1,
            key=ticket.key,
            arrived_ns=ticket.arrived_ns,
            start_by_ns=ticket.start_by_ns,
            id=step.id,
            is_start=step.is_start,
            is_end=step.is_end,
            names_version=ticket.request.version is not None,
        )

    def _decide(self) -> tuple[list[Run], list[Ticket]]:
        now_ns = time.monotonic_ns()
        expired = self._line.expire(now_ns)
        room = len(self._free) if self._admission_control.is_open and not self._is_held else self._limit_to_admission()
        runs: list[Run] = []
        while len(runs) < room:
            due = [instance for instance in self._free if self._line.is_due(self._numbers[instance], now_ns)]
            if self._limiter is not None:
                self._limiter.withdraw_others(due)
            chosen = None if not due else due[-1] if self._limiter is None else self._limiter.acquire(due)
            if chosen is None:
                # No step waits, or all that do must wait for resources.
                break
            runs.append((chosen, self._take(chosen, now_ns)))
        else:
            if self._limiter is not None:
                # No more may run now. Otherwise a waiting sequence would be next in turn and asked again and again.
                self._limiter.withdraw_all()
        self._set_alarm(may_start=len(runs) < room)
        return runs, expired

    def _take(self, instance: Instance, now_ns: int) -> SequenceBatch:
        self._free.remove(instance)
        number = self._numbers[instance]
        batch = SequenceBatch(self._line.take(number, now_ns))
        if self._orders:
            for ticket, entry in zip(batch, batch.entries, strict=True):
                # An instance that runs again already has its place in the order.
                if entry.is_start or not self._is_iterative:
                    self._orders[number].add(ticket)
        return batch


def waiting_limits(spec: ModelSpec) -> WaitingLimits:
    """Return the model's `max_waiting_sequences` and `max_waiting_per_sequence`. Raises
    BadModelConfig."""
    usual = WaitingLimits()
    return WaitingLimits(
        _count(spec, "max_waiting_sequences", usual.sequences),
        _count(spec, "max_waiting_per_sequence", usual.requests),
    )


def _count(spec: ModelSpec, key: str, default: int) -> int:
    text = spec.parameters.get(key)
    if text is None:
        return default
    digits = text.strip()
    # A valid number has no more digits, and Python refuses to read thousands of digits.
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 10 else 0
    if not 1 <= number <= _MAX_WAITING:
        raise BadModelConfig(
            f"model '{spec.name}': parameter {key} must be a whole number of 1 to {_MAX_WAITING}, got '{text[:80]}'"
        )
    return number


def schedule(
    spec: ModelSpec,
    plan: BatchPlan,
    counters: VersionCounters,
    timer: Timer,
    admission_control: AdmissionControl,
    limiter: RateLimiter | None,
) -> tuple[Scheduler, BatchExecutor, StateTensors | None]:
    """Return a version's scheduler and executor, and the initial states to load before their use; None for a model
    without sequences."""
    if spec.sequence is None:
        scheduler = Scheduler(spec, counters, timer, admission_control, limiter)
        return scheduler, BatchExecutor(spec, plan, counters, scheduler), None
    controls, states = Controls(spec, spec.sequence), StateTensors(spec, spec.sequence)
    sequences = SequenceScheduler(spec, spec.sequence, controls, counters, timer, admission_control, limiter)
    return sequences, SequenceExecutor(spec, plan, counters, sequences, controls, states), states
