"""Exception classes of the server: one for each kind of error that a client or an operator can see. Every error that a
client can see is an EdgeServerError with one of Triton's codes.

HTTP and gRPC status numbers are only in `frontends/error_status.py`. Messages name the model, version and tensor, the
expected value and the given one; of a missing library they say how to install it (`install_hint`). This module imports
nothing of this package.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TypeVar

Error = TypeVar("Error", bound="EdgeServerError")

SUGGESTION = ", did you mean"
"""Begins the end of a message about an unknown name, which has the nearest name."""


def install_hint(extra: str) -> str:
    """Return how to install the libraries of an extra. No package index has edge_server, so it is from a clone; those
    of the Debian packages are chosen when they are built."""
    how = f"pip install '.[{extra}]' in a clone of edge_server, with the Python of this program"
    library = Path(__file__).parents[1]
    if library.name == "lib" and (library.parent / "version").is_file():  # as systemd/build_deb.sh lays it out
        how = f"build the Debian packages with `systemd/build_deb.sh --extras cpu,{extra} OUT`, and install those"
    return f"install the extra {extra}: {how}"


class ErrorCode(enum.Enum):
    """Kind of an error: the codes of TRITONSERVER_Error_Code, plus gRPC's RESOURCE_EXHAUSTED, ABORTED, UNAUTHENTICATED
    and PERMISSION_DENIED."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    ABORTED = "ABORTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"


class EdgeServerError(Exception):
    """An error with a code for programs and a sentence for people.

    `retry_after_s` is None if another try without a change cannot succeed.
    """

    code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        if not message.isascii():
            # Names of files that are not UTF-8 have surrogates, which neither JSON's readers nor gRPC take.
            message = message.encode("utf-8", "backslashreplace").decode("utf-8")
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def detached(self: Error) -> Error:
        """Return itself without traceback, cause and context, because their frames keep objects alive."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class InvalidRequest(EdgeServerError):
    """The request is invalid and cannot succeed without a change."""

    code = ErrorCode.INVALID_ARG


class SequenceNotBegun(InvalidRequest):
    """The request belongs to an unknown sequence and has no START flag."""


class ContextTooLong(InvalidRequest):
    """The prompt has more tokens than the language model can take."""


class BadSchema(InvalidRequest):
    """A JSON schema, or another sampling parameter, that a language model cannot follow, or not within its limits.

    `place` names a part of the request, such as `json_schema.properties.x.pattern`, and `problem` says what is wrong.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place
        self.problem = problem

    def __reduce__(self) -> tuple[type[BadSchema], tuple[str, str]]:
        return BadSchema, (self.place, self.problem)


class NotFound(EdgeServerError):
    """An object named by the caller does not exist."""

    code = ErrorCode.NOT_FOUND


class UnknownModel(NotFound):
    """The model or the version does not exist."""


class Unsupported(EdgeServerError):
    """This server or this model does not support the request."""

    code = ErrorCode.UNSUPPORTED


class Unauthenticated(EdgeServerError):
    """The request needs a valid bearer token and has none."""

    code = ErrorCode.UNAUTHENTICATED


class Forbidden(EdgeServerError):
    """The caller has no permission for this request."""

    code = ErrorCode.PERMISSION_DENIED


class AlreadyExists(EdgeServerError):
    """The name is in use."""

    code = ErrorCode.ALREADY_EXISTS


class Cancelled(EdgeServerError):
    """The caller cancelled the request or disconnected."""

    code = ErrorCode.CANCELLED


class Superseded(EdgeServerError):
    """Another caller took over the resource of this one."""

    code = ErrorCode.ABORTED


class Refusal(EdgeServerError):
    """The request is valid but cannot run now. The same request may succeed later."""

    code = ErrorCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class NotReady(Refusal):
    """The model version exists but is not serving."""


class QueueFull(Refusal):
    """The model's queue is full."""


class DeadlineExceeded(Refusal):
    """The request waited longer than its time limit."""


class DeadlineTooShort(DeadlineExceeded):
    """The response would come after the request's own deadline."""


class Draining(Refusal):
    """The server or the version is stopping and accepts no new requests."""


class Throttled(EdgeServerError):
    """The governor rejected the request because of heat, power or memory, or another resource is exhausted.

    `state` is the governor's state (WARM, HOT, ...) if the governor rejected it, else "".
    """

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float | None = None, state: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.state = state


class ServingFault(EdgeServerError):
    """An error inside the server."""


class BackendError(ServingFault):
    """A runtime rejected the inputs or failed during execution."""


class ConstraintFailed(BackendError):
    """A language model's finished answer does not obey the constraint that the request put on it."""


class WrongOutput(BackendError):
    """A model returned what its configuration or its interface rules out, so that other inputs do not help."""


class SessionLost(ServingFault):
    """A session cannot be used any more (device lost, runtime blocked)."""


class LoadError(EdgeServerError):
    """A version could not be loaded. The message is the version's reason in the repository index."""

    code = ErrorCode.INVALID_ARG


class BadModelConfig(LoadError):
    """The configuration conflicts with itself, with the schema, or with the model file."""


class BackendMissing(LoadError):
    """The model's runtime is not installed or cannot be imported. The message says what to install."""


class MemberMissing(LoadError):
    """A member of the ensemble does not serve. The ensemble is loaded when it does."""


class StorageFault(LoadError):
    """Reading the files failed for a temporary cause, such as a disk or network file system error."""


class Untrusted(LoadError):
    """The files do not match their checksums or signature, or a required checksum or signature is missing."""


class ChangedWhileLoading(LoadError):
    """The files changed between check and load. The next scan of the repository finds the new files."""


class OutOfMemory(LoadError):
    """The model does not fit into memory."""


class DeviceLost(LoadError):
    """This process cannot use the GPU of the model any more."""

    code = ErrorCode.UNAVAILABLE


class WarmupFailed(LoadError):
    """A warm-up sample failed. The version never became READY."""


class NotWarmedUp(WarmupFailed):
    """The generated warm-up inputs failed, and the model has no warm-up sample. It may work with other inputs."""
