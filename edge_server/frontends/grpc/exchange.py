"""The requests of one ModelStreamInfer call and the responses to them, whichever door the call came through.

Responses of models with one response a request leave in the order of the requests, those of decoupled models as they
come. What is not answered and what is not sent is bounded; a call that ends takes back what is outstanding.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from edge_server.core.message import Parameter, Response
from edge_server.errors import Draining, EdgeServerError, Throttled
from edge_server.frontends.grpc.answer import stream_answer
from edge_server.frontends.grpc.boundary import known
from edge_server.frontends.grpc.encode import stream_error_message
from edge_server.frontends.grpc.infer import REAL_ERRORS_KEY
from edge_server.frontends.grpc.read import InferReader
from edge_server.frontends.grpc.request import Plan, plan_of, request_of
from edge_server.frontends.grpc.traced import COMPLETE, SEND_END, SEND_START, begin_trace

if TYPE_CHECKING:
    from edge_server.service import InferenceService, Ticket
    from edge_server.telemetry.trace_record import TracedRequest

MAX_OUTSTANDING = 1024
"""Requests of one stream read and not yet answered. Beyond, reading stops, and HTTP/2 makes the client wait."""

MAX_OUTSTANDING_BYTES = 256 << 20
"""Memory of those requests, and of responses not yet sent, at which reading stops; one request always gets through."""

MAX_BACKLOG = 65_536
MAX_BACKLOG_BYTES = 1 << 30
"""Responses waiting for a client that does not read, in number and memory; a stream that exceeds either is ended."""


class Exchange:
    """One request of a stream and the responses to it. `take` is its sink."""

    __slots__ = ("_stream", "has_sent", "held", "is_done", "is_ordered", "plan", "size", "ticket", "trace")

    def __init__(self, stream: InferStream, plan: Plan, size: int, is_ordered: bool) -> None:
        self._stream = stream
        self.plan = plan
        self.size = size
        self.is_ordered = is_ordered
        self.is_done = False
        self.has_sent = False
        self.held: list[Response] | None = None
        self.ticket: Ticket | None = None
        self.trace: TracedRequest | None = None

    def take(self, response: Response) -> None:
        self._stream.take(self, response)

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()

    def close(self) -> None:
        """Finish the trace and give back the memory for outputs: nothing more is sent for this request."""
        self.plan.release()
        if self.trace is not None:
            self.trace.finish()

    @property
    def shows_empty(self) -> bool:
        """Whether the client sees a final response without outputs: it asked, or it would see none at all of a model
        that owes it one."""
        return self.plan.wants_empty_final or (self.is_ordered and not self.has_sent)


class End:
    """The last thing in an outbox: nothing more is to be sent. `error` None ends the call OK."""

    def __init__(self, error: EdgeServerError | None = None) -> None:
        self.error = error


Answer: TypeAlias = "tuple[Exchange, Response, int]"
"""What is to be sent, for whom, and the memory it holds."""


class CallContext(Protocol):
    """What a stream asks of its call."""

    def invocation_metadata(self) -> Any: ...


class InferStream(abc.ABC):
    """One ModelStreamInfer call. Requests are read on one thread at a time, responses taken from any and sent on one at
    a time."""

    def __init__(
        self,
        service: InferenceService,
        reader: InferReader,
        context: CallContext,
        forwarded: Mapping[str, Parameter],
    ) -> None:
        self._service = service
        self._reader = reader
        self._context = context
        self._forwarded = forwarded
        self._has_real_errors = (REAL_ERRORS_KEY, "true") in context.invocation_metadata()

        # The lock guards what follows, and is never held while calling out.
        self._lock = threading.Lock()
        self._order: deque[Exchange] = deque()
        self._waiting: set[Exchange] = set()
        self._open_count = 0
        self._posted = self._posted_bytes = 0
        self._is_input_closed = self._is_ended = self._is_stopping = False

        # These only grow, the first two on the reading thread, the others on the sending one: no lock is needed.
        self._accepted = self._accepted_bytes = 0
        self._finished = self._finished_bytes = 0
        self._sent = self._sent_bytes = 0

    # -- what a door does its way

    @abc.abstractmethod
    def _put(self, item: Answer | End) -> None:
        """Put something into the outbox. Called with the lock held, or once the call has ended."""

    @abc.abstractmethod
    def _empty_outbox(self) -> None:
        """Drop what was not sent, and close its exchanges."""

    @abc.abstractmethod
    def _made_room(self) -> None:
        """Read on if reading waits for room."""

    @abc.abstractmethod
    def _hold_us(self, model: str, is_ordered: bool) -> float:
        """Return for how long the reading thread may be held by the request at hand. See InferenceService.submit."""

    @abc.abstractmethod
    def _flush(self) -> None:
        """See to it that what is in the outbox is sent. Called without the lock."""

    # -- life

    def end(self, error: EdgeServerError | None = None) -> None:
        """Take back what is outstanding and drop what was not sent: the client left, or `error` ends the call."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            waiting = list(self._waiting)
            ordered = list(self._order)
            self._waiting.clear()
            self._order.clear()
        self._empty_outbox()
        self._put(End(error))
        for exchange in waiting:
            exchange.cancel()
        for exchange in ordered:
            exchange.close()
        self._made_room()
        self._flush()

    # -- the thread that sends

    def _message(self, exchange: Exchange, response: Response, size: int) -> bytes | None:
        """Return the response as sent, None when the client does not want to see it.

        Raises the response's error in real-error mode.
        """
        if not response.is_final:
            return self._encoded(exchange, response, size)
        trace = exchange.trace
        if trace is not None:
            trace.stamp(SEND_START)
        try:
            return self._encoded(exchange, response, size)
        finally:
            if trace is not None:
                trace.stamp(SEND_END)
            exchange.close()

    def _encoded(self, exchange: Exchange, response: Response, size: int) -> bytes | None:
        self._sent += 1
        self._sent_bytes += size
        if response.is_final:
            self._finished += 1
            self._finished_bytes += exchange.size
        self._made_room()
        error = response.error
        if error is None:
            if response.is_empty and not exchange.shows_empty:
                return None
            exchange.has_sent = True
            try:
                return stream_answer(response, exchange.plan, self._service)
            except Exception as failure:  # noqa: BLE001 - a front-end boundary: `known` logs and maps
                error = known(failure)
                if not response.is_final:
                    exchange.cancel()
        if self._has_real_errors:
            self.end()
            raise error
        return stream_error_message(error.message, exchange.plan.request_id)

    # -- the thread that reads

    def _is_full(self) -> bool:
        held_bytes = self._accepted_bytes - self._finished_bytes + self._posted_bytes - self._sent_bytes
        return self._accepted - self._finished >= MAX_OUTSTANDING or held_bytes >= MAX_OUTSTANDING_BYTES

    def _submit(self, data: bytes) -> bool:
        """Submit one request, or answer it with what is wrong with it. Returns whether it is answered already."""
        plan = Plan()
        is_ordered = True
        request = None
        traces, trace = self._service.traces, None
        received_ns = time.monotonic_ns() if traces.is_on else 0
        failure: EdgeServerError | None = None
        try:
            found = self._reader.read(data)
            plan = plan_of(found)
            plan.read_version()
            is_ordered = not self._service.model_spec(plan.model, plan.version).is_decoupled
            request = request_of(found, plan, self._service.shared_memory, self._forwarded)
            if traces.is_on:
                trace = begin_trace(traces, request, self._context.invocation_metadata(), received_ns)
        except Exception as error:  # noqa: BLE001 - a front-end boundary: `known` logs and maps
            failure = known(error)
        exchange = Exchange(self, plan, len(data), is_ordered)
        exchange.trace = trace
        self._open(exchange)
        if request is not None:
            try:
                hold_us = self._hold_us(plan.model, is_ordered)
                ticket = self._service.submit(request, exchange.take, hold_us=hold_us)
                if not exchange.is_done:
                    self._watch(exchange, ticket)
            except Exception as error:  # noqa: BLE001 - likewise
                failure = known(error)
        if failure is not None:
            exchange.take(Response(plan.model, plan.version or 0, plan.request_id, error=failure))
        return exchange.is_done

    def _open(self, exchange: Exchange) -> None:
        with self._lock:
            self._open_count += 1
            if exchange.is_ordered:
                self._order.append(exchange)

    def _watch(self, exchange: Exchange, ticket: Ticket) -> None:
        """Remember an unanswered request, so that it is taken back when the call ends."""
        exchange.ticket = ticket
        with self._lock:
            if exchange.is_done:
                return
            if not self._is_ended:
                self._waiting.add(exchange)
                return
        ticket.cancel()

    def _close_input(self) -> None:
        with self._lock:
            self._is_input_closed = True
            if not self._open_count:
                self._post_end()
        self._flush()

    # -- the threads that answer

    def take(self, exchange: Exchange, response: Response) -> None:
        """Take one response from whichever thread made it."""
        with self._lock:
            if response.is_final:
                exchange.is_done = True
                self._waiting.discard(exchange)
                self._open_count -= 1
                if exchange.trace is not None:
                    exchange.trace.stamp(COMPLETE)
            is_dropped = self._is_ended
            if not is_dropped:
                self._post_in_order(exchange, response)
                if not self._open_count:
                    self._post_end()
            is_overfull = not is_dropped and self._is_overfull()
        if is_dropped:
            if response.is_final:
                exchange.close()
            return
        if is_overfull:
            self.end(Throttled("the client does not read the responses of its stream, of which too many wait"))
        else:
            self._flush()

    def _post_in_order(self, exchange: Exchange, response: Response) -> None:
        """Post the response, or keep it until those before it have come. Called with the lock held."""
        if not exchange.is_ordered:
            self._post(exchange, response)
        elif self._order[0] is exchange:
            self._post(exchange, response)
            if response.is_final:
                self._order.popleft()
                self._post_held()
        elif exchange.held is None:
            exchange.held = [response]
        else:
            exchange.held.append(response)

    def _post_held(self) -> None:
        """Post what came early from the requests whose turn it is now."""
        while self._order and (held := self._order[0].held):
            first = self._order[0]
            first.held = None
            for response in held:
                self._post(first, response)
            if not first.is_done:
                return
            self._order.popleft()

    def _post(self, exchange: Exchange, response: Response) -> None:
        size = 0
        for tensor in response.outputs:
            size += tensor.nbytes
        self._posted += 1
        self._posted_bytes += size
        self._put((exchange, response, size))

    def _post_end(self) -> None:
        if self._is_input_closed:
            self._put(End())
        elif self._is_stopping:
            self._put(End(stopping()))

    def _is_overfull(self) -> bool:
        return self._posted - self._sent > MAX_BACKLOG or self._posted_bytes - self._sent_bytes > MAX_BACKLOG_BYTES


def stopping() -> EdgeServerError:
    return Draining("Server is stopping, the stream has stopped accepting new inference requests")
