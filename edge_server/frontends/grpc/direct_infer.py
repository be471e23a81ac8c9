"""ModelInfer at the direct door: submitted on the thread that reads, answered on the thread that computed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_server.core.message import Response
from edge_server.errors import Unsupported
from edge_server.frontends.grpc.access import Restriction
from edge_server.frontends.grpc.answer import unary_answer
from edge_server.frontends.grpc.boundary import Ending, ending, known
from edge_server.frontends.grpc.direct import Event, UnaryCall
from edge_server.frontends.grpc.infer import call_deadline_ns, forwarded_metadata
from edge_server.frontends.grpc.read import InferReader
from edge_server.frontends.grpc.request import Plan, plan_of, request_of
from edge_server.frontends.grpc.traced import COMPLETE, SEND_END, SEND_START, begin_trace
from edge_server.service import READING_THREAD_HOLD_US

if TYPE_CHECKING:
    from edge_server.service import InferenceService, Ticket
    from edge_server.telemetry.trace_record import TracedRequest


class DirectInfer:
    """What every call needs: the service, how messages are read, who may call."""

    __slots__ = ("header_pattern", "reader", "restriction", "service")

    def __init__(
        self,
        service: InferenceService,
        reader: InferReader,
        header_pattern: re.Pattern[str] | None,
        restriction: Restriction | None,
    ) -> None:
        self.service = service
        self.reader = reader
        self.header_pattern = header_pattern
        self.restriction = restriction

    def call(self, event: Event, closed: Callable[[], None]) -> InferCall:
        return InferCall(event, closed, self)


class InferCall(UnaryCall):
    """One ModelInfer call."""

    __slots__ = ("_infer", "_is_answered", "_is_inline", "_lock", "_plan", "_response", "_ticket", "_trace")

    def __init__(self, event: Event, closed: Callable[[], None], infer: DirectInfer) -> None:
        super().__init__(event, closed)
        self._infer = infer
        self._plan: Plan | None = None
        self._ticket: Ticket | None = None
        self._response: Response | None = None
        self._trace: TracedRequest | None = None
        self._is_inline = True
        """Whether the thread that submits is not done with it: it sends the answer itself then."""
        self._is_answered = False
        self._lock = threading.Lock()

    def on_message(self, data: bytes) -> None:
        try:
            ticket = self._submit(data)
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            if self._plan is not None:
                self._plan.release()
            self.end(ending(known(error)))
            return
        with self._lock:
            self._is_inline = False
            if not self._is_answered:
                self._ticket = ticket
                self.watch()
                return
        self._answer()

    def end(self, done: Ending) -> None:
        trace = self._trace
        if trace is None:
            super().end(done)
            return
        trace.stamp(SEND_START)
        super().end(done)
        trace.stamp(SEND_END)
        trace.finish()

    def on_client_left(self) -> None:
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()

    def _submit(self, data: bytes) -> Ticket:
        infer = self._infer
        if infer.restriction is not None:
            infer.restriction.check(self)
        traces = infer.service.traces
        received_ns = time.monotonic_ns() if traces.is_on else 0
        found = infer.reader.read(data)
        self._plan = plan = plan_of(found)
        plan.read_version()
        if infer.service.model_spec(plan.model, plan.version).is_decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        headers = forwarded_metadata(self, infer.header_pattern)
        request = request_of(found, plan, infer.service.shared_memory, headers)
        request.deadline_ns = call_deadline_ns(request.deadline_ns, self)
        if traces.is_on:
            self._trace = begin_trace(traces, request, self.invocation_metadata(), received_ns)
        return infer.service.submit(request, self._take, hold_us=READING_THREAD_HOLD_US)

    def _take(self, response: Response) -> None:
        """Take the model's responses, on whichever thread; the last one that tells something is the answer."""
        if self._response is None or not response.is_empty:
            self._response = response
        if not response.is_final:
            return
        with self._lock:
            self._is_answered = True
            if self._is_inline:
                return
        self._answer()

    def _answer(self) -> None:
        # Let go of here: the call lives on until gRPC has sent it all.
        response, plan, self._ticket = self._response, self._plan, None
        self._response = self._plan = None
        assert response is not None
        assert plan is not None
        if self._trace is not None:
            self._trace.stamp(COMPLETE)
        try:
            if response.error is not None:
                done = ending(response.error)
            else:
                done = Ending(unary_answer(response, plan, self._infer.service))
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            done = ending(known(error))
        plan.release()
        self.end(done)
