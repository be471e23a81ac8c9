"""Run of one batch: joins the inputs, calls the session, splits the outputs, counts, and answers each request."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from edge_server.backends.base import NOT_ITERATIVE, Array, Execution, RequestSession, Session
from edge_server.core.batch import BatchPlan
from edge_server.core.device_tensor import with_device_tensors
from edge_server.core.gpu_fault import classify_gpu_fault
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request, Response
from edge_server.core.tensor import Tensor
from edge_server.errors import BackendError, EdgeServerError
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.inline_rule import InlineRule
from edge_server.serving.execution.ticket import Ticket

if TYPE_CHECKING:
    from edge_server.serving.execution.scheduler import Scheduler

log = logging.getLogger(__name__)


class BatchExecutor:
    """Runs batches of one version through the session that it is given. Holds no state of a batch.

    `on_failure` is called with the error of each failed batch, after its requests were answered.
    """

    on_failure: Callable[[EdgeServerError], None] | None = None
    inline: InlineRule | None = None
    """Learns how long runs hold their thread; None if that does not matter. Sending responses does not count, except
    for models that respond within their run."""

    def __init__(self, spec: ModelSpec, plan: BatchPlan, counters: VersionCounters, scheduler: Scheduler) -> None:
        self._spec = spec
        self._plan = plan
        self._counters = counters
        self._scheduler = scheduler

    def __call__(self, session: Session | RequestSession, batch: list[Ticket]) -> Sequence[Ticket]:
        """Run a batch and answer its tickets. Return the tickets that the caller must release now: all of them, or
        none."""
        if session.takes_requests:
            self._execute_requests(session, batch)
            return ()
        if len(batch) != 1 or session.takes_device_memory:
            return self._run_batch(session, batch)
        # Same as `_run_batch`, written out for a batch of one request, the usual case on a small machine.
        ticket = batch[0]
        request, item_count, plan = ticket.request, ticket.item_count, self._plan
        inline = self.inline
        began_ns = 0
        if inline is not None:
            if inline.runs_to_skip > 0:
                inline.runs_to_skip -= 1
            else:
                began_ns = inline.begin()
        start_ns = time.monotonic_ns()
        try:
            inputs = plan.gather_one(request)
            input_end_ns = time.monotonic_ns()
            results = session.run(inputs, ticket.outputs)
            infer_end_ns = time.monotonic_ns()
            outputs = plan.scatter_one(results, request, item_count, ticket.outputs)
            end_ns = time.monotonic_ns()
        except BaseException as error:  # noqa: BLE001 - where a batch fails, by sys.exit() or asyncio's too
            self._fail_batch(batch, self._as_small_error(error), start_ns)
            return ()
        if inline is not None and (began_ns or end_ns - start_ns > inline.slow_ns):
            inline.end(end_ns - start_ns, began_ns)
        if (trace := request.trace) is not None:
            trace.record_computation(start_ns, input_end_ns, infer_end_ns, end_ns)
            trace.record_outputs(outputs)
        if ticket.charged_s:
            ticket.took_s = (end_ns - start_ns) / 1e9
        is_claimed = ticket.claim()
        arrivals_ns, answered_items = ((ticket.arrived_ns,), item_count) if is_claimed else ((), 0)
        self._counters.record_batch(
            arrivals_ns, answered_items, item_count, start_ns, input_end_ns, infer_end_ns, end_ns
        )
        if is_claimed:
            ticket.send_final(
                Response(
                    request.model, ticket.version, request.id, outputs, NO_PARAMETERS, None, True, plan.spec, start_ns,
                    item_count,
                )
            )  # fmt: skip
        return batch

    def _run_batch(self, session: Session, batch: list[Ticket]) -> Sequence[Ticket]:
        start_ns = time.monotonic_ns()
        error = self._answer_batch(session, batch, start_ns)
        if error is None:
            return batch
        # Only one of the requests may be at fault: they run again, one by one.
        may_run_singly = (
            len(batch) > 1
            and session.is_repeatable
            and self._spec.sequence is None
            and not self._spec.is_decoupled
            and _may_be_of_one_request(error)
            and self._counters.record_rerun(time.monotonic_ns())
        )
        if not may_run_singly:
            self._fail_batch(batch, error, start_ns)
            return ()
        log.warning("model '%s': the requests of a failed batch run singly: %s", self._spec.name, error.message)
        finished: list[Ticket] = []
        for index, ticket in enumerate(batch):
            start_ns = time.monotonic_ns()
            error = None if ticket.is_closed else self._answer_batch(session, [ticket], start_ns)
            if error is None:
                finished.append(ticket)
            elif _may_be_of_one_request(error):
                self._fail_batch([ticket], error, start_ns)
            else:
                self._fail_batch(batch[index:], error, start_ns)
                break
        return finished

    def _answer_batch(self, session: Session, batch: list[Ticket], start_ns: int) -> EdgeServerError | None:
        """Run a batch and answer its tickets. Return the error of a run that failed; nothing is answered then."""
        inline = self.inline
        began_ns = 0 if inline is None else inline.begin()
        try:
            answers, input_end_ns, infer_end_ns = self._compute(session, batch)
            end_ns = time.monotonic_ns()
        except BaseException as error:  # noqa: BLE001 - where a batch fails, by sys.exit() or asyncio's too
            return self._as_small_error(error)
        if inline is not None:
            inline.end(end_ns - start_ns, began_ns)
        arrivals_ns: list[int] = []
        claimed: list[tuple[Ticket, tuple[Tensor, ...]]] = []
        item_count = batch_size = 0
        for ticket, outputs in zip(batch, answers, strict=True):
            batch_size += ticket.item_count
            if (trace := ticket.request.trace) is not None:
                trace.record_computation(start_ns, input_end_ns, infer_end_ns, end_ns)
                trace.record_outputs(outputs)
            if ticket.claim():
                item_count += ticket.item_count
                arrivals_ns.append(ticket.arrived_ns)
                claimed.append((ticket, outputs))
        self._counters.record_batch(arrivals_ns, item_count, batch_size, start_ns, input_end_ns, infer_end_ns, end_ns)
        _split_run_time(batch, end_ns - start_ns)
        spec = self._plan.spec
        for ticket, outputs in claimed:
            request = ticket.request
            response = Response(
                request.model,
                ticket.version,
                request.id,
                outputs,
                spec=spec,
                started_ns=start_ns,
                batch_size=batch_size,
            )
            ticket.send_final(response)
        return None

    def _compute(self, session: Session, batch: list[Ticket]) -> tuple[list[tuple[Tensor, ...]], int, int]:
        """Return each request's outputs, and the times at which the inputs and the results were ready."""
        plan = self._plan
        requests = [ticket.request for ticket in batch]
        item_counts = [ticket.item_count for ticket in batch]
        if session.takes_device_memory and plan.uses_device(requests):
            # Tensors in GPU memory stay there.
            found = plan.gather_on_device(requests)
            input_end_ns = time.monotonic_ns()
            results = session.run_on_device(found, plan.output_names(requests), plan.targets(requests))
            infer_end_ns = time.monotonic_ns()
            # Scattering uses only types and shapes of arrays, which both kinds have. A DeviceArray belongs to one
            # request.
            answers = plan.scatter(results, requests, item_counts)  # type: ignore[arg-type]
            return [with_device_tensors(tensors) for tensors in answers], input_end_ns, infer_end_ns
        inputs = plan.gather(requests)
        input_end_ns = time.monotonic_ns()
        outputs = session.run(inputs, plan.output_names(requests))
        infer_end_ns = time.monotonic_ns()
        return plan.scatter(outputs, requests, item_counts), input_end_ns, infer_end_ns

    def _fail_batch(self, batch: list[Ticket], error: EdgeServerError, start_ns: int) -> None:
        """Answer a batch with its error, and release its tickets."""
        self._fail(batch, error, start_ns)
        try:
            # First, because released tickets let other batches run, which must not start on a lost GPU.
            if self.on_failure is not None:
                self.on_failure(error)
        finally:
            self._scheduler.release(batch)

    def _fail(self, batch: Sequence[Ticket], error: EdgeServerError, start_ns: int) -> None:
        now_ns = time.monotonic_ns()
        _split_run_time(batch, now_ns - start_ns)
        for ticket in batch:
            if (trace := ticket.request.trace) is not None:
                trace.record_computation(start_ns, start_ns, now_ns, now_ns)
            if ticket.claim():
                self._counters.record_failure(error, ticket.arrived_ns, now_ns, in_backend=True)
                ticket.send_final(ticket.failure(error))

    def _as_small_error(self, error: BaseException) -> EdgeServerError:
        """Return the error for the caller without its traceback, whose frames would keep the batch's tensors."""
        if isinstance(error, EdgeServerError):
            return error.detached()
        name = self._spec.name
        log.error("model '%s': a batch failed in a way that its backend does not know", name, exc_info=error)
        # Log handlers may keep the record, and with it the traceback.
        traceback.clear_frames(error.__traceback__)
        return BackendError(f"model '{name}' failed: {type(error).__name__}: {error}")

    def _execute_requests(self, session: RequestSession, batch: list[Ticket]) -> None:
        group = _Group(sum(ticket.item_count for ticket in batch), time.monotonic_ns(), self._spec.is_decoupled)
        executions = [LiveExecution(ticket, group, self._plan, self._counters, self._scheduler) for ticket in batch]
        inline = self.inline
        began_ns = 0 if inline is None else inline.begin()
        try:
            session.execute(self._session_inputs(batch, executions))
            if inline is not None:
                inline.end(time.monotonic_ns() - group.start_ns, began_ns)
        except BaseException as error:  # noqa: BLE001 - where a batch fails, by sys.exit() or asyncio's too
            small = self._as_small_error(error)
            for execution in executions:
                execution.fail(small)
            if self.on_failure is not None:
                self.on_failure(small)

    def _session_inputs(self, batch: list[Ticket], executions: list[LiveExecution]) -> Sequence[Execution]:
        """Return the inputs for the session; a subclass may add to them."""
        return executions


