"""Adapter in front of a version's scheduler: answers requests from the response cache, and passes on the others."""

from __future__ import annotations

from collections.abc import Callable

from edge_server.core.request_response import Request, Response, ResponseSink
from edge_server.errors import EdgeServerError
from edge_server.serving.cache.lookup import CachedSink, CacheLookup
from edge_server.serving.execution.scheduler import Scheduler
from edge_server.serving.execution.ticket import Ticket

Admit = Callable[[Ticket], None]
"""Computes a ticket, but not on this thread. If it raises, the ticket is unchanged."""


class CachedScheduler:
    """Adapter of one version. A request that is looked up on another thread is in flight like any other: it can be
    cancelled, and the version is not closed before it is answered."""

    def __init__(self, lookup: CacheLookup, scheduler: Scheduler, admit: Admit) -> None:
        self._lookup = lookup
        self._scheduler = scheduler
        self._admit = admit

    def sink(self, request: Request, sink: ResponseSink) -> ResponseSink:
        """Return the sink for the request's ticket, for `take`."""
        return self._lookup.call(request, sink) or sink

    def take(self, ticket: Ticket, sink: ResponseSink, *, may_wait: bool) -> bool:
        """Answer the ticket from the cache, or look it up on another thread and continue there. Return False if the
        caller must compute it. Raises the errors of the outlet."""
        deadline_ns = ticket.request.deadline_ns
        if not isinstance(sink, CachedSink) or 0 < deadline_ns <= ticket.arrived_ns:
            return False
        if not self._lookup.is_quick(ticket.request, may_wait=may_wait):
            self._scheduler.add(ticket)
            self._lookup.begin(sink, lambda response: self._continue(ticket, response))
            return True
        response = self._lookup.find(sink)
        if response is None:
            return False
        self._scheduler.add(ticket)
        self._hit(ticket, response)
        return True

    def _continue(self, ticket: Ticket, response: Response | None) -> None:
        """Continue a ticket that is in flight."""
        if ticket.is_closed:
            self._scheduler.release([ticket])
            return
        if response is not None:
            self._hit(ticket, response)
            return
        try:
            self._admit(ticket)
        except EdgeServerError as error:
            self._answer(ticket, ticket.failure(error.detached()))

    def _hit(self, ticket: Ticket, response: Response) -> None:
        request = ticket.request
        if request.trace is not None:
            arrived_ns = ticket.arrived_ns
            request.trace.begin(request.model, ticket.version, request.id, arrived_ns, request.inputs.values())
            request.trace.record_outputs(response.outputs)
        self._answer(ticket, response)

    def _answer(self, ticket: Ticket, response: Response) -> None:
        """Send the answer of a ticket that is in flight, unless it was closed meanwhile, and release it."""
        if ticket.claim():
            ticket.send_final(response)
        self._scheduler.release([ticket])
