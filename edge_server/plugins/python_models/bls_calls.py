"""Calls from Python models to other models and to the model control API (Triton's business logic scripting).

Calls go through the server's InferenceService, so queues, batching, statistics and limits apply to them.

A call made within `execute` belongs to the batch that runs: it is cancelled when all requests of the batch are
cancelled, and it has the latest of their deadlines if all of them have one. A call from a thread that the model started
itself belongs to no batch.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from edge_server.backends.base import BlsCall, ServerCalls
from edge_server.backends.deadlock_check import deadlock_message, models_to_wait_for
from edge_server.backends.running_batch import RunningBatch, current_batch
from edge_server.core.request_response import NO_PARAMETERS, Request, Response
from edge_server.errors import EdgeServerError, NotFound
from edge_server.plugins.python_models.error_translation import TritonError, TritonModelException, to_triton_error
from edge_server.plugins.python_models.model_context import CallingModel, find_calling_model
from edge_server.plugins.python_models.response import InferenceResponse
from edge_server.plugins.python_models.tensor import PbTensor

_CHECK_S = 0.05
"""Interval of the checks of a waiting call: is its batch cancelled, is it part of a deadlock?"""


class OutgoingCall:
    """One request to another model, from its creation to its last response."""

    def __init__(
        self,
        caller: CallingModel | None,
        model: str,
        version: int | None,
        outputs: Sequence[str],
        make_request: Callable[[int], Request],
    ) -> None:
        """`make_request` builds the server's request from a deadline in nanoseconds, 0 for none.

        Raises TritonModelException outside of a served model, and in a model that runs on request threads.
        """
        caller = caller or find_calling_model()
        if caller is None:
            raise TritonModelException("other models can be called from a model that a server runs, nowhere else")
        self.caller: CallingModel = caller
        self.server: ServerCalls = caller.find_server("other models can be called")
        self.batch: RunningBatch | None = current_batch.get()
        _check_may_call_models(caller, self.batch)
        self.model = model
        self.call: BlsCall | None = None
        self._holds_instance = self.batch is not None and self.batch.holds_instance and caller.wait_graph is not None
        self._version = version
        self._outputs = outputs
        self._make_request = make_request
        self._is_over = False
        self._waits_for: tuple[str, ...] = (self.model,)
        """The models that this call waits for. A call to an ensemble waits for the ensemble's members."""

    def start(self, sink: Callable[[Response], None], *, decoupled: bool, hold_us: float) -> TritonError | None:
        """Submit the request. Return an error if that is impossible; `sink` is not called then."""
        try:
            called = self.server.find(self.model, self._version)
            spec = called.spec
            if spec.ensemble is not None and self._holds_instance:
                self._waits_for = models_to_wait_for(self.server, spec, self._outputs)
            if spec.is_decoupled and not decoupled:
                raise EdgeServerError(
                    f"model '{self.model}' answers any number of times: call it with exec(decoupled=True) or "
                    "async_exec(decoupled=True)"
                )
            request = self._make_request(0 if self.batch is None else self.batch.deadline_ns)
        except EdgeServerError as error:
            return to_triton_error(error)
        except ValueError as error:
            return TritonError(f"a request to model '{self.model}' cannot be sent: {error}", TritonError.INVALID_ARG)
        if self._holds_instance and self.caller.wait_graph is not None:
            for model in self._waits_for:
                self.caller.wait_graph.add_wait(self.caller, model)
        if self.is_deadlocked():
            self.end()
            return self.deadlock_error()

        def receive(response: Response) -> None:
            if response.is_final:
                self.end()
            sink(response)

        try:
            self.call = called.submit(request, receive, hold_us=hold_us)
        except EdgeServerError as error:
            self.end()
            return to_triton_error(error.detached())
        return None

    def is_cancelled(self) -> bool:
        """Return whether all requests of the batch that this call belongs to are cancelled."""
        return self.batch is not None and self.batch.is_cancelled()

    def is_deadlocked(self) -> bool:
        """Return whether the called model waits, directly or through others, for the instance that waits here."""
        graph = self.caller.wait_graph
        return self._holds_instance and graph is not None and any(graph.is_deadlocked(name) for name in self._waits_for)

    def deadlock_error(self) -> TritonError:
        return TritonError(deadlock_message(self.caller.model, self.model, self._waits_for))

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def end(self) -> None:
        if self._holds_instance and not self._is_over and self.caller.wait_graph is not None:
            self._is_over = True
            for model in self._waits_for:
                self.caller.wait_graph.remove_wait(self.caller, model)


