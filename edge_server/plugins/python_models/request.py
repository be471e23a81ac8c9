"""Class pb_utils.InferenceRequest: a request that a Python model receives, or that it sends to another model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from edge_server.backends.base import NOT_ITERATIVE
from edge_server.core.request_response import Parameter, Request, SequenceStep
from edge_server.core.trace_settings import RequestTrace
from edge_server.plugins.python_models.bls_calls import OutgoingCall, ResponseIterator, call_model, call_model_async
from edge_server.plugins.python_models.error_translation import TritonModelException
from edge_server.plugins.python_models.model_context import CallingModel, find_calling_model
from edge_server.plugins.python_models.response import (
    InferenceResponse,
    ResponseSender,
    ResponseTarget,
    checked_parameters,
)
from edge_server.plugins.python_models.tensor import PbTensor, plain

SEQUENCE_START = 1
SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2

_INT64_MAX = 2**63 - 1
_UINT64_MAX = 2**64 - 1


class PreferredMemory:
    """pb_utils.PreferredMemory: the memory that a caller prefers for outputs. Accepted and ignored: outputs are in CPU
    memory."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2

    def __init__(self, preferred_memory_type: int = 0, preferred_device_id: int = 0) -> None:
        self._type = preferred_memory_type
        self._device = preferred_device_id


class InferenceTrace:
    """pb_utils.InferenceTrace: the trace of a request, if it is traced. A model passes it to the requests that it
    sends."""

    def __init__(self, core: RequestTrace | None = None) -> None:
        self.core = core

    def get_context(self) -> str | None:
        """Return the W3C trace context as JSON, {"traceparent": ...}; None if the trace makes no spans."""
        return None if self.core is None else self.core.context()


class InferenceRequest:
    """A request that `execute` receives, or that a model creates and sends with `exec` or `async_exec`."""

    __slots__ = (
        "_caller",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_outputs",
        "_parameters",
        "_preferred_memory",
        "_request_id",
        "_sender",
        "_target",
        "_timeout",
        "_trace",
        "is_rescheduled",
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
        self._request_id: str = _checked(str, request_id, "request_id")
        self._correlation_id = _checked_correlation_id(correlation_id)
        self._inputs = [_checked(PbTensor, item, "inputs") for item in inputs]
        self._outputs = tuple(_checked(str, name, "requested_output_names") for name in requested_output_names)
        self._model_name: str = _checked(str, model_name, "model_name")
        self._model_version: int = _checked(int, model_version, "model_version")
        self._timeout = _in_range(timeout, "timeout", _INT64_MAX)
        self._preferred_memory = preferred_memory or PreferredMemory()
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters, f"a request to model '{model_name}'")
        self._caller = find_calling_model()
        self._target: ResponseTarget | None = None
        self._sender: ResponseSender | None = None
        self.is_rescheduled = False
        self.set_flags(flags)

    @classmethod
    def received(
        cls,
        request: Request,
        inputs: list[PbTensor],
        outputs: tuple[str, ...],
        version: int,
        caller: CallingModel,
        target: ResponseTarget,
    ) -> InferenceRequest:
        """Return the object that `execute` receives for a request of the server."""
        mine = cls.__new__(cls)
        mine._request_id, mine._inputs, mine._outputs = request.id, inputs, outputs
        mine._model_name, mine._model_version = caller.model, version
        step = request.sequence
        mine._correlation_id = 0 if step is None else step.id
        mine._flags = 0 if step is None else SEQUENCE_START * step.is_start + SEQUENCE_END * step.is_end
        mine._timeout, mine._parameters = request.timeout_us, request.parameters
        mine._preferred_memory = _ANY_MEMORY
        mine._trace = _UNTRACED if request.trace is None else InferenceTrace(request.trace)
        mine._caller, mine._target, mine._sender, mine.is_rescheduled = caller, target, None, False
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
        """Return the id of the request's sequence, 0 if it belongs to none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the bitwise or of TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
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
        return self.target.is_cancelled()

    def get_response_sender(self) -> ResponseSender:
        if self._sender is None:
            self._sender = ResponseSender(self.target)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Set the server's action after `execute`: TRITONSERVER_REQUEST_RELEASE_ALL, the default, or _RESCHEDULE.

        A rescheduled request runs again with the model's next batch. `execute` returns None for it and sends no final
        response before. The request has a new response sender in the next batch.
        """
        target = self.target
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                "request release flags: expected TRITONSERVER_REQUEST_RELEASE_ALL or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags!r}"
            )
        if flags == RELEASE_RESCHEDULE and not target.may_run_again:
            raise TritonModelException(
                f"request release flags: model '{self._model_name}' cannot reschedule, {NOT_ITERATIVE}"
            )
        self.is_rescheduled = flags == RELEASE_RESCHEDULE

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request and wait for the response; with `decoupled`, return an iterator that waits for each one.

        Errors of the called model are in the response.
        """
        return call_model(self._outgoing_call(), decoupled)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Send the request at once, and return an awaitable for the result of `exec`. Call it in a coroutine."""
        return call_model_async(asyncio.get_running_loop(), self._outgoing_call(), decoupled)

    def _outgoing_call(self) -> OutgoingCall:
        version = None if self._model_version < 0 else self._model_version
        return OutgoingCall(self._caller, self._model_name, version, self._outputs, self.to_server_request)

    # The rest is of the server, not of Triton's API.

    @property
    def target(self) -> ResponseTarget:
        """The receiver of the responses. Raises TritonModelException for a request that the model created."""
        if self._target is None:
            raise TritonModelException("this request was made by the model, not received; it has nobody to answer")
        return self._target

    @property
    def parameter_map(self) -> Mapping[str, Parameter]:
        return self._parameters

    def to_server_request(self, deadline_ns: int) -> Request:
        """Convert it to a request of the server. Raises ValueError for an object array of other types than text."""
        sequence = None
        if self._correlation_id:
            is_start, is_end = bool(self._flags & SEQUENCE_START), bool(self._flags & SEQUENCE_END)
            sequence = SequenceStep(self._correlation_id, is_start, is_end)
        return Request(
            self._model_name,
            {tensor.name(): tensor.to_server_tensor() for tensor in self._inputs},
            None if self._model_version < 0 else self._model_version,
            self._request_id,
            self._outputs,
            self._parameters,
            timeout_us=self._timeout,
            sequence=sequence,
            deadline_ns=deadline_ns,
            trace=None if self._trace.core is None else self._trace.core.new_child(),
        )


_ANY_MEMORY = PreferredMemory()
_UNTRACED = InferenceTrace()


def _checked(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    if isinstance(value, str):
        return plain(value)
    return plain(value) if isinstance(value, int) else value


def _in_range(value: Any, name: str, most: int) -> int:
    number: int = _checked(int, value, name)
    if not 0 <= number <= most:
        raise TypeError(f"{name}: expected 0 to {most}, got {number}")
    return number


def _checked_correlation_id(value: Any) -> int | str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TritonModelException("Correlation ID must be integer or string")
    return _in_range(value, "correlation_id", _UINT64_MAX)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> PbTensor | None:
    """Return the input of that name, None if the request has none."""
    return _named(request.inputs(), name)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> PbTensor | None:
    """Return the output of that name, None if the response has none."""
    return _named(response.output_tensors(), name)


def _named(tensors: Iterable[PbTensor], name: str) -> PbTensor | None:
    for tensor in tensors:
        if tensor.name() == name:
            return tensor
    return None
