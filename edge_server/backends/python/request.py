"""pb_utils.InferenceRequest: a request to a model, or from a model to another one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_server.backends.base import NOT_ITERATIVE
from edge_server.backends.python.calling_model import find_host
from edge_server.backends.python.error_translation import TritonModelException
from edge_server.backends.python.plain_values import plain
from edge_server.backends.python.response import InferenceResponse, ResponseSender, ResponseTarget, checked_parameters
from edge_server.backends.python.tensor import PbTensor
from edge_server.core.request_response import Parameter, Request, SequenceStep
from edge_server.core.trace_settings import RequestTrace

if TYPE_CHECKING:
    from edge_server.backends.python.bls_calls import ResponseIterator
    from edge_server.backends.python.calling_model import Host

SEQUENCE_START = 1
SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2

_INT64_MAX = 2**63 - 1
_UINT64_MAX = 2**64 - 1


class PreferredMemory:
    """Where a model would like the outputs of another; all memory here is the CPU's."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2

    def __init__(self, preferred_memory_type: int = 0, preferred_device_id: int = 0) -> None:
        self._type = preferred_memory_type
        self._device = preferred_device_id


class InferenceTrace:
    """The trace of a request; of most there is none. Handed to the requests that a model makes, it becomes theirs."""

    def __init__(self, core: RequestTrace | None = None) -> None:
        self.core = core

    def get_context(self) -> str | None:
        """Return the W3C trace context as JSON, {"traceparent": ...}; None unless spans are made of the trace."""
        return None if self.core is None else self.core.context()


class InferenceRequest:
    """Given to `execute`, or made by a model to ask another one with `exec` or `async_exec`."""

    __slots__ = (
        "_correlation_id", "_flags", "_host", "_inputs", "_model_name", "_model_version", "_outputs", "_parameters",
        "_preferred_memory", "_reply", "_request_id", "_sender", "_timeout", "_trace", "comes_again",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[PbTensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Any = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("an InferenceRequest needs inputs, requested_output_names and model_name")
        self._request_id: str = _of(str, request_id, "request_id")
        self._correlation_id = _correlation_id(correlation_id)
        self._inputs = [_of(PbTensor, item, "inputs") for item in inputs]
        self._outputs = tuple(_of(str, name, "requested_output_names") for name in requested_output_names)
        self._model_name: str = _of(str, model_name, "model_name")
        self._model_version: int = _of(int, model_version, "model_version")
        self._timeout = _in_range(timeout, "timeout", _INT64_MAX)
        self._preferred_memory = preferred_memory or PreferredMemory()
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters, f"a request to model '{model_name}'")
        self._host = find_host()
        self._reply: ResponseTarget | None = None
        self._sender: ResponseSender | None = None
        self.comes_again = False
        self.set_flags(flags)

    @classmethod
    def received(
        cls,
        request: Request,
        inputs: list[PbTensor],
        outputs: tuple[str, ...],
        version: int,
        host: Host,
        reply: ResponseTarget,
    ) -> InferenceRequest:
        """Return the pb_utils request for `request`."""
        mine = cls.__new__(cls)
        mine._request_id, mine._inputs, mine._outputs = request.id, inputs, outputs
        mine._model_name, mine._model_version = host.model, version
        step = request.sequence
        mine._correlation_id = 0 if step is None else step.id
        mine._flags = 0 if step is None else SEQUENCE_START * step.is_start + SEQUENCE_END * step.is_end
        mine._timeout, mine._parameters = request.timeout_us, request.parameters
        mine._preferred_memory = _ANYWHERE
        mine._trace = _UNTRACED if request.trace is None else InferenceTrace(request.trace)
        mine._host, mine._reply, mine._sender, mine.comes_again = host, reply, None, False
        return mine

    def inputs(self) -> list[PbTensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the request's sequence, 0 when it is in none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, or-ed."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = _in_range(flags, "flags", SEQUENCE_START | SEQUENCE_END)

    def timeout(self) -> int:
        """Return the request's time-out in microseconds, 0 for none."""
        return self._timeout

    def preferred_memory(self) -> PreferredMemory:
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return self._trace

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return json.dumps(dict(self._parameters))

    def is_cancelled(self) -> bool:
        return self._received().is_cancelled()

    def get_response_sender(self) -> ResponseSender:
        if self._sender is None:
            self._sender = ResponseSender(self._received())
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Say what becomes of the request when `execute` returns: TRITONSERVER_REQUEST_RELEASE_ALL, which is what
        happens anyway, or _RESCHEDULE to be given it once more, with its next batch.

        `execute` then returns None for it, and what it sends before that is not final. The response sender is good for
        this time alone; the request that comes again has its own.
        """
        reply = self._received()
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                "request release flags: expected TRITONSERVER_REQUEST_RELEASE_ALL or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags!r}"
            )
        if flags == RELEASE_RESCHEDULE and not reply.may_run_again:
            raise TritonModelException(
                f"request release flags: model '{self._model_name}' cannot reschedule, {NOT_ITERATIVE}"
            )
        self.comes_again = flags == RELEASE_RESCHEDULE

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Have the model answer, and wait: for the response, or with `decoupled` for each as it is iterated.

        What goes wrong is the response's error; nothing is raised.
        """
        from edge_server.backends.python.bls_calls import call

        return call(self, decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Begin at once, and return what to await. Call it in a coroutine."""
        from edge_server.backends.python.bls_calls import call_later

        return call_later(self, decoupled)

    # What follows is the server's, not of Triton's API.

    @property
    def host(self) -> Host | None:
        return self._host

    @property
    def version(self) -> int | None:
        return None if self._model_version < 0 else self._model_version

    @property
    def reply(self) -> ResponseTarget:
        return self._received()

    @property
    def parameter_map(self) -> Mapping[str, Parameter]:
        return self._parameters

    def core(self, deadline_ns: int) -> Request:
        """Return the request as the server takes it. Raises ValueError for a tensor of strange elements."""
        sequence = None
        if self._correlation_id:
            is_start, is_end = bool(self._flags & SEQUENCE_START), bool(self._flags & SEQUENCE_END)
            sequence = SequenceStep(self._correlation_id, is_start, is_end)
        return Request(
            self._model_name,
            {tensor.name(): tensor.core() for tensor in self._inputs},
            self.version,
            self._request_id,
            self._outputs,
            self._parameters,
            timeout_us=self._timeout,
            sequence=sequence,
            deadline_ns=deadline_ns,
            trace=None if self._trace.core is None else self._trace.core.child(),
        )

    def _received(self) -> ResponseTarget:
        if self._reply is None:
            raise TritonModelException("this request was made by the model, not received; it has nobody to answer")
        return self._reply


_ANYWHERE = PreferredMemory()
_UNTRACED = InferenceTrace()


def _of(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    if isinstance(value, str):
        return plain(value)
    return plain(value) if isinstance(value, int) else value


def _in_range(value: Any, name: str, most: int) -> int:
    number: int = _of(int, value, name)
    if not 0 <= number <= most:
        raise TypeError(f"{name}: expected 0 to {most}, got {number}")
    return number


def _correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    return _in_range(value, "correlation_id", _UINT64_MAX)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> PbTensor | None:
    """Return the input of that name, None when the request has none."""
    return _named(request.inputs(), name)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> PbTensor | None:
    """Return the output of that name, None when the response has none."""
    return _named(response.output_tensors(), name)


def _named(tensors: Iterable[PbTensor], name: str) -> PbTensor | None:
    for tensor in tensors:
        if tensor.name() == name:
            return tensor
    return None