def _may_be_of_one_request(error: EdgeServerError) -> bool:
    """Return whether a batch may have failed because of the values in one of its requests: not for lack of memory, by a
    lost device, or in a way that other inputs do not change."""
    return type(error) is BackendError and classify_gpu_fault(error) is None


def _split_run_time(batch: Sequence[Ticket], run_ns: int) -> None:
    """Give each ticket that was charged its part of the run time."""
    for ticket in batch:
        if ticket.charged_s:
            break
    else:
        return
    item_s = run_ns / 1e9 / sum(ticket.item_count for ticket in batch)
    for ticket in batch:
        ticket.took_s = item_s * ticket.item_count


class _Group:
    """State shared by the executions of one batch: when it began, and which request counts the execution."""

    __slots__ = ("_uncounted", "is_decoupled", "item_count", "start_ns")

    def __init__(self, item_count: int, start_ns: int, is_decoupled: bool) -> None:
        self.item_count = item_count
        self.start_ns = start_ns
        self.is_decoupled = is_decoupled
        self._uncounted = threading.Lock()

    def executions(self) -> int:
        """1 for the first of the batch's requests to be counted, 0 for the others."""
        return 1 if self._uncounted.acquire(blocking=False) else 0


class LiveExecution:
    """One ticket as a RequestSession sees it; see backends.base.Execution. Responses after the end of the stream, or
    after the caller cancelled the request, are dropped. A response that does not match the model's outputs ends the
    stream with an error."""

    __slots__ = ("_closing", "_counters", "_group", "_last_ns", "_plan", "_scheduler", "_ticket", "request")

    def __init__(
        self, ticket: Ticket, group: _Group, plan: BatchPlan, counters: VersionCounters, scheduler: Scheduler
    ) -> None:
        self.request: Request = ticket.request
        self._ticket = ticket
        self._group = group
        self._plan = plan
        self._counters = counters
        self._scheduler = scheduler
        self._closing = threading.Lock()
        self._last_ns = group.start_ns

    def is_cancelled(self) -> bool:
        return self._ticket.is_closed

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        if self._closing.locked():
            return
        try:
            tensors = self._plan.answer(outputs, self.request)
        except EdgeServerError as error:
            # Not raised: the backend's thread may serve other streams and could not handle it.
            self.fail(error)
            return
        if (trace := self.request.trace) is not None:
            trace.record_outputs(tensors)
        response = self._response(tensors, is_final=is_final)
        response.parameters = parameters
        if is_final:
            self._close(response)
        elif self._ticket.send(response):
            self._count_response(is_empty=False)

    def finish(self) -> None:
        response = self._response(())
        response.is_empty = True
        self._close(response)

    def reschedule(self) -> None:
        sequence = self._plan.spec.sequence
        if sequence is None or not sequence.is_iterative:
            name = self._plan.spec.name
            self.fail(BackendError(f"model '{name}' is to run a request again, but {NOT_ITERATIVE}"))
            return
        if not self._closing.acquire(blocking=False):
            return
        self._charge_time()
        self._count_run([], 0)
        self._scheduler.run_again(self._ticket)

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        if not is_final:
            # An error that does not end the stream.
            response = self._response((), is_final=False)
            response.error = error.detached()
            if not self._closing.locked() and self._ticket.send(response):
                self._count_response(is_empty=False, has_failed=True)
            return
        if not self._closing.acquire(blocking=False):
            return
        self._charge_time()
        if self._ticket.claim():
            small = error.detached()
            self._counters.record_failure(small, self._ticket.arrived_ns, time.monotonic_ns(), in_backend=True)
            self._count_response(is_empty=False, has_failed=True)
            self._ticket.send_final(self._ticket.failure(small))
        self._scheduler.release([self._ticket])

    def _close(self, response: Response) -> None:
        if not self._closing.acquire(blocking=False):
            return
        ticket = self._ticket
        self._charge_time()
        if ticket.claim():
            self._count_run((ticket.arrived_ns,), ticket.item_count)
            self._count_response(is_empty=response.is_empty)
            ticket.send_final(response)
        self._scheduler.release([ticket])

    def _charge_time(self) -> None:
        """Add this request's part of the time since the batch began to its charge and its trace."""
        if (trace := self.request.trace) is not None:
            start_ns, now_ns = self._group.start_ns, time.monotonic_ns()
            trace.record_computation(start_ns, start_ns, now_ns, now_ns)
        if self._ticket.charged_s:
            since_ns = time.monotonic_ns() - self._group.start_ns
            # For an iterative model, `took_s` already has the time of earlier runs.
            self._ticket.took_s += since_ns / 1e9 * self._ticket.item_count / self._group.item_count

    def _response(self, outputs: tuple[Tensor, ...], *, is_final: bool = True) -> Response:
        request, group = self.request, self._group
        return Response(
            request.model, self._ticket.version, request.id, outputs, NO_PARAMETERS, None, is_final, self._plan.spec,
            group.start_ns, group.item_count,
        )  # fmt: skip

    def _count_run(self, arrivals_ns: Sequence[int], item_count: int) -> None:
        group = self._group
        now_ns = time.monotonic_ns()
        self._counters.record_batch(
            arrivals_ns,
            item_count,
            group.item_count,
            group.start_ns,
            group.start_ns,
            now_ns,
            now_ns,
            executions=group.executions(),
        )

    def _count_response(self, *, is_empty: bool, has_failed: bool = False) -> None:
        if not self._group.is_decoupled:
            return
        now_ns = time.monotonic_ns()
        ticket = self._ticket
        self._counters.record_response(
            ticket.sent_count, now_ns - self._last_ns, is_empty=is_empty, has_failed=has_failed
        )
        self._last_ns = now_ns
        if not ticket.sent_count:
            self._counters.record_first_response(now_ns - ticket.arrived_ns)
        ticket.sent_count += 1
