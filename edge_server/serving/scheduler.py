"""Decides when and which requests run together, and on which instance. Acts on three events only: a request is
offered, an instance becomes free, a timer fires."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from edge_server.core.batch_queue import BatchQueue
from edge_server.core.message import Response
from edge_server.core.model import ModelSpec
from edge_server.errors import Cancelled, DeadlineExceeded, Draining, EdgeServerError, NotReady
from edge_server.serving.counters import Counters
from edge_server.serving.delivery import OrderedDelivery
from edge_server.serving.instance import Instance
from edge_server.serving.ticket import Ticket
from edge_server.serving.timer import Alarm, Timer

Run: TypeAlias = tuple[Instance, list[Ticket]]
"""A batch, and the instance that was taken for it."""


class Scheduler:
    """The default scheduler and the dynamic batcher: they differ only in the rule of their queue.

    One short lock guards the queue, the free instances and the count of requests in flight. It is never held across a
    runtime call, a sink or I/O: decide under the lock, act after it.
    """

    def __init__(self, spec: ModelSpec, counters: Counters, timer: Timer) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queue: BatchQueue[Ticket] = BatchQueue(spec.max_batch_size, spec.dynamic_batching, spec.name)
        self._free: list[Instance] = []
        self._instance_count = 0
        self._in_flight: set[Ticket] = set()
        # Makes a new error each time: one error raised again and again would collect the frames of all its callers.
        self._refusal: Callable[[], EdgeServerError] | None = lambda: NotReady(f"model '{spec.name}' is not ready yet")
        self._alarm: Alarm | None = None
        self._name = spec.name
        self._counters = counters
        self._timer = timer
        keeps_order = spec.dynamic_batching is not None and spec.dynamic_batching.preserve_ordering
        self._order = OrderedDelivery() if keeps_order else None

    @property
    def pending_count(self) -> int:
        return self._queue.size

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def open(self, instances: Sequence[Instance]) -> None:
        """Begin to take requests, all instances being free."""
        with self._lock:
            self._free.extend(instances)
            self._instance_count = len(instances)
            self._refusal = None

    def submit(self, ticket: Ticket, *, may_run: bool) -> None:
        """Enqueue, and run a batch here and now if `may_run` and an instance is free.

        Raises QueueFull, or the refusal given to `close`; then the ticket was not taken.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            self._queue.offer(ticket.entry, ticket)
            self._in_flight.add(ticket)
            if self._order is not None:
                self._order.enter(ticket)
            runs, expired = self._decide()
        if expired:
            self._refuse_expired(expired)
        if runs:
            self._start(runs, may_run=may_run)

    def serve(self, instance: Instance, batch: list[Ticket]) -> None:
        """Run a batch on the instance's own thread, and then whatever waits, until nothing does."""
        while batch:
            instance.run(batch)
            batch = self._next_batch(instance)

    def cancel(self, ticket: Ticket) -> None:
        """Answer CANCELLED unless the ticket is closed. One that waits gives up its place; one that runs runs out."""
        if not ticket.claim():
            return
        with self._lock:
            was_waiting = self._queue.drop(ticket.entry)
        error = Cancelled(f"request to model '{self._name}' was cancelled")
        self._counters.record_failure(error, ticket.entry.arrived_ns, time.monotonic_ns())
        self.send_final(ticket, ticket.failure(error))
        if was_waiting:
            self.release([ticket])

    def send_final(self, ticket: Ticket, response: Response) -> None:
        """Deliver a claimed ticket's final response, in the order that the model promises."""
        if self._order is None:
            ticket.send_final(response)
        else:
            self._order.send_final(ticket, response)

    def release(self, tickets: Sequence[Ticket]) -> None:
        """Give back what the tickets hold; the version may be closed once none is left."""
        for ticket in tickets:
            ticket.release()
        with self._lock:
            self._in_flight.difference_update(tickets)
            self._tell_if_idle()

    def close(self, refusal: Callable[[], EdgeServerError]) -> None:
        """Take nothing new; requests that wait or run go on. What `refusal` makes is raised to those who come later."""
        with self._lock:
            self._refusal = refusal
            self._tell_if_idle()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait, after `close`, until nothing is in flight and no thread is in an instance; False on time-out."""
        with self._lock:
            return self._idle.wait_for(self._is_idle, timeout_s)

    def abandon_waiting(self, error: EdgeServerError | None = None) -> int:
        """Fail everything that still waits, and return how many that were: the time to drain is over."""
        with self._lock:
            waiting = self._queue.clear()
        failed_count = self._fail(waiting, error or self._has_stopped())
        self.release(waiting)
        return failed_count

    def abandon_running(self, error: EdgeServerError | None = None) -> int:
        """Answer for whatever hangs in a runtime, and return how many that were. It is released if it ever ends."""
        with self._lock:
            running = list(self._in_flight)
        return self._fail(running, error or self._has_stopped())

    def _decide(self) -> tuple[list[Run], list[Ticket]]:
        """Take batches as long as one should run now and an instance is free for it, and all that expired.

        Called under the lock.
        """
        if not self._queue.size:
            return [], []
        now_ns = time.monotonic_ns()
        runs: list[Run] = []
        expired = self._queue.expire(now_ns)
        while self._free:
            batch = self._queue.take(now_ns)
            if not batch:
                break
            # The instance freed last comes first: its caches are warm.
            runs.append((self._free.pop(), batch))
        self._set_alarm()
        return runs, expired

    def _start(self, runs: list[Run], *, may_run: bool) -> None:
        """Carry out what was decided. A caller that may run keeps one batch; what queued up meanwhile goes on to the
        instance's own thread, or the caller would work for others without end."""
        for instance, batch in runs[may_run:]:
            instance.post(batch)
        if may_run:
            instance, batch = runs[0]
            instance.run(batch)
            batch = self._next_batch(instance)
            if batch:
                instance.post(batch)

    def _next_batch(self, instance: Instance) -> list[Ticket]:
        """Return what the instance should run next; when there is nothing, it is free."""
        with self._lock:
            self._free.append(instance)
            runs, expired = self._decide()
            self._tell_if_idle()
        if expired:
            self._refuse_expired(expired)
        if not runs:
            return []
        # The instance just freed is the last of the free ones, so the first batch was given to it.
        for other, batch in runs[1:]:
            other.post(batch)
        return runs[0][1]

    def _is_idle(self) -> bool:
        return not self._in_flight and len(self._free) == self._instance_count

    def _tell_if_idle(self) -> None:
        if self._refusal is not None and self._is_idle():
            if self._alarm is not None:
                self._alarm.cancel()
            self._idle.notify_all()

    def _set_alarm(self) -> None:
        """Ask to be woken when the queue may decide otherwise. While no instance is free only deadlines matter.

        An alarm that comes too early only looks again, so one that is set is left until an earlier one is needed:
        most requests then touch the timer not at all.
        """
        when_ns = self._queue.next_wakeup_ns() if self._free else self._queue.next_deadline_ns()
        if when_ns is None or (self._alarm is not None and self._alarm.when_ns <= when_ns):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._timer.call_at(when_ns, self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._alarm = None
            runs, expired = self._decide()
        if expired:
            self._refuse_expired(expired)
        self._start(runs, may_run=False)

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
                self._counters.record_failure(error, ticket.entry.arrived_ns, now_ns)
                self.send_final(ticket, ticket.failure(error))
        return failed_count
