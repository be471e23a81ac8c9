"""BLS calls: a Python model calls other models through the server, with queues, batches and limits.

What a model asks within `execute` belongs to the requests that it works on: it is taken back when all of these are
cancelled, and has the latest of their deadlines, if all have one. Threads that a model starts have no such context;
what they ask is nobody's but theirs.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from edge_server.backends.base import BlsCall, ServerCalls
from edge_server.backends.python.call_graph import models_behind
from edge_server.backends.python.calling_model import Batch, Host, current_batch, find_host
from edge_server.backends.python.error_translation import TritonError, TritonModelException, answer_of
from edge_server.backends.python.request import InferenceRequest
from edge_server.backends.python.response import InferenceResponse
from edge_server.backends.python.tensor import PbTensor
from edge_server.core.request_response import NO_PARAMETERS, Request, Response
from edge_server.errors import EdgeServerError, NotFound

_LOOK_S = 0.05
"""How often a waiting call looks whether anybody still wants its answer, or whether it waits for itself."""


class Outgoing:
    """One request to another model, from its making to its last response."""

    def __init__(self, request: InferenceRequest) -> None:
        host = request.host or find_host()
        if host is None or host.server is None:
            raise TritonModelException("other models can be called from a model that a server runs, nowhere else")
        self.host: Host = host
        self.server: ServerCalls = host.server
        self.batch: Batch | None = current_batch.get()
        _check_may_wait(host, self.batch)
        self.model = request.model_name()
        self.call: BlsCall | None = None
        self._holds = self.batch is not None and self.batch.holds_instance and host.waits is not None
        self._request = request
        self._is_over = False
        self._behind: tuple[str, ...] = (self.model,)
        """The models that this call waits for: an ensemble waits for its members."""

    def start(self, sink: Callable[[Response], None], *, decoupled: bool, hold_us: float) -> TritonError | None:
        """Submit; or return what is wrong with that, and `sink` is never called."""
        try:
            core = self._core(decoupled)
        except EdgeServerError as error:
            return answer_of(error)
        except ValueError as error:
            return TritonError(f"a request to model '{self.model}' cannot be sent: {error}", TritonError.INVALID_ARG)
        self._begin()
        if self.is_stuck():
            self.end()
            return self.deadlock()

        def take(response: Response) -> None:
            if response.is_final:
                self.end()
            sink(response)

        try:
            self.call = self.server.submit(core, take, hold_us=hold_us)
        except EdgeServerError as error:
            self.end()
            return answer_of(error.detached())
        return None

    def _core(self, decoupled: bool) -> Request:
        spec = self.server.model_spec(self.model, self._request.version)
        if spec.ensemble is not None and self._holds:
            self._behind = models_behind(self.server, spec, self._request.requested_output_names())
        if spec.is_decoupled and not decoupled:
            raise EdgeServerError(
                f"model '{self.model}' answers any number of times: call it with exec(decoupled=True) or "
                "async_exec(decoupled=True)"
            )
        return self._request.core(0 if self.batch is None else self.batch.deadline_ns)

    def is_unwanted(self) -> bool:
        """Return whether nobody waits any more for what this call is part of."""
        return self.batch is not None and self.batch.is_cancelled()

    def is_stuck(self) -> bool:
        """Return whether the called model waits, by whatever way, for the very instance that waits here."""
        waits = self.host.waits
        return self._holds and waits is not None and any(waits.is_stuck(model) for model in self._behind)

    def deadlock(self) -> TritonError:
        return deadlock(self.host.model, self.model, self._behind)

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def _begin(self) -> None:
        if self._holds and self.host.waits is not None:
            for model in self._behind:
                self.host.waits.begin(self.host, model)

    def end(self) -> None:
        if self._holds and not self._is_over and self.host.waits is not None:
            self._is_over = True
            for model in self._behind:
                self.host.waits.end(self.host, model)


def deadlock(model: str, called: str, behind: Sequence[str] = ()) -> TritonError:
    """Return the error for a call that nobody could ever answer. `behind` are the models that it waits for."""
    if called not in (behind or (called,)):
        names = ", ".join(f"'{name}'" for name in behind)
        return TritonError(
            f"model '{model}' called ensemble '{called}', which is made of {names}, but every instance of one of these "
            f"is waiting, by way of such calls, for itself; nobody is left to answer. More instances of it "
            "(instance_group count) help"
        )
    return TritonError(
        f"model '{model}' called model '{called}', but every instance of '{called}' is waiting, by way of such calls, "
        f"for '{called}' itself; nobody is left to answer. More instances of '{called}' (instance_group count) help"
    )


def call(request: InferenceRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Do what `InferenceRequest.exec` promises."""
    outgoing = Outgoing(request)
    responses = ResponseIterator(outgoing)
    # With one response to come, this thread would only wait: it may as well compute.
    problem = outgoing.start(responses.receive, decoupled=decoupled, hold_us=0.0 if decoupled else math.inf)
    if problem is not None:
        responses.fail(problem)
    return responses if decoupled else responses.only()


