"""Execution of one request to an ensemble: starts each step when its inputs are there, on the threads that deliver
responses. Tensors are passed on without copies."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from edge_server.core.ensemble_graph import Step, StepPlan
from edge_server.core.ensemble_run import EnsembleRun, StepLaunch, match_rank, step_input_tensor
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import (
    NO_PARAMETERS,
    Parameter,
    Request,
    Response,
    ResponseSink,
    SequenceStep,
    SubmittedRequest,
)
from edge_server.core.tensor import Tensor
from edge_server.errors import BackendError, Cancelled, EdgeServerError, ServingFault
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.ticket import Ticket

_MAX_HOLD_S = 5.0
"""How long a decoupled step that is too far ahead is held at a time. Two ensembles may hold each other's models, and
must not do so for ever."""


class SubmitStep(Protocol):
    """Sends a step's request to a model. Raises EdgeServerError; `request.release` was not called then."""

    def __call__(self, request: Request, sink: ResponseSink, *, hold_us: float) -> SubmittedRequest: ...


class StepLimiter:
    """Limits the requests of one step that are in flight, over all requests to the ensemble. Thread-safe.

    A step that finds no slot free waits here without a thread, in the order of arrival. As Triton's
    StepInflightRequestLimiter since April 2026, which blocks the thread instead.
    """

    def __init__(self, max_inflight: int) -> None:
        self._lock = threading.Lock()
        self._free_slots = max_inflight
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_starting = False

    def take_slot(self, start_later: Callable[[], object]) -> bool:
        """Take a slot. If none is free return False, and call `start_later` when it has one."""
        with self._lock:
            if self._free_slots:
                self._free_slots -= 1
                return True
            self._waiting.append(start_later)
            return False

    def give_back(self) -> None:
        """Give a slot back, and start the steps that wait for one."""
        with self._lock:
            self._free_slots += 1
            if self._is_starting:
                # A step that answers at once gives back its slot inside the loop below: do not nest them.
                return
            self._is_starting = True
        while True:
            with self._lock:
                if not self._free_slots or not self._waiting:
                    self._is_starting = False
                    return
                self._free_slots -= 1
                start = self._waiting.popleft()
            start()


class EnsembleContext(NamedTuple):
    """Shared by the runs of one ensemble version. `allows_missing_outputs`: outputs may be missing in a response.

    `limiters` has one for each step, in their order; it is empty if nothing is limited. `on_released` is called once
    for each run, when nothing uses its inputs any more.
    """

    spec: ModelSpec
    version: int
    counters: VersionCounters
    submit: SubmitStep
    allows_missing_outputs: bool
    limiters: Sequence[StepLimiter]
    on_released: Callable[[EnsembleRequest], None]


class _StepCall:
    """A step's request in progress: the sink of its responses."""

    __slots__ = ("_run", "is_over", "launch", "submitted_ns", "ticket")

    def __init__(self, run: EnsembleRequest, launch: StepLaunch[Tensor]) -> None:
        self._run = run
        self.launch = launch
        self.ticket: SubmittedRequest | None = None
        self.submitted_ns = time.monotonic_ns()
        self.is_over = False

    def __call__(self, response: Response) -> None:
        self._run.receive(self, response)


