"""Classes pb_utils.InferenceResponse and ResponseSender: the responses of a Python model, and their way to the
client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from edge_server.core.request_response import NO_PARAMETERS, Parameter
from edge_server.errors import BackendError, WrongOutput
from edge_server.plugins.python_models.error_translation import TritonError, TritonModelException
from edge_server.plugins.python_models.tensor import PbTensor, plain

COMPLETE_FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""


def checked_parameters(given: Any, owner: str) -> Mapping[str, Parameter]:
    """Return parameters, given as a dict or as JSON text. Raises TritonModelException for values of a wrong type."""
    if not given:
        return NO_PARAMETERS
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise TritonModelException(f"parameters of {owner}: expected a dict, got {type(given).__name__}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise TritonModelException(
                f"parameters of {owner}: expected names with a str, int, float or bool each, "
                f"got {key!r} with {type(value).__name__}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise TritonModelException(
                f"parameters of {owner}: expected integers of 64 bits, got {key!r} with {value:#x}"
            )
    return {plain(key): plain(value) for key, value in found.items()}


class InferenceResponse:
    """One response: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self, output_tensors: Iterable[PbTensor] = (), error: TritonError | None = None, parameters: Any = None
    ) -> None:
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if not isinstance(tensor, PbTensor):
                raise TypeError(f"output_tensors: expected Tensor objects, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error: expected a TritonError, got {type(error).__name__}")
        self._error = error
        self._parameters = checked_parameters(parameters, "an InferenceResponse")

    @classmethod
    def received(
        cls, tensors: Sequence[PbTensor], error: TritonError | None, parameters: Mapping[str, Parameter]
    ) -> InferenceResponse:
        response = cls.__new__(cls)
        response._tensors, response._error, response._parameters = list(tensors), error, parameters
        return response

    def output_tensors(self) -> list[PbTensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON text."""
        return json.dumps(dict(self._parameters))

    @property
    def parameter_map(self) -> Mapping[str, Parameter]:
        """The parameters. Of the server, not of Triton's API."""
        return self._parameters


class ResponseTarget:
    """Receiver of the responses to one request. It is closed by the final response."""

    def __init__(
        self,
        send: Callable[[InferenceResponse | None, bool], None],
        fail: Callable[[str, type[BackendError]], None],
        is_cancelled: Callable[[], bool],
        *,
        is_decoupled: bool,
        run_again: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._fail = fail
        self.is_cancelled = is_cancelled
        self.is_decoupled = is_decoupled
        self._run_again = run_again
        self.is_closed = False
        self.has_sender = False

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send one response, or only the final flag. Raises TritonModelException for a call that the rules forbid."""
        if self.is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. flags: expected 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL, got {flags!r}"
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"Unable to send response. Expected an InferenceResponse, got {type(response).__name__}"
            )
        is_final = flags == COMPLETE_FINAL
        if response is None and not is_final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if not self.is_decoupled:
            if response is None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
            # The only response of a model that is not decoupled is final, whatever its flags are.
            is_final = True
        self.is_closed = is_final
        self._send(response, is_final)

    def fail(self, text: str, error_type: type[BackendError] = BackendError) -> None:
        """Send an error of the server's own, and close."""
        if not self.is_closed:
            self.is_closed = True
            self._fail(text, error_type)

    @property
    def may_run_again(self) -> bool:
        """Whether the model is iterative, so that the request may be rescheduled."""
        return self._run_again is not None

    def run_again(self) -> None:
        """Reschedule the request. This target is closed; the rescheduled request gets a new one."""
        if not self.is_closed and self._run_again is not None:
            self.is_closed = True
            self._run_again()

    def abandon(self) -> None:
        """Fail the request of a model that will never answer it."""
        self.fail("the model let go of the request without a final response", WrongOutput)


class ResponseSender:
    """Sends any number of responses to one request, from any thread.

    A sender that is dropped before its final response fails the request, so that the client does not wait forever.
    """

    __slots__ = ("_reply",)

    def __init__(self, reply: ResponseTarget) -> None:
        self._reply = reply
        reply.has_sender = True

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        reply = self._reply
        if not reply.is_decoupled and reply.is_closed and response is None and flags == COMPLETE_FINAL:
            # Many models send the final flag in a second call. The first response was final already.
            return
        reply.send(response, flags)

    def is_cancelled(self) -> bool:
        return self._reply.is_cancelled()

    def __del__(self) -> None:
        self._reply.abandon()