def call_later(request: InferenceRequest, decoupled: bool) -> Awaitable[InferenceResponse | ResponseIterator]:
    """Do what `InferenceRequest.async_exec` promises."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[InferenceResponse | ResponseIterator] = loop.create_future()
    if decoupled:
        future.set_result(call(request, True))
        return future
    outgoing = Outgoing(request)

    def settle(response: InferenceResponse) -> None:
        if not future.done():
            future.set_result(response)

    def receive(response: Response) -> None:
        if response.is_final:
            try:
                loop.call_soon_threadsafe(settle, response_of(response))
            except RuntimeError:
                # The loop is closed: nobody awaits any more.
                return

    def look() -> None:
        if future.done():
            if future.cancelled():
                outgoing.cancel()
            return
        if outgoing.is_stuck():
            settle(InferenceResponse(error=outgoing.deadlock()))
            outgoing.cancel()
            return
        if outgoing.is_unwanted():
            outgoing.cancel()
        loop.call_later(_LOOK_S, look)

    problem = outgoing.start(receive, decoupled=False, hold_us=0.0)
    if problem is not None:
        settle(InferenceResponse(error=problem))
    else:
        loop.call_later(_LOOK_S, look)
    return future


class ResponseIterator:
    """The responses of a model that answers any number of times, each as it comes.

    A model that ends its stream by the final flag alone makes one more, the last: it has neither tensors nor an error,
    as in Triton (python_backend f9088ff, request_executor.cc, InferResponseComplete).

    `cancel` takes the request back, and so does dropping the iterator before its end.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._arrived: queue.SimpleQueue[Response | TritonError] = queue.SimpleQueue()
        self.receive = self._arrived.put
        self._is_over = False
        self._look_at = time.monotonic() + _LOOK_S

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        item = self._next()
        if isinstance(item, TritonError):
            self._is_over = True
            return InferenceResponse(error=item)
        self._is_over = item.is_final
        return response_of(item)

    def cancel(self) -> None:
        """Take the request back; what was answered before is still there to be iterated."""
        self._outgoing.cancel()

    def fail(self, error: TritonError) -> None:
        self._arrived.put(error)

    def only(self) -> InferenceResponse:
        """Return the one response of a model that gives one; one without tensors where it gave none."""
        return next(self)

    def _next(self) -> Response | TritonError:
        while True:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                if self._outgoing.is_stuck():
                    self._outgoing.cancel()
                    return self._outgoing.deadlock()
                if self._outgoing.is_unwanted():
                    self._outgoing.cancel()
            try:
                return self._arrived.get(timeout=_LOOK_S)
            except queue.Empty:
                continue

    def __del__(self) -> None:
        if not self._is_over:
            self._outgoing.cancel()


def response_of(response: Response) -> InferenceResponse:
    """Return a response of the server as a model sees it."""
    if response.error is not None:
        return InferenceResponse.received((), answer_of(response.error), response.parameters)
    tensors = [
        PbTensor.received(item.name, item.dtype, item.array, is_lent=not item.array.flags.writeable)
        for item in response.outputs
    ]
    return InferenceResponse.received(tensors, None, response.parameters or NO_PARAMETERS)


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and wait for it. `files` maps "file:1/model.onnx" to contents.

    Raises TritonModelException when it does not load, and where models are not loaded by order.
    """
    named = {name.removeprefix("file:"): contents for name, contents in (files or {}).items()}
    try:
        _server().load_model(model_name, config or None, named)
    except EdgeServerError as error:
        raise TritonModelException(error.message) from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model. Raises TritonModelException where models are not unloaded by order."""
    try:
        _server().unload_model(model_name, unload_dependents=unload_dependents)
    except EdgeServerError as error:
        raise TritonModelException(error.message) from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether the model, or a version of it, can answer now."""
    if model_version and not str(model_version).isdecimal():
        raise TritonModelException(f"is_model_ready: expected a version number as text, got '{model_version}'")
    try:
        return _server().is_model_ready(model_name, int(model_version) if model_version else None)
    except NotFound:
        return False


def _check_may_wait(host: Host, batch: Batch | None) -> None:
    """Raise TritonModelException in the `execute` of a model that runs on the threads of front ends."""
    if batch is not None and not host.may_wait:
        raise TritonModelException(
            f"model '{host.model}' executes on the threads that bring its requests, where it must not wait for other "
            'models; the parameter execution_thread: "own" gives it a thread of its own'
        )


def _server() -> ServerCalls:
    host = find_host()
    if host is None or host.server is None:
        raise TritonModelException("models can be loaded from a model that a server runs, nowhere else")
    _check_may_wait(host, current_batch.get())
    return host.server
