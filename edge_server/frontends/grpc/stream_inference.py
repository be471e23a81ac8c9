"""Handler of ModelStreamInfer: submits the requests of a stream, and sends their responses without a thread per stream.

The thread that receives a request submits it. A large request that is slow to parse runs on another thread. The thread
that computes a response encodes and sends it. If the previous response is not sent yet, the transport's thread does
this later. Models with one response per request respond in request order, decoupled models in any order. The number and
memory of unanswered requests and unsent responses are limited. A call that ends cancels its outstanding requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from edge_server.core.request_response import RequestMemo, Response
from edge_server.errors import Draining, EdgeServerError, Throttled
from edge_server.frontends.grpc.apply_requested_outputs import apply_plan
from edge_server.frontends.grpc.call import OK, Message, Pieces, RpcCall, call_status, client_error, run_blocking
from edge_server.frontends.grpc.infer_message import Outline
from edge_server.frontends.grpc.infer_request import ResponsePlan
from edge_server.frontends.grpc.unary_inference import (
    COMPLETE,
    LARGE_BYTES,
    REAL_ERRORS_KEY,
    SEND_END,
    SEND_START,
    InferContext,
    KnownMessage,
    begin_trace,
    empty_final_message,
    forwarded_metadata,
    is_quick,
    stream_error_message,
    stream_message,
)

if TYPE_CHECKING:
    from edge_server.core.request_response import SubmittedRequest
    from edge_server.service import Handle
    from edge_server.telemetry.trace_record import TracedRequest

MAX_OUTSTANDING = 1024
"""Maximum number of unanswered requests of one stream. At this limit reading stops, and HTTP/2 makes the client
wait."""

MAX_OUTSTANDING_BYTES = 256 << 20
"""Memory of those requests and of unsent responses at which reading stops. One request is always accepted."""

MAX_BACKLOG = 65_536
MAX_BACKLOG_BYTES = 1 << 30
"""Maximum number and memory of unsent responses to a client that does not read. More of either ends the stream."""


class StreamedRequest:
    """One request of a stream. `on_response` receives its responses."""

    __slots__ = (
        "_stream", "handle", "has_sent", "held", "is_done", "is_ordered", "memo", "plan", "size", "ticket", "trace",
    )  # fmt: skip

    def __init__(self, stream: InferStream, size: int) -> None:
        self._stream = stream
        self.plan = ResponsePlan()
        self.size = size
        self.is_ordered = True
        self.is_done = False
        self.has_sent = False
        self.held: list[Response] | None = None
        self.handle: Handle
        self.memo: RequestMemo | None = None
        self.ticket: SubmittedRequest | None = None
        self.trace: TracedRequest | None = None

    def on_response(self, response: Response) -> None:
        self._stream.on_response(self, response)

    def close(self) -> None:
        """Finish the trace and release the memory for outputs; nothing more is sent for this request."""
        if self.plan.places is not None:
            self.plan.release()
        if self.trace is not None:
            self.trace.finish()


class EndOfStream:
    """Last item of an outbox. `error` None ends the call with OK."""

    def __init__(self, error: EdgeServerError | None = None) -> None:
        self.error = error


OutgoingResponse: TypeAlias = "tuple[StreamedRequest, Response, int]"
"""A response to send: its request, the response, and its memory in bytes."""


class InferStream:
    """One ModelStreamInfer call. Events come one at a time, responses from any thread."""

    def __init__(self, inference: InferContext, call: RpcCall) -> None:
        """Raises the errors of `forwarded_metadata`."""
        self._service = inference.service
        self._handles = inference.handles
        self._reader = inference.reader
        self._call = call
        self._forwarded = forwarded_metadata(call.metadata, inference.header_pattern)
        self._has_real_errors = (REAL_ERRORS_KEY, "true") in call.metadata

        # The lock guards the fields below, and is never held during calls to other objects.
        self._lock = threading.Lock()
        self._order: deque[StreamedRequest] = deque()
        self._waiting: set[StreamedRequest] = set()
        self._outbox: deque[OutgoingResponse | EndOfStream] = deque()
        self._open_count = 0
        self._posted = self._posted_bytes = 0
        self._is_input_closed = self._is_ended = self._is_stopping = False
        self._is_sending = False
        """Whether a thread sends, or the transport has not accepted the last message yet. Stays True after the end."""
        self._reader_waits = False
        self._lone: StreamedRequest | None = None
        """The only open request, while `_lone_thread` submits it. If that thread gets the final response too, and no
        other one waits, it needs no lock: nothing else uses the fields above meanwhile, but for the end of a call."""
        self._lone_thread = 0

        # No lock is needed: these only grow. The reading thread writes the first two, the sending thread the others.
        self._accepted = self._accepted_bytes = 0
        self._finished = self._finished_bytes = 0
        self._sent = self._sent_bytes = 0

    # -- events of the call

    def on_message(self, message: Message) -> None:
        self._accepted += 1
        self._accepted_bytes += len(message)
        known = self._reader.recognise(message)
        if len(message) >= LARGE_BYTES and not is_quick(known):
            run_blocking(self._call, partial(self._start_request, message, known))
        else:
            self._start_request(message, known, is_lone=not (self._open_count or self._is_sending))

    def _start_request(self, message: Message, known: KnownMessage | Outline | None, *, is_lone: bool = False) -> None:
        """Submit a request, and receive the next message as soon as the limits allow it. `is_lone`: see `_lone`."""
        try:
            if self._submit(message, known, is_lone=is_lone):
                return
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            self._end(client_error(error))
            return
        with self._lock:
            # Set under the lock: a thread that frees memory counts it first, and checks this flag under the lock after.
            self._reader_waits = True
            may_receive = self._may_receive()
        if may_receive:
            self._call.receive()

    def on_last_message(self) -> None:
        with self._lock:
            self._is_input_closed = True
            if not self._open_count:
                self._post_end()
        self._flush()

    def on_sent(self) -> None:
        with self._lock:
            item = self._next_item()
            may_receive = self._may_receive()
        if may_receive:
            self._call.receive()
        self._send(item)

    def on_woken(self) -> None:
        """Do nothing: this call never calls `wake`."""

    def on_client_left(self) -> None:
        self._end()

    def on_server_stopping(self) -> None:
        with self._lock:
            self._is_stopping = True
            if self._open_count:
                return
        self._end(_stopping())

    # -- requests

    def _submit(self, message: Message, known: KnownMessage | Outline | None, *, is_lone: bool) -> bool:
        """Submit one request, or send an error as its response. Return whether the next message was requested."""
        service = self._service
        streamed = StreamedRequest(self, len(message))
        plan = streamed.plan
        request = failure = None
        traces = service.traces
        received_ns = time.monotonic_ns() if traces.is_on else 0
        try:
            found = self._reader.find(message, known, plan)
            streamed.handle = handle = self._handles.find(plan.model, plan.version)
            streamed.is_ordered = not handle.spec.is_decoupled
            request = self._reader.request(message, found, plan, self._forwarded)
            streamed.memo = request.memo
            if traces.is_on:
                streamed.trace = begin_trace(traces, request, self._call.metadata, received_ns)
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            failure = client_error(error)
        if is_lone and streamed.is_ordered:
            self._open_count = 1
            self._order.append(streamed)
            self._lone = streamed
            self._lone_thread = threading.get_ident()
        else:
            is_lone = False
            with self._lock:
                self._open_count += 1
                if streamed.is_ordered:
                    self._order.append(streamed)
        if request is not None and failure is None:
            try:
                # A decoupled model may wait without limit between its responses: it must not run on this thread.
                hold_us = self._call.hold_us if streamed.is_ordered else 0.0
                ticket = handle.submit(request, streamed.on_response, hold_us=hold_us)
                if not streamed.is_done:
                    self._watch(streamed, ticket)
            except Exception as error:  # noqa: BLE001 - as above
                failure = client_error(error)
        if failure is not None:
            self.on_response(streamed, Response(plan.model, plan.version or 0, plan.request_id, error=failure))
        if not is_lone:
            return False
        was_answered_here = self._lone is None
        self._lone = None
        return was_answered_here

    def _watch(self, streamed: StreamedRequest, ticket: SubmittedRequest) -> None:
        """Store the ticket of an unanswered request: the request is cancelled if the call ends."""
        streamed.ticket = ticket
        with self._lock:
            if streamed.is_done:
                return
            if not self._is_ended:
                self._waiting.add(streamed)
                return
        ticket.cancel()

    def _may_receive(self) -> bool:
        """Return whether reading has stopped and the limits allow to request the next message. If so, the caller must
        request it after the lock is released. *Locked.*"""
        if not self._reader_waits or self._is_ended:
            return False
        held_bytes = self._accepted_bytes - self._finished_bytes + self._posted_bytes - self._sent_bytes
        if self._accepted - self._finished >= MAX_OUTSTANDING or held_bytes >= MAX_OUTSTANDING_BYTES:
            return False
        self._reader_waits = False
        return True

    # -- responses

    def on_response(self, streamed: StreamedRequest, response: Response) -> None:
        """Send one response, now or later. Called on any thread."""
        is_final = response.is_final
        if is_final and streamed.trace is not None:
            streamed.trace.stamp(COMPLETE)
        is_lone = streamed is self._lone and is_final and not self._is_sending
        if is_lone and threading.get_ident() == self._lone_thread:
            self._answer_lone(streamed, response)
            return
        item: OutgoingResponse | EndOfStream | None = None
        is_overfull = False
        with self._lock:
            if is_final:
                streamed.is_done = True
                self._waiting.discard(streamed)
                self._open_count -= 1
            is_dropped = self._is_ended
            if is_dropped:
                pass
            elif is_final and not self._is_sending and len(self._order) == 1 and self._order[0] is streamed:
                # Usual case: no response waits before or behind it.
                self._order.clear()
                self._is_sending = True
                self._posted += 1
                item = (streamed, response, 0)
            else:
                self._post_in_order(streamed, response)
                if not self._is_sending:
                    item = self._next_item()
                elif (
                    self._posted - self._sent > MAX_BACKLOG or self._posted_bytes - self._sent_bytes > MAX_BACKLOG_BYTES
                ):
                    is_overfull = True
            if not (is_dropped or self._open_count):
                self._post_end()
        if item is not None:
            self._send(item)
        elif is_overfull:
            self._end(Throttled("the client does not read the responses of its stream, of which too many wait"))
        elif is_dropped and is_final:
            streamed.close()

    def _answer_lone(self, streamed: StreamedRequest, response: Response) -> None:
        """Send the final response of the lone request, and request the next message: see `_lone`."""
        self._lone = None
        self._order.clear()
        self._open_count = 0
        streamed.is_done = self._is_sending = self._reader_waits = True
        if self._is_stopping:
            self._post_end()
        if self._send_response(streamed, response):
            self._is_sending = self._reader_waits = False
            if self._outbox:
                # The end, which another thread of grpcio's transport may have posted meanwhile.
                self._flush()
            self._call.receive()

    def _post_in_order(self, streamed: StreamedRequest, response: Response) -> None:
        """Post the response, or hold it until all previous requests have their responses. *Locked.*"""
        if not streamed.is_ordered:
            self._post(streamed, response)
            return
        if self._order[0] is not streamed:
            if streamed.held is None:
                streamed.held = []
            streamed.held.append(response)
            return
        self._post(streamed, response)
        if not response.is_final:
            return
        self._order.popleft()
        while self._order and (held := self._order[0].held):
            first = self._order[0]
            first.held = None
            for early in held:
                self._post(first, early)
            if not first.is_done:
                return
            self._order.popleft()

    def _post(self, streamed: StreamedRequest, response: Response) -> None:
        size = 0
        for tensor in response.outputs:
            size += tensor.nbytes
        self._posted += 1
        self._posted_bytes += size
        self._outbox.append((streamed, response, size))

    def _post_end(self) -> None:
        if self._is_input_closed:
            self._outbox.append(EndOfStream())
        elif self._is_stopping:
            self._outbox.append(EndOfStream(_stopping()))

    def _flush(self) -> None:
        """Send the waiting responses, unless another thread does this or the transport accepts no more."""
        with self._lock:
            item = None if self._is_sending else self._next_item()
        self._send(item)

    def _next_item(self) -> OutgoingResponse | EndOfStream | None:
        """Return the next item of the outbox, which the caller must send, or None if there is none. *Locked.*"""
        item = self._outbox.popleft() if self._outbox else None
        self._is_sending = item is not None
        return item

    def _send(self, item: OutgoingResponse | EndOfStream | None) -> None:
        """Send an item and those that wait behind it, until the transport accepts no more."""
        while item is not None:
            if isinstance(item, EndOfStream):
                self._call.end(OK if item.error is None else call_status(client_error(item.error)))
                return
            streamed, response, size = item
            self._sent += 1
            self._sent_bytes += size
            if not self._send_response(streamed, response):
                return
            with self._lock:
                item = self._next_item()
                may_receive = self._may_receive()
            if may_receive:
                self._call.receive()

    def _send_response(self, streamed: StreamedRequest, response: Response) -> bool:
        """Send a response. Return whether the next item may be sent at once."""
        is_final, trace = response.is_final, streamed.trace
        if is_final:
            self._finished += 1
            self._finished_bytes += streamed.size
            if trace is not None:
                trace.stamp(SEND_START)
        try:
            message = self._message(streamed, response)
        except EdgeServerError as error:
            self._call.end(call_status(client_error(error)))
            return False
        finally:
            if is_final:
                if trace is not None:
                    trace.stamp(SEND_END)
                streamed.close()
        return message is None or self._call.send(message)

    def _message(self, streamed: StreamedRequest, response: Response) -> Pieces | None:
        """Return the encoded response, or None if the client must not get it.

        Raises the response's error if the metadata has REAL_ERRORS_KEY.
        """
        error, plan = response.error, streamed.plan
        if error is None:
            # An empty final response is sent if the client requested it, or if a model with one response per request
            # has sent none.
            if response.is_empty and not plan.wants_empty_final and (streamed.has_sent or not streamed.is_ordered):
                return None
            streamed.has_sent = True
            try:
                if response.is_empty:
                    return empty_final_message(plan.model, plan.version_text, plan.request_id)
                if plan.special:
                    return stream_message(*apply_plan(response, plan, streamed.handle.spec), streamed.memo)
                return stream_message(response, memo=streamed.memo)
            except Exception as failure:  # noqa: BLE001 - any error gets a status: `client_error` logs it
                error = client_error(failure)
                if not response.is_final and streamed.ticket is not None:
                    streamed.ticket.cancel()
        if self._has_real_errors:
            self._end()
            raise error
        return stream_error_message(error.message, plan.request_id)

    # -- the end

    def _end(self, error: EdgeServerError | None = None) -> None:
        """Cancel outstanding requests and drop unsent responses. `error` None: the client has left."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            tickets = [streamed.ticket for streamed in self._waiting]
            closing = list(self._order)
            closing += [item[0] for item in self._outbox if not isinstance(item, EndOfStream)]
            self._waiting.clear()
            self._order.clear()
            self._outbox.clear()
            self._outbox.append(EndOfStream(error))
        for ticket in tickets:
            if ticket is not None:
                ticket.cancel()
        for streamed in closing:
            streamed.close()
        self._flush()


def _stopping() -> EdgeServerError:
    return Draining("Server is stopping, the stream has stopped accepting new inference requests")
