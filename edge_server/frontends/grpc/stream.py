"""ModelStreamInfer: requests and responses interleaved on one call.

grpcio lends a call one thread, which sends what `StreamInfer.responses` yields. As long as every request is answered
by the time that it is submitted (a small model, run on that very thread), that thread also reads, and the stream costs
no further switch. Otherwise a second thread reads, the first one sends, and `pace` says where requests run. Responses
of models with one response a request leave in the order of the requests, those of decoupled models as they come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import grpc

from edge_server.core.message import Parameter, Response
from edge_server.errors import Draining, EdgeServerError, Throttled
from edge_server.frontends.grpc.answer import stream_answer
from edge_server.frontends.grpc.boundary import known
from edge_server.frontends.grpc.encode import stream_error_message
from edge_server.frontends.grpc.infer import REAL_ERRORS_KEY
from edge_server.frontends.grpc.pace import Pace
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

    def __init__(self, stream: StreamInfer, plan: Plan, size: int, is_ordered: bool) -> None:
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

    def finish_trace(self) -> None:
        if self.trace is not None:
            self.trace.finish()

    @property
    def shows_empty(self) -> bool:
        """Whether the client sees a final response without outputs: it asked, or it would see none at all of a model
        that owes it one."""
        return self.plan.wants_empty_final or (self.is_ordered and not self.has_sent)


class _End:
    """The last thing in an outbox: nothing more is to be sent. `error` None ends the call OK."""

    def __init__(self, error: EdgeServerError | None = None) -> None:
        self.error = error


class _Alone:
    """Tells the sending thread that the reading one has left: it reads from now on."""


_Answer: TypeAlias = "tuple[Exchange, Response, int]"


class StreamInfer:
    """One ModelStreamInfer call from first to last message."""

    def __init__(
        self,
        service: InferenceService,
        reader: InferReader,
        context: grpc.ServicerContext,
        forwarded: Mapping[str, Parameter],
    ) -> None:
        self._service = service
        self._reader = reader
        self._context = context
        self._forwarded = forwarded
        self._has_real_errors = (REAL_ERRORS_KEY, "true") in context.invocation_metadata()
        self._pace = Pace()
        self._outbox: SimpleQueue[_Answer | _End | _Alone] = SimpleQueue()
        self._has_room = threading.Condition()
        self._reader_waits = False

        # The lock guards what follows, and is never held while calling out.
        self._lock = threading.Lock()
        self._order: deque[Exchange] = deque()
        self._waiting: set[Exchange] = set()
        self._open_count = 0
        self._posted = self._posted_bytes = 0
        self._is_input_closed = self._is_ended = self._is_stopping = False
        self._is_resting = False

        # These only grow, the first two on the reading thread, the others on the sending one: no lock is needed.
        self._accepted = self._accepted_bytes = 0
        self._finished = self._finished_bytes = 0
        self._sent = self._sent_bytes = 0

    def responses(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the serialized responses to `requests`. Raises EdgeServerError when its status is to end the call."""
        if not self._context.add_callback(self.end):
            self.end()
        while True:
            end = yield from self._answer_alone(requests)
            if end is None:
                reader = threading.Thread(target=self._read, args=(requests,), name="grpc-stream", daemon=True)
                reader.start()
                end = yield from self._send_all()
            if end is not None:
                break
        if end.error is not None:
            raise end.error

    def stop(self) -> None:
        """End the call as soon as nothing is outstanding, because the server is about to stop."""
        with self._lock:
            self._is_stopping = True
            if self._open_count or self._is_ended:
                return
            is_resting = self._is_resting
        if is_resting:
            # The only thread waits within grpcio for the next request and cannot say why it leaves.
            self._context.cancel()
        else:
            self._outbox.put(_End(_stopping()))

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
        _drain(self._outbox)
        self._outbox.put(_End(error))
        for exchange in waiting:
            exchange.cancel()
        for exchange in ordered:
            exchange.finish_trace()
        with self._has_room:
            self._has_room.notify_all()

    # -- the thread that sends; it also reads while it is alone

    def _answer_alone(self, requests: Iterator[bytes]) -> Generator[bytes, None, _End | None]:
        """Read, submit and send until a request is not answered at once; None then, else how the call ends."""
        while (end := self._rest()) is None:
            data = next(requests, None)
            self._is_resting = False
            if data is None:
                self._close_input()
                return (yield from self._send_all())
            self._accept(data)
            while not self._outbox.empty():
                item = self._outbox.get()
                if isinstance(item, _End):
                    return item
                if isinstance(item, tuple) and (message := self._message(*item)) is not None:
                    yield message
            if self._accepted != self._finished or not self._pace.is_quick:
                return None
        return end

    def _rest(self) -> _End | None:
        """Say that this thread is going to wait for a request; how the call ends when there is no use in that."""
        with self._lock:
            if self._is_stopping:
                return _End(_stopping())
            self._is_resting = True
            return None

    def _send_all(self) -> Generator[bytes, None, _End | None]:
        """Send what another thread submits, until that thread leaves (None) or the call ends."""
        while True:
            item = self._outbox.get()
            if isinstance(item, _End):
                return item
            if isinstance(item, _Alone):
                return None
            if (message := self._message(*item)) is not None:
                yield message

    def _message(self, exchange: Exchange, response: Response, size: int) -> bytes | None:
        """Return the response as sent, None when the client does not want to see it.

        Raises the response's error in real-error mode.
        """
        trace = exchange.trace
        if trace is None or not response.is_final:
            return self._encoded(exchange, response, size)
        trace.stamp(SEND_START)
        try:
            return self._encoded(exchange, response, size)
        finally:
            trace.stamp(SEND_END)
            trace.finish()

    def _encoded(self, exchange: Exchange, response: Response, size: int) -> bytes | None:
        self._sent += 1
        self._sent_bytes += size
        if response.is_final:
            self._finished += 1
            self._finished_bytes += exchange.size
        if self._reader_waits:
            with self._has_room:
                self._has_room.notify_all()
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

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                if not self._wait_for_room():
                    return
                self._accept(data)
                if self._pace.may_be_alone:
                    self._outbox.put(_Alone())
                    return
            self._close_input()
        except grpc.RpcError:
            # The client left; grpcio calls `end`.
            return
        except Exception as error:  # noqa: BLE001 - the end of a thread: `known` logs and maps
            self.end(known(error))

    def _wait_for_room(self) -> bool:
        """Wait until the request at hand may be taken up; False when the call has ended meanwhile."""
        if self._is_full():
            with self._has_room:
                # Set before looking again: the sending thread counts first and looks at this flag after.
                self._reader_waits = True
                while self._is_full() and not self._is_ended:
                    self._has_room.wait()
                self._reader_waits = False
        return not self._is_ended

    def _is_full(self) -> bool:
        held_bytes = self._accepted_bytes - self._finished_bytes + self._posted_bytes - self._sent_bytes
        return self._accepted - self._finished >= MAX_OUTSTANDING or held_bytes >= MAX_OUTSTANDING_BYTES

    def _accept(self, data: bytes) -> None:
        """Submit one request, or answer it with what is wrong with it."""
        may_run = self._pace.may_run(self._accepted == self._finished)
        self._accepted += 1
        self._accepted_bytes += len(data)
        started = time.perf_counter()
        is_done = self._submit(data, may_run)
        self._pace.answered(time.perf_counter() - started if is_done else None)

    def _submit(self, data: bytes, may_run: bool) -> bool:
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
                ticket = self._service.submit(request, exchange.take, may_run=may_run)
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
                    if self._is_ended:
                        exchange.trace.finish()
            if self._is_ended:
                return
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
            if not self._open_count:
                self._post_end()
            is_overfull = self._is_overfull()
        if is_overfull:
            self.end(Throttled("the client does not read the responses of its stream, of which too many wait"))

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
        self._outbox.put((exchange, response, size))

    def _post_end(self) -> None:
        if self._is_input_closed:
            self._outbox.put(_End())
        elif self._is_stopping:
            self._outbox.put(_End(_stopping()))

    def _is_overfull(self) -> bool:
        return self._posted - self._sent > MAX_BACKLOG or self._posted_bytes - self._sent_bytes > MAX_BACKLOG_BYTES


def _stopping() -> EdgeServerError:
    return Draining("Server is stopping, the stream has stopped accepting new inference requests")


def _drain(outbox: SimpleQueue[_Answer | _End | _Alone]) -> None:
    try:
        while True:
            item = outbox.get_nowait()
            if isinstance(item, tuple):
                item[0].finish_trace()
    except Empty:
        return
