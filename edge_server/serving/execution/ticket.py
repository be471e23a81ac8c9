"""Class `Ticket`, a request inside the server: its arrival time, deadline and priority, and the receiver of its
responses."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from edge_server.core.batch_queue import QueueEntry
from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    from edge_server.core.sequence_batcher import SequenceEntry

log = logging.getLogger(__name__)


class Ticket(QueueEntry["Ticket"]):
    """Created at submission. It ends in two steps: it is *closed* when one of the racing threads (result, cancel,
    timeout) claims its final response, and *released* when nothing uses its inputs any more.

    A ticket that is cancelled while its batch runs is closed at once and released when the batch ends. It is its own
    entry in the queue of a scheduler; for a step of a sequence its `sequence_entry` is the entry.
    """

    __slots__ = (
        "_cancel", "_is_closed", "_lock", "_sink", "charged_s", "held", "order", "outputs", "request", "sent_count",
        "sequence_entry", "took_s", "version",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        version: int,
        item_count: int,
        key: Hashable,
        arrived_ns: int,
        sink: ResponseSink,
        cancel: Callable[[Ticket], None],
        outputs: Sequence[str] = (),
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`outputs` are those to compute, in the model's order. `lock` guards the claim. All tickets of a model with
        one response for each request may share one. None: a lock of its own, held while a response that is not final is
        delivered."""
        self.item_count = item_count
        self.key = key
        self.arrived_ns = arrived_ns
        self.priority = request.priority
        self.timeout_us = request.timeout_us
        self.start_by_ns = 0
        self.level = 0
        self.item = None
        self.timed = None
        self.sequence_entry: SequenceEntry[Ticket] | None = None
        self.request = request
        self.outputs = outputs
        self.version = version
        self.order: OrderedDelivery | None = None
        """The order in which its final response is sent; None: at once."""
        self.held: Response | None = None
        self.charged_s = 0.0
        """Seconds of computing that admission control charged, to be settled; 0 if it was not asked."""
        self.took_s = 0.0
        """Its part of the run time of its batch."""
        self.sent_count = 0
        """Number of counted responses of a stream."""
        self._sink: ResponseSink | None = sink
        self._cancel = cancel
        # Reentrant: a sink may cancel its own ticket.
        self._lock = threading.RLock() if lock is None else lock
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def cancel(self) -> None:
        """Answer CANCELLED now, unless the final response was claimed already."""
        self._cancel(self)

    def claim(self) -> bool:
        """Claim the right to send the final response. True for exactly one caller."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            return True

    def send(self, response: Response) -> bool:
        """Send a response that is not final. Return False if the ticket is closed and the response was dropped. Only
        for a ticket with a lock of its own."""
        with self._lock:
            if self._is_closed or self._sink is None:
                return False
            try:
                self._sink(response)
            except Exception:  # noqa: BLE001 - see `send_final`
                self._report_undelivered()
            return True

    def send_final(self, response: Response) -> None:
        """Send the final response, in the order that the model promises. Only for the caller whose `claim` returned
        True."""
        if self.order is not None:
            self.order.send_final(self, response)
            return
        # Drop the reference to the sink: it usually belongs to an object that refers to this ticket. The cycle would
        # keep both, with all tensors, until the garbage collector runs.
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            sink(response)
        except Exception:  # noqa: BLE001 - it is logged
            # The thread belongs to an instance. An exception of a sink must not end it, nor stop the answers to the
            # other requests of the batch.
            self._report_undelivered()

    def failure(self, error: EdgeServerError) -> Response:
        return Response(self.request.model, self.version, self.request.id, error=error)

    def release(self) -> None:
        """Release the memory that the inputs are views of. Called once, by the scheduler."""
        if self.request.trace is not None:
            self.request.trace.end(time.monotonic_ns())
        if self.request.release is None:
            return
        try:
            self.request.release()
        except Exception:
            # The thread belongs to an instance: an uncaught exception of a front end must not end it.
            log.exception("giving back the inputs of request '%s' failed", self.request.id)

    def _report_undelivered(self) -> None:
        log.exception("a response to request '%s' could not be delivered", self.request.id)


class OrderedDelivery:
    """Holds final responses back until every earlier request was answered, for models with `preserve_ordering`.

    Cancelled and expired requests are answered through here too, so that no response waits for them. One thread
    delivers at a time; other threads leave their response to it and go on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._is_delivering = False

    def add(self, ticket: Ticket) -> None:
        """Register a request; called in the order of arrival."""
        ticket.order = self
        with self._lock:
            self._queue.append(ticket)

    def send_final(self, ticket: Ticket, response: Response) -> None:
        """Send the response, and those that waited for it, once every earlier request was answered."""
        with self._lock:
            ticket.held = response
            if self._is_delivering:
                return
            self._is_delivering = True
        while True:
            with self._lock:
                ready = self._queue[0].held if self._queue else None
                if ready is None:
                    self._is_delivering = False
                    return
                first = self._queue.popleft()
                first.held = first.order = None
            first.send_final(ready)
