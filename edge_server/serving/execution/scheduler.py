"""Scheduler of one version: decides which requests run together, when, and on which instance.

It acts on three events: a new request, a free instance, a timer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import Cancelled, DeadlineExceeded, Draining, EdgeServerError
from edge_server.serving.execution.admission_control import ADMIT_ALL, AdmissionControl
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.instance import Instance
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.execution.rate_limiter_client import RateLimiterClient
from edge_server.serving.execution.requests_in_flight import RequestsInFlight
from edge_server.serving.execution.ticket import OrderedDelivery, Ticket
from edge_server.serving.timer import Alarm, Timer

if TYPE_CHECKING:
    from edge_server.core.sequence_batcher import SequenceQueue

Run: TypeAlias = tuple[Instance, list[Ticket]]
"""A batch and the instance reserved for it."""

RequestQueue: TypeAlias = "BatchQueue[Ticket] | SequenceQueue[Ticket]"


class Scheduler(RequestsInFlight[Ticket]):
    """The default scheduler and the dynamic batcher; they differ only in the rule of their queue.

    One lock guards the queue, the free instances and the number of requests in flight. It is held briefly, and never
    during a call of a runtime or a sink, or during I/O: decisions are made under the lock and carried out after it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        counters: VersionCounters,
        timer: Timer,
        admission_control: AdmissionControl = ADMIT_ALL,
        limiter: RateLimiter | None = None,
    ) -> None:
        super().__init__(spec.name, timer)
        self._rule: BatchQueue[Ticket] = BatchQueue(spec.max_batch_size, spec.dynamic_batching, spec.name)
        self._queue: RequestQueue = self._rule
        self._free: list[Instance] = []
        self._instance_count = 0
        self._alarm: Alarm | None = None
        self._name = spec.name
        self._counters = counters
        self._admission_control = admission_control
        self._limiter = None if limiter is None else RateLimiterClient(limiter, spec.name, self._retry)
        self._max_items = max(1, spec.max_batch_size)
        self._is_held = False
        """Whether admission control held something back at the last check."""
        self._is_abandoned = False
        self._runs_single_requests = spec.sequence is None and limiter is None and self._rule.runs_single_requests
        """Whether a request may skip the queue if it is empty and an instance is free."""
        keeps_order = spec.dynamic_batching is not None and spec.dynamic_batching.preserve_ordering
        self._order = OrderedDelivery() if keeps_order else None

    @property
    def pending_count(self) -> int:
        return self._queue.size

    def register_resources(self, instances: Sequence[Instance]) -> None:
        """Register the resources of the instances. Raises BadModelConfig; call `release_resources` then too."""
        if self._limiter is not None:
            self._limiter.register(instances)

    def release_resources(self) -> None:
        """Release all shared resources, also those of hung instances."""
        if self._limiter is not None:
            self._limiter.unregister()

    def open(self, instances: Sequence[Instance]) -> None:
        """Begin to accept requests. All instances are free."""
        with self._lock:
            self._free.extend(instances)
            self._instance_count = len(instances)
        self.accept()

    def add(self, ticket: Ticket) -> None:
        """Count a ticket as in flight that is not enqueued, or not yet: `submit` or `release` must follow.

        Raises the error given to `close`.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            self._in_flight.add(ticket)
            if self._order is not None:
                self._order.add(ticket)

    def submit(self, ticket: Ticket, *, is_inline: bool) -> None:
        """Enqueue a ticket. If `is_inline` and an instance is free, run a batch on this thread.

        Raises QueueFull, or the error given to `close`; the ticket was not taken then. A ticket that entered before is
        not refused after `close`, and stays in flight if this raises.
        """
        instance: Instance | None = None
        runs: list[Run] = []
        expired: list[Ticket] = []
        with self._lock:
            if self._refusal is not None and (self._is_abandoned or ticket not in self._in_flight):
                raise self._refusal()
            if (
                self._runs_single_requests
                and self._free
                and not self._queue.size
                and not self._is_held
                and self._admission_control.is_open
                # The model's policy may allow a request to set its own timeout.
                and not ticket.timeout_us
                and (not ticket.start_by_ns or ticket.start_by_ns > time.monotonic_ns())
            ):
                # A queue with one request and a free instance would return it at once: skip the queue.
                instance = self._free.pop()
            else:
                self._queue.offer(self._entry(ticket), ticket)
            if self._order is not None and ticket not in self._in_flight:
                self._order.add(ticket)
            self._in_flight.add(ticket)
            if instance is None:
                runs, expired = self._decide()
        if instance is None:
            if runs or expired or self._limiter is not None:
                self._carry_out(runs, expired, is_inline=is_inline)
        elif is_inline:
            # Requests that were queued meanwhile go to the instance's own thread. Otherwise the caller would work for
            # others without end.
            if further := self._run(instance, [ticket]):
                instance.post(further)
        else:
            instance.post([ticket])

    def _entry(self, ticket: Ticket) -> QueueEntry[Ticket]:
        """Return the ticket's entry in the queue."""
        return ticket

    def resume(self) -> None:
        """Start waiting requests, because admission control allows more now."""
        with self._lock:
            runs, expired = self._decide()
        self._carry_out(runs, expired)

    def end_sequence(self, sequence_id: int | str) -> None:
        """End a sequence whose client has disconnected. Does nothing without sequences."""

    def has_sequence(self, sequence_id: int | str) -> bool:
        """See ServedVersion.has_sequence. Always False without sequences."""
        return False

    def serve(self, instance: Instance, batch: list[Ticket]) -> None:
        """Run a posted batch on this thread, and then further ones until none waits, or until other models wait for the
        thread."""
        while batch:
            batch = self._run(instance, batch)
            if batch and instance.must_yield:
                instance.post(batch)
                return

    def cancel(self, ticket: Ticket) -> None:
        """Answer CANCELLED unless the ticket is closed. A waiting ticket leaves the queue; a running one runs to its
        end."""
        if not ticket.claim():
            return
        runs: list[Run] = []
        expired: list[Ticket] = []
        with self._lock:
            was_waiting = self._queue.drop(self._entry(ticket))
            if was_waiting and self._limiter is not None:
                runs, expired = self._decide()
        error = Cancelled(f"request to model '{self._name}' was cancelled")
        self._counters.record_failure(error, ticket.arrived_ns, time.monotonic_ns())
        ticket.send_final(ticket.failure(error))
        if was_waiting:
            self.release([ticket])
        self._carry_out(runs, expired)

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Release the tickets; the version may be closed when none is left."""
        for ticket in tickets:
            if ticket.charged_s:
                self._admission_control.correct_charge(ticket.charged_s, ticket.took_s)
            ticket.release()
        with self._lock:
            self._in_flight.difference_update(tickets)
            if self._refusal is not None:
                self._notify_if_idle()

    def run_again(self, ticket: Ticket) -> None:
        """Run a request once more, as soon as possible. Only for schedulers of iterative sequences."""
        raise AssertionError(f"model '{self._name}' is not iterative")

    def abandon_waiting(self, error: EdgeServerError | None = None) -> int:
        """Fail all waiting requests, because the drain time is over. Return their number."""
        with self._lock:
            self._is_abandoned = True
            waiting = self._queue.clear()
            if self._limiter is not None:
                self._limiter.withdraw_all()
        if self._limiter is not None:
            self._limiter.wake_next()
        failed_count = self._fail(waiting, error or self._has_stopped())
        self.release(waiting)
        return failed_count

    def abandon_running(self, error: EdgeServerError | None = None) -> int:
        """Answer all requests that hang in a runtime, and return their number. They are released if their run ends."""
        with self._lock:
            running = list(self._in_flight)
        return self._fail(running, error or self._has_stopped())

    def _decide(self) -> tuple[list[Run], list[Ticket]]:
        """Take all batches that should run now and have a free instance, and all expired tickets.

        Called under the lock.
        """
        if not self._queue.size:
            if self._limiter is not None:
                self._limiter.withdraw_all()
            return [], []
        now_ns = time.monotonic_ns()
        expired = self._queue.expire(now_ns)
        room = len(self._free) if self._admission_control.is_open and not self._is_held else self._limit_to_admission()
        runs: list[Run] = []
        if self._limiter is not None:
            runs = self._take_limited_batches(self._limiter, room, now_ns)
        else:
            while len(runs) < room:
                batch = self._rule.take(now_ns)
                if not batch:
                    break
                # The instance freed last comes first: its caches are warm.
                runs.append((self._free.pop(), batch))
        self._set_alarm(may_start=len(runs) < room)
        return runs, expired

    def _take_limited_batches(self, limiter: RateLimiterClient, room: int, now_ns: int) -> list[Run]:
        """Take at most `room` batches, each for an instance that has its resources."""
        runs: list[Run] = []
        while len(runs) < room and self._rule.is_due(now_ns):
            instance = limiter.acquire(self._free)
            if instance is None:
                return runs
            self._free.remove(instance)
            runs.append((instance, self._rule.take(now_ns)))
        limiter.withdraw_all()
        return runs

    def _retry(self) -> None:
        """Retry batches that were refused resources. Called by the rate limiter."""
        with self._lock:
            runs, expired = self._decide()
        if expired:
            self._refuse_expired(expired)
        self._start(runs)

    def _limit_to_admission(self) -> int:
        """Set the largest batch that admission control allows. Return how many more instances may run now."""
        self._is_held = not self._admission_control.is_open
        fraction = self._admission_control.allowed_fraction if self._is_held else 1.0
        self._queue.item_limit = max(1, math.ceil(fraction * self._max_items))
        max_running = max(1, math.ceil(fraction * self._instance_count))
        return max(0, max_running - (self._instance_count - len(self._free)))

    def _carry_out(self, runs: list[Run], expired: list[Ticket], *, is_inline: bool = False) -> None:
        """Carry out the decisions after the lock is released."""
        if expired:
            self._refuse_expired(expired)
        if self._limiter is not None:
            self._limiter.wake_next()
        if runs:
            self._start(runs, is_inline=is_inline)

    def _start(self, runs: list[Run], *, is_inline: bool = False) -> None:
        """Start the batches. A caller that runs one itself keeps that one, see `submit`."""
        for instance, batch in runs[is_inline:]:
            instance.post(batch)
        if is_inline:
            instance, batch = runs[0]
            if further := self._run(instance, batch):
                instance.post(further)

    def _run(self, instance: Instance, batch: list[Ticket]) -> list[Ticket]:
        """Run a batch on this thread, and return the instance's next batch. If that is empty, the instance is free.

        Empties the list, so that other references to it do not keep the tickets and their memory alive.
        """
        session = instance.session
        if session is None:
            raise AssertionError(f"instance {instance.name} was run after it was closed")
        instance.run_number += 1
        finished = instance.execute(session, batch)
        instance.run_number += 1
        for ticket in finished:
            if ticket.charged_s:
                self._admission_control.correct_charge(ticket.charged_s, ticket.took_s)
            if ticket.request.release is not None or ticket.request.trace is not None:
                ticket.release()
        runs: list[Run] = []
        expired: list[Ticket] = []
        with self._lock:
            for ticket in finished:
                self._in_flight.discard(ticket)
            self._free.append(instance)
            if not self._runs_single_requests or self._queue.size:
                if self._limiter is not None:
                    self._limiter.release(instance)
                runs, expired = self._decide()
            if self._refusal is not None:
                self._notify_if_idle()
        batch.clear()
        if expired:
            self._refuse_expired(expired)
        if self._limiter is not None:
            self._limiter.wake_next()
        mine: list[Ticket] = []
        for other, further in runs:
            if other is instance:
                mine = further
            else:
                other.post(further)
        return mine

    def _is_idle(self) -> bool:
        return not self._in_flight and len(self._free) == self._instance_count

    def _notify_if_idle(self) -> None:
        if self._alarm is not None and self._refusal is not None and self._is_idle():
            self._alarm.cancel()
        super()._notify_if_idle()

    def _set_alarm(self, *, may_start: bool) -> None:
        """Set the timer for the queue's next decision. While no instance may start, only deadlines matter.

        An alarm that comes too early only checks again. So an alarm that is set stays until an earlier one is needed,
        and most requests do not touch the timer.
        """
        when_ns = self._queue.next_wakeup_ns() if may_start else self._queue.next_deadline_ns()
        if when_ns is None or (self._alarm is not None and self._alarm.when_ns <= when_ns):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._timer.call_at(when_ns, self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._alarm = None
            runs, expired = self._decide()
        self._carry_out(runs, expired)

    def _refuse_expired(self, expired: Sequence[Ticket]) -> None:
        self._fail(expired, DeadlineExceeded(f"Request timeout expired while waiting for model '{self._name}'"))
        self.release(expired)

    def _has_stopped(self) -> Draining:
        return Draining(f"Server is stopping, scheduler for model '{self._name}' has stopped")

    def _fail(self, tickets: Sequence[Ticket], error: EdgeServerError) -> int:
        now_ns = time.monotonic_ns()
        failed_count = 0
        for ticket in tickets:
            if ticket.claim():
                failed_count += 1
                self._counters.record_failure(error, ticket.arrived_ns, now_ns)
                ticket.send_final(ticket.failure(error))
        return failed_count