class EnsembleRequest:
    """Thread-safe. The lock is never held during a submit, a call of a sink, or a cancel."""

    def __init__(self, context: EnsembleContext, ticket: Ticket, plan: StepPlan, run: EnsembleRun[Tensor]) -> None:
        self.ticket = ticket
        self._context = context
        self._plan = plan
        self._run = run
        self._lock = threading.Lock()
        self._step_started = threading.Condition(self._lock)
        self._calls: set[_StepCall] = set()
        self._arrivals: dict[int, deque[tuple[_StepCall, Response]]] = {}
        """Threads that work on this run now, each with the responses that reached it meanwhile. A member that answers
        during its submit must not nest calls, step by step."""
        self._events = 1
        """Number of responses that came and are not processed yet, and 1 until the first steps are submitted."""
        self._unreleased = 0
        self._waiting_launches = 0
        """Steps that wait for a slot of their limiter."""
        self._is_released = False
        self._answer: Mapping[str, Tensor] | None = None
        self._started_ns = 0
        self._queue_ns = 0
        self._infer_ns = 0

    def begin(self, found: Response | None, *, hold_us: float, holds_inputs: bool) -> None:
        """Answer with the response `found` in the cache, or submit the first steps. `hold_us`: how long this thread may
        be held to compute steps, in all. `holds_inputs`: `hold_inputs` was called before."""
        if found is None:
            self._start(hold_us)
        elif self.ticket.claim():  # else it was cancelled meanwhile
            if self.ticket.request.trace is not None:
                self.ticket.request.trace.record_outputs(found.outputs)
            self.ticket.send_final(found)
            self._close()
        if holds_inputs:
            self.release_inputs()

    def _start(self, hold_us: float) -> None:
        began_ns = time.monotonic_ns()
        ident = threading.get_ident()
        with self._lock:
            self._arrivals[ident] = deque()
            launches = self._run.start()
            complete_outputs = self._run.take_responses()
        self._send_and_launch(launches, complete_outputs, hold_us=hold_us)
        self._drain(ident, hold_us=hold_us, began_ns=began_ns)

    def hold_inputs(self) -> None:
        """Keep the inputs until `release_inputs`: something else than a step reads them."""
        with self._lock:
            self._unreleased += 1

    def receive(self, call: _StepCall, response: Response) -> None:
        """Receive a response of a step's model, on any thread."""
        ident = threading.get_ident()
        with self._lock:
            self._events += 1
            waiting = self._arrivals.get(ident)
            if waiting is not None:
                waiting.append((call, response))
                return
            self._arrivals[ident] = deque([(call, response)])
        self._drain(ident, hold_us=0.0, began_ns=time.monotonic_ns())
        if self._context.limiters and call.launch.step.is_decoupled and not response.is_final:
            # Hold the thread of the decoupled model until no step waits for a slot.
            with self._step_started:
                self._step_started.wait_for(lambda: self.ticket.is_closed or not self._waiting_launches, _MAX_HOLD_S)

    def cancel(self) -> None:
        """Answer CANCELLED, unless the final response was sent already, and cancel the steps in progress."""
        self.fail(Cancelled(f"request to model '{self._context.spec.name}' was cancelled"))

    def fail(self, error: EdgeServerError) -> bool:
        """Answer with the error. Return False if the final response was sent already."""
        ticket = self.ticket
        if not ticket.claim():
            return False
        counters = self._context.counters
        counters.record_failure(
            error, ticket.arrived_ns, time.monotonic_ns(), in_backend=isinstance(error, ServingFault)
        )
        ticket.send_final(ticket.failure(error))
        self._close()
        return True

    def _drain(self, ident: int, *, hold_us: float, began_ns: int) -> None:
        """Process the responses that came to this thread. It may be held for `hold_us` from `began_ns` on."""
        events = self._arrivals[ident]
        while True:
            with self._lock:
                if not events:
                    del self._arrivals[ident]
                    return
                call, response = events.popleft()
                launches, complete_outputs, error = self._store_response(call, response)
            if response.is_final and self._context.limiters:
                self._context.limiters[call.launch.step.index].give_back()
            if error is not None:
                self.fail(self._with_step_name(error, call.launch.step))
            self._send_and_launch(launches, complete_outputs, hold_us=hold_us - (time.monotonic_ns() - began_ns) / 1000)

    def _store_response(
        self, call: _StepCall, response: Response
    ) -> tuple[list[StepLaunch[Tensor]], list[dict[str, Tensor]], EdgeServerError | None]:
        """Store a response as input of the next steps or as output. Called under the lock."""
        if response.is_final:
            call.is_over = True
            call.ticket = None
            self._calls.discard(call)
            started_ns = max(response.started_ns, call.submitted_ns)
            self._started_ns = self._started_ns or started_ns
            self._queue_ns += started_ns - call.submitted_ns
            self._infer_ns += time.monotonic_ns() - started_ns
        if response.error is not None or self.ticket.is_closed:
            return [], [], response.error
        outputs = {tensor.name: tensor for tensor in response.outputs}
        launches = self._run.add_response(call.launch, outputs, is_final=response.is_final)
        return launches, self._run.take_responses(), None

    def _send_and_launch(
        self,
        launches: Sequence[StepLaunch[Tensor]],
        complete_outputs: Sequence[Mapping[str, Tensor]],
        *,
        hold_us: float,
    ) -> None:
        for outputs in complete_outputs:
            self._send(outputs)
        for index, launch in enumerate(launches, 1):
            # Only the last step runs on this thread: the others run in parallel.
            is_last = index == len(launches)
            if not self._launch(launch, hold_us=hold_us if is_last and not launch.step.is_decoupled else 0.0):
                break
        with self._lock:
            self._events -= 1
            is_done = not self._events and self._run.is_done
        if is_done:
            self._finish()

    def _launch(self, launch: StepLaunch[Tensor], *, hold_us: float) -> bool:
        """Submit a step's request, or let it wait for a slot. Return False if the ensemble's request has ended."""
        if not self._context.limiters:
            return self._submit(launch, hold_us=hold_us)
        limiter = self._context.limiters[launch.step.index]
        with self._lock:
            self._waiting_launches += 1
        if not limiter.take_slot(lambda: self._launch_in_slot(limiter, launch, hold_us=0.0)):
            return True
        return self._launch_in_slot(limiter, launch, hold_us=hold_us)

    def _launch_in_slot(self, limiter: StepLimiter, launch: StepLaunch[Tensor], *, hold_us: float) -> bool:
        with self._lock:
            self._waiting_launches -= 1
            self._step_started.notify_all()
        is_submitted = self._submit(launch, hold_us=hold_us)
        if not is_submitted:
            limiter.give_back()
        return is_submitted

    def _submit(self, launch: StepLaunch[Tensor], *, hold_us: float) -> bool:
        call = _StepCall(self, launch)
        with self._lock:
            if self.ticket.is_closed:
                return False
            self._calls.add(call)
            self._unreleased += 1
        try:
            ticket = self._context.submit(self._request_of(launch), call, hold_us=hold_us)
        except EdgeServerError as error:
            with self._lock:
                self._calls.discard(call)
            self.fail(self._with_step_name(error.detached(), launch.step))
            self.release_inputs()
            return False
        with self._lock:
            if not call.is_over:
                call.ticket = ticket
            is_late = self.ticket.is_closed and not call.is_over
        if is_late:
            ticket.cancel()
        return True

    def _request_of(self, launch: StepLaunch[Tensor]) -> Request:
        request, step = self.ticket.request, launch.step
        inputs = {}
        for feed in step.inputs:
            tensor = launch.inputs.get(feed.input)
            if tensor is not None:
                inputs[feed.input] = step_input_tensor(tensor, feed)
        return Request(
            step.model,
            inputs,
            step.version,
            request.id,
            tuple(name for name, _ in step.outputs),
            request.parameters,
            request.priority,
            request.timeout_us,
            request.sequence,
            self.release_inputs,
            request.deadline_ns,
            None if request.trace is None else request.trace.new_child(),
        )

    def _send(self, outputs: Mapping[str, Tensor]) -> None:
        if not self._context.spec.is_decoupled:
            self._answer = outputs
        elif outputs:
            if not self.ticket.sent_count:
                self._context.counters.record_first_response(time.monotonic_ns() - self.ticket.arrived_ns)
            self.ticket.sent_count += 1
            self.ticket.send(self._response(outputs, is_final=False))

    def _finish(self) -> None:
        """Send the final response of the stream."""
        context, ticket = self._context, self.ticket
        if not context.spec.is_decoupled:
            missing = [name for name in self._plan.outputs if name not in (self._answer or {})]
            if missing and not (self._answer and context.allows_missing_outputs):
                message = (
                    f"ensemble '{context.spec.name}': no step made the output(s) {missing}; was an input left out?"
                )
                self.fail(BackendError(message))
                return
        if not ticket.claim():
            return
        context.counters.record_composed(
            ticket.arrived_ns, ticket.item_count, time.monotonic_ns(), self._queue_ns, self._infer_ns
        )
        response = self._response(self._answer or {}, is_final=True)
        response.is_empty = context.spec.is_decoupled
        ticket.send_final(response)
        self._close()

    def _response(self, outputs: Mapping[str, Tensor], *, is_final: bool) -> Response:
        context, request = self._context, self.ticket.request
        tensors: list[Tensor] = []
        for item in context.spec.outputs:
            tensor = outputs.get(item.name)
            if tensor is not None:
                tensors.append(match_rank(tensor, item.name, len(context.spec.wire_dims(item.dims))))
        if request.trace is not None:
            request.trace.record_outputs(tensors)
        return Response(
            request.model,
            context.version,
            request.id,
            tuple(tensors),
            sequence_parameters(request.sequence),
            is_final=is_final,
            spec=context.spec,
            started_ns=self._started_ns,
            batch_size=self.ticket.item_count,
        )

    def _with_step_name(self, error: EdgeServerError, step: Step) -> EdgeServerError:
        """Return the error of a step's model with the name of the step in its message."""
        named = copy.copy(error)
        named.message = f"in ensemble '{self._context.spec.name}', {step}: {error.message}"
        named.args = (named.message,)
        return named.detached()

    def _close(self) -> None:
        """Cancel the steps in progress, after the final response was claimed."""
        with self._lock:
            tickets = [call.ticket for call in self._calls if call.ticket is not None]
            self._step_started.notify_all()
        for ticket in tickets:
            ticket.cancel()
        self._release_if_over()

    def release_inputs(self) -> None:
        """Note that one user of the inputs, such as a step's model, does not need them any more."""
        with self._lock:
            self._unreleased -= 1
        self._release_if_over()

    def _release_if_over(self) -> None:
        with self._lock:
            if self._is_released or self._unreleased or not self.ticket.is_closed:
                return
            self._is_released = True
        self.ticket.release()
        self._context.on_released(self)


def sequence_parameters(step: SequenceStep | None) -> Mapping[str, Parameter]:
    """Return the sequence parameters of the request for an ensemble's response, as Triton does."""
    if step is None:
        return NO_PARAMETERS
    return {"sequence_id": step.id, "sequence_start": step.is_start, "sequence_end": step.is_end}
