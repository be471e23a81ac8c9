"""ModelInfer: one request, one response, on the thread that carries the call."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc

from edge_server.core.message import NO_PARAMETERS, Parameter, Request, Response
from edge_server.errors import EdgeServerError, Unsupported
from edge_server.frontends.grpc.answer import unary_answer
from edge_server.frontends.grpc.read import InferReader
from edge_server.frontends.grpc.request import Plan, plan_of, request_of
from edge_server.frontends.grpc.traced import COMPLETE, SEND_END, SEND_START, begin_trace
from edge_server.frontends.v2.forwarding import forwarded

if TYPE_CHECKING:
    from edge_server.service import InferenceService
    from edge_server.telemetry.trace_record import TracedRequest

REAL_ERRORS_KEY = "triton_grpc_error"
"""Metadata: when "true", the first error ends a stream with its status instead of travelling in a message."""

_NO_DEADLINE_S = 1e8


class Waiter:
    """Takes a request's responses for a thread that waits for them."""

    __slots__ = ("_closed", "is_done", "response")

    def __init__(self) -> None:
        self.response: Response | None = None
        self.is_done = False
        # A bare lock, held until the final response: half the cost of an Event, and a request waits only once.
        self._closed = threading.Lock()
        self._closed.acquire()

    def take(self, response: Response) -> None:
        if self.response is None or not response.is_empty:
            self.response = response
        if response.is_final:
            self.is_done = True
            self._closed.release()

    def wait(self) -> None:
        self._closed.acquire()


class UnaryInfer:
    """Answers ModelInfer calls: received bytes in, bytes or an error out. Used by all handler threads."""

    def __init__(self, service: InferenceService, reader: InferReader, header_pattern: re.Pattern[str] | None) -> None:
        self._service = service
        self._reader = reader
        self._header_pattern = header_pattern

    def answer(self, data: bytes, context: grpc.ServicerContext) -> bytes | EdgeServerError:
        """Return the response message, or the error the model answered with. Raises EdgeServerError likewise.

        The client's cancelling or missing its deadline takes the request back at once.
        """
        traces = self._service.traces
        received_ns = time.monotonic_ns() if traces.is_on else 0
        found = self._reader.read(data)
        plan = plan_of(found)
        plan.read_version()
        if self._service.model_spec(plan.model, plan.version).is_decoupled:
            raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
        headers = forwarded_metadata(context, self._header_pattern)
        request = request_of(found, plan, self._service.shared_memory, headers)
        trace = None
        try:
            request.deadline_ns = call_deadline_ns(request.deadline_ns, context)
            if traces.is_on:
                trace = begin_trace(traces, request, context.invocation_metadata(), received_ns)
            return self._answered(request, plan, context, trace)
        finally:
            plan.release()
            if trace is not None:
                trace.finish()

    def _answered(
        self, request: Request, plan: Plan, context: grpc.ServicerContext, trace: TracedRequest | None = None
    ) -> bytes | EdgeServerError:
        waiter = Waiter()
        ticket = self._service.submit(request, waiter.take, hold_us=math.inf)
        if not waiter.is_done:
            if not context.add_callback(ticket.cancel):
                ticket.cancel()
            waiter.wait()
        response = waiter.response
        assert response is not None
        if trace is not None:
            trace.stamp(COMPLETE)
            trace.stamp(SEND_START)
            message = response.error or unary_answer(response, plan, self._service)
            trace.stamp(SEND_END)
            return message
        # Not raised: batch mates share the error, and a traceback on it would pin every one of their requests.
        return response.error or unary_answer(response, plan, self._service)


def call_deadline_ns(deadline_ns: int, context: grpc.ServicerContext) -> int:
    """Return the request's own deadline or the call's, whichever comes first; 0 where there is none."""
    left_s = context.time_remaining()
    # Without a deadline grpcio tells a moment many years ahead.
    if left_s is None or left_s > _NO_DEADLINE_S:
        return deadline_ns
    of_call_ns = time.monotonic_ns() + int(left_s * 1e9)
    return min(deadline_ns, of_call_ns) if deadline_ns else of_call_ns


def forwarded_metadata(context: grpc.ServicerContext, pattern: re.Pattern[str] | None) -> Mapping[str, Parameter]:
    """Return the call's metadata that becomes request parameters. Raises InvalidRequest for reserved names."""
    if pattern is None:
        return NO_PARAMETERS
    # Binary metadata is no text, and the switch for real errors on streams is for this front end alone.
    return forwarded(
        (
            (key, value)
            for key, value in context.invocation_metadata()
            if isinstance(value, str) and not key.endswith("-bin") and key != REAL_ERRORS_KEY
        ),
        pattern,
    )