def call_model(outgoing: OutgoingCall, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Send the call and wait. Return the response, or with `decoupled` an iterator of responses at once."""
    responses = ResponseIterator(outgoing)
    # With one response to come this thread would only wait, so the server may run the called model on it.
    problem = outgoing.start(responses.receive, decoupled=decoupled, hold_us=0.0 if decoupled else math.inf)
    if problem is not None:
        responses.fail(problem)
    return responses if decoupled else next(responses)


def call_model_async(
    loop: asyncio.AbstractEventLoop, outgoing: OutgoingCall, decoupled: bool
) -> Awaitable[InferenceResponse | ResponseIterator]:
    """Send the call and return a future of `loop` for the response, or with `decoupled` for the iterator."""
    future: asyncio.Future[InferenceResponse | ResponseIterator] = loop.create_future()
    if decoupled:
        future.set_result(call_model(outgoing, True))
        return future

    def set_response(response: InferenceResponse) -> None:
        if not future.done():
            future.set_result(response)

    def receive(response: Response) -> None:
        if response.is_final:
            try:
                loop.call_soon_threadsafe(set_response, to_pb_response(response))
            except RuntimeError:
                # The loop is closed: the future has no reader any more.
                return

    def check() -> None:
        if future.done():
            if future.cancelled():
                outgoing.cancel()
            return
        if outgoing.is_deadlocked():
            set_response(InferenceResponse(error=outgoing.deadlock_error()))
            outgoing.cancel()
            return
        if outgoing.is_cancelled():
            outgoing.cancel()
        loop.call_later(_CHECK_S, check)

    problem = outgoing.start(receive, decoupled=False, hold_us=0.0)
    if problem is not None:
        set_response(InferenceResponse(error=problem))
    else:
        loop.call_later(_CHECK_S, check)
    return future


class ResponseIterator:
    """The responses of a decoupled model, each as soon as it arrives.

    A model that ends its stream by the final flag alone adds a last response with neither tensors nor an error, as in
    Triton (python_backend f9088ff, request_executor.cc, InferResponseComplete).

    `cancel` cancels the request. Dropping the iterator before its end does the same.
    """

    def __init__(self, outgoing: OutgoingCall) -> None:
        self._outgoing = outgoing
        self._arrived: queue.SimpleQueue[Response | TritonError] = queue.SimpleQueue()
        self.receive = self._arrived.put
        self._is_over = False
        self._next_check_s = time.monotonic() + _CHECK_S

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        item = self._wait_for_next()
        if isinstance(item, TritonError):
            self._is_over = True
            return InferenceResponse(error=item)
        self._is_over = item.is_final
        return to_pb_response(item)

    def cancel(self) -> None:
        """Cancel the request. Responses that arrived before can still be iterated."""
        self._outgoing.cancel()

    def fail(self, error: TritonError) -> None:
        self._arrived.put(error)

    def _wait_for_next(self) -> Response | TritonError:
        while True:
            now = time.monotonic()
            if now >= self._next_check_s:
                self._next_check_s = now + _CHECK_S
                if self._outgoing.is_deadlocked():
                    self._outgoing.cancel()
                    return self._outgoing.deadlock_error()
                if self._outgoing.is_cancelled():
                    self._outgoing.cancel()
            try:
                return self._arrived.get(timeout=_CHECK_S)
            except queue.Empty:
                continue

    def __del__(self) -> None:
        if not self._is_over:
            self._outgoing.cancel()


def to_pb_response(response: Response) -> InferenceResponse:
    """Convert a response of the server into the class that models see."""
    if response.error is not None:
        return InferenceResponse.received((), to_triton_error(response.error), response.parameters)
    tensors = [
        PbTensor.received(item.name, item.dtype, item.array, is_lent=not item.array.flags.writeable)
        for item in response.outputs
    ]
    return InferenceResponse.received(tensors, None, response.parameters or NO_PARAMETERS)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and wait for it. `files` maps "file:1/model.onnx" to contents.

    Raises TritonModelException when the load fails, or when the model control mode is not explicit.
    """
    named = {name.removeprefix("file:"): contents for name, contents in (files or {}).items()}
    try:
        _model_control().load_model(model_name, config or None, named)
    except EdgeServerError as error:
        raise TritonModelException(error.message) from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Raises TritonModelException when the model control mode is not explicit."""
    try:
        _model_control().unload_model(model_name, unload_dependents=unload_dependents)
    except EdgeServerError as error:
        raise TritonModelException(error.message) from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether the model, or the given version of it, can answer requests now."""
    if model_version and not str(model_version).isdecimal():
        raise TritonModelException(f"is_model_ready: expected a version number as text, got '{model_version}'")
    try:
        return _model_control().is_model_ready(model_name, int(model_version) if model_version else None)
    except NotFound:
        return False


def _check_may_call_models(caller: CallingModel, batch: RunningBatch | None) -> None:
    """Raise TritonModelException in the `execute` of a model that runs on request threads."""
    if batch is not None and not caller.may_call_models:
        raise TritonModelException(
            f"model '{caller.model}' executes on the threads that bring its requests, where it must not wait for other "
            'models; the parameter execution_thread: "own" gives it a thread of its own'
        )


def _model_control() -> ServerCalls:
    caller = find_calling_model()
    if caller is None:
        raise TritonModelException("models can be loaded from a model that a server runs, nowhere else")
    server = caller.find_server("models can be loaded")
    _check_may_call_models(caller, current_batch.get())
    return server
