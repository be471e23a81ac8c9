"""A request while it waits or runs: when it came, where its responses go, and whether it was answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.core.batch_queue import Entry
from edge_server.core.message import Request, Response, ResponseSink
from edge_server.errors import EdgeServerError

log = logging.getLogger(__name__)


class Ticket:
    """Made at submission. Ends twice: it is *closed* when its final response was claimed by one of the threads that
    race for it (result, cancel, time-out), and *released* when nothing holds its inputs any more.

    A ticket cancelled while its batch runs is closed at once and released when the batch ends.
    """

    __slots__ = (
        "_cancel", "_is_closed", "_lock", "_sink", "charged_s", "entry", "held", "request", "sent_count", "took_s",
        "version",
    )  # fmt: skip

    def __init__(
        self, request: Request, version: int, entry: Entry[Ticket], sink: ResponseSink, cancel: Callable[[Ticket], None]
    ) -> None:
        self.request = request
        self.version = version
        self.entry = entry
        self.held: Response | None = None
        self.charged_s = 0.0
        """Seconds of computing that the gate charged for it, to be settled; 0 when it was not asked."""
        self.took_s = 0.0
        """Its part of the time that its batch ran."""
        self.sent_count = 0
        """How many responses of a stream were counted."""
        self._sink: ResponseSink | None = sink
        self._cancel = cancel
        # Reentrant: a sink may cancel its own ticket.
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def cancel(self) -> None:
        """Answer CANCELLED now, unless the final response was claimed already."""
        self._cancel(self)

    def claim(self) -> bool:
        """Take the right to send the final response. True for exactly one caller."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            return True

    def send(self, response: Response) -> bool:
        """Hand over a response that is not final; False when the ticket is closed and the response was dropped."""
        with self._lock:
            if self._is_closed or self._sink is None:
                return False
            self._deliver(self._sink, response)
            return True

    def send_final(self, response: Response) -> None:
        """Hand over the final response. Only for the caller whose `claim` was granted."""
        # The sink is let go: it usually belongs to an object that holds this ticket, and the cycle would keep both,
        # with all tensors, until the garbage collector comes by.
        sink, self._sink = self._sink, None
        if sink is not None:
            self._deliver(sink, response)

    def failure(self, error: EdgeServerError) -> Response:
        return Response(self.request.model, self.version, self.request.id, error=error)

    def release(self) -> None:
        """Give back what the inputs are views of. Called once, by the scheduler."""
        if self.request.trace is not None:
            self.request.trace.end(time.monotonic_ns())
        if self.request.release is None:
            return
        try:
            self.request.release()
        except Exception:
            # The thread belongs to an instance: what a front end forgot to catch must not take it from the model.
            log.exception("giving back the inputs of request '%s' failed", self.request.id)

    def _deliver(self, sink: ResponseSink, response: Response) -> None:
        try:
            sink(response)
        except Exception:
            # As above: a sink must not raise, and one that does must not stop its batch mates' answers.
            log.exception("a response to request '%s' could not be delivered", self.request.id)
