"""ModelInfer: one request and one response. Submitted on the transport's thread, answered on the thread that computed.

Also what streams share with it: reading a request out of a message and the call's metadata.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from edge_server.core.message import NO_PARAMETERS, Parameter, Request, RequestMemo, Response
from edge_server.errors import Unsupported
from edge_server.frontends.grpc.access import Restriction
from edge_server.frontends.grpc.call import Call, Message, Metadata, UnarySide, ending, known, run_blocking
from edge_server.frontends.grpc.encode import response_message
from edge_server.frontends.grpc.header_cache import RequestReader
from edge_server.frontends.grpc.message import InferMessage
from edge_server.frontends.grpc.request import Plan
from edge_server.frontends.grpc.special_outputs import shaped
from edge_server.frontends.v2.forwarding import forwarded

if TYPE_CHECKING:
    from edge_server.service import InferenceService, Ticket
    from edge_server.telemetry.trace import Traces
    from edge_server.telemetry.trace_record import TracedRequest

REAL_ERRORS_KEY = "triton_grpc_error"
"""Metadata: when "true", the first error ends a stream with its status instead of travelling in a message."""

LARGE_BYTES = 256 << 10
"""From this size on messages are read on the transport's thread only if nothing but their head is looked at."""

COMPLETE, SEND_START, SEND_END = "INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"
"""Triton's names, in traces, for what the front end does after a model has answered."""


class Inference:
    """What every inference call needs: the service, the reader of requests, the names of forwarded metadata."""

    __slots__ = ("header_pattern", "reader", "restriction", "service")

    def __init__(
        self, service: InferenceService, header_pattern: re.Pattern[str] | None, restriction: Restriction | None
    ) -> None:
        self.service = service
        self.reader = RequestReader(service.shared_memory)
        self.header_pattern = header_pattern
        self.restriction = restriction

    def open(self, call: Call) -> InferCall:
        """Open a ModelInfer call. Raises what the restriction raises."""
        if self.restriction is not None:
            self.restriction.check(call.metadata)
        return InferCall(call, self)


class InferCall(UnarySide):
    """One ModelInfer call."""

    __slots__ = ("_call", "_has_left", "_inference", "_is_answered", "_memo", "_plan", "_response", "_ticket", "_trace")

    def __init__(self, call: Call, inference: Inference) -> None:
        self._call = call
        self._inference = inference
        self._memo: RequestMemo | None = None
        self._response: Response | None = None
        self._ticket: Ticket | None = None
        self._trace: TracedRequest | None = None
        self._is_answered = self._has_left = False

    def on_message(self, message: Message) -> None:
        if len(message) >= LARGE_BYTES and not self._inference.reader.is_quick(message):
            run_blocking(self._call, partial(self._submit, message))
        else:
            self._submit(message)

    def _submit(self, message: Message) -> None:
        call, inference = self._call, self._inference
        service = inference.service
        self._plan = plan = Plan()
        try:
            traces = service.traces
            received_ns = time.monotonic_ns() if traces.is_on else 0
            found = inference.reader.find(message, plan)
            if isinstance(found, InferMessage):
                spec = service.model_spec(plan.model, plan.version)
            else:
                spec = service.spec_of(found[0].memo, plan.model, plan.version)
            if spec.is_decoupled:
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            pattern = inference.header_pattern
            headers = NO_PARAMETERS if pattern is None else forwarded_metadata(call.metadata, pattern)
            request = inference.reader.request(message, found, plan, headers)
            self._memo = request.memo
            deadline_ns = call.deadline_ns
            if deadline_ns and not 0 < request.deadline_ns < deadline_ns:
                request.deadline_ns = deadline_ns
            if traces.is_on:
                self._trace = begin_trace(traces, request, call.metadata, received_ns)
            ticket = service.submit(request, self._take, hold_us=call.hold_us)
        except Exception as error:  # noqa: BLE001 - the boundary: `known` logs and maps
            plan.release()
            if self._trace is not None:
                self._trace.finish()
            call.end(ending(known(error)))
            return
        if self._is_answered:
            return
        # Neither a lock nor an order of events is needed: whichever of these two threads writes first looks second.
        self._ticket = ticket
        if self._has_left:
            ticket.cancel()
        if self._is_answered:
            self._ticket = None

    def on_client_left(self) -> None:
        self._has_left = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()

    def _take(self, response: Response) -> None:
        """Take the model's responses, on any thread; the last one that is not empty is the answer."""
        if not response.is_final:
            if not response.is_empty:
                self._response = response
            return
        if response.is_empty and self._response is not None:
            response = self._response
        self._is_answered = True
        self._ticket = self._response = None
        plan, trace, error = self._plan, self._trace, response.error
        if trace is not None:
            trace.stamp(COMPLETE)
            trace.stamp(SEND_START)
        if error is None:
            try:
                if plan.special:
                    message = response_message(*shaped(response, plan, self._inference.service))
                else:
                    message = response_message(response, memo=self._memo)
            except Exception as failure:  # noqa: BLE001 - the boundary: `known` logs and maps
                error = known(failure)
        if plan.places is not None:
            plan.release()
        # Errors are not raised: batch mates share them, and a traceback on one would pin every one of their requests.
        if error is None:
            self._call.answer(message)
        else:
            self._call.end(ending(error))
        if trace is not None:
            trace.stamp(SEND_END)
            trace.finish()


def forwarded_metadata(metadata: Metadata, pattern: re.Pattern[str] | None) -> Mapping[str, Parameter]:
    """Return the call's metadata that becomes request parameters. Raises InvalidRequest for reserved names."""
    if pattern is None:
        return NO_PARAMETERS
    # Binary metadata is no text, and the switch for real errors on streams is for this front end alone.
    return forwarded(
        (
            (key, value)
            for key, value in metadata
            if isinstance(value, str) and not key.endswith("-bin") and key != REAL_ERRORS_KEY
        ),
        pattern,
    )


def begin_trace(traces: Traces, request: Request, metadata: Metadata, received_ns: int) -> TracedRequest | None:
    """Return the trace of a request that was just read, None for most. `received_ns` is when its bytes were there."""
    trace = traces.sample(request.model, ((key, value) for key, value in metadata if isinstance(value, str)))
    if trace is not None:
        trace.stamps.append(("GRPC_WAITREAD_START", received_ns))
        trace.start_ns = received_ns
        trace.stamp("GRPC_WAITREAD_END")
        request.trace = trace.first
    return trace
