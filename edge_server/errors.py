"""The error taxonomy: every failure that a caller may see is an EdgeServerError with one of Triton's code words.

Status numbers live only in `frontends/status.py`. Messages name the model, version and tensor concerned, what was
expected and what was given. Lives at the bottom: imports nothing of this package.
"""

from __future__ import annotations

import enum
from typing import TypeVar

Error = TypeVar("Error", bound="EdgeServerError")


class ErrorCode(enum.Enum):
    """What kind of failure it is, in Triton's words (TRITONSERVER_Error_Code, plus gRPC's RESOURCE_EXHAUSTED,
    ABORTED, UNAUTHENTICATED and PERMISSION_DENIED)."""

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
    """A failure with a code for machines and a sentence for people.

    `retry_after_s` is None when trying again without a change cannot help.
    """

    code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def detached(self: Error) -> Error:
        """Return itself without traceback, cause and context: their frames keep alive whatever they worked on."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class InvalidRequest(EdgeServerError):
    """The caller asked for something that can never be right as it stands."""

    code = ErrorCode.INVALID_ARG


class SequenceNotBegun(InvalidRequest):
    """A request is a step of a sequence that the server does not know, and does not begin one."""


class NotFound(EdgeServerError):
    """A thing named by the caller does not exist."""

    code = ErrorCode.NOT_FOUND


class UnknownModel(NotFound):
    """No model, or no version of it, by that name."""


class Unsupported(EdgeServerError):
    """Understood, but not offered by this server or this model."""

    code = ErrorCode.UNSUPPORTED


class Unauthenticated(EdgeServerError):
    """The request needs a bearer token, and has none that is known."""

    code = ErrorCode.UNAUTHENTICATED


class Forbidden(EdgeServerError):
    """The caller may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class AlreadyExists(EdgeServerError):
    """The name is taken."""

    code = ErrorCode.ALREADY_EXISTS


class Cancelled(EdgeServerError):
    """The caller went away or took its request back."""

    code = ErrorCode.CANCELLED


class Superseded(EdgeServerError):
    """Another caller took over what this one held."""

    code = ErrorCode.ABORTED


class Refusal(EdgeServerError):
    """Right, but not now: the same request may succeed later."""

    code = ErrorCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class NotReady(Refusal):
    """The model version exists but is not serving."""


class QueueFull(Refusal):
    """The model's queue holds as many requests as its policy allows."""


class DeadlineExceeded(Refusal):
    """The request waited longer than its time limit."""


class DeadlineTooShort(DeadlineExceeded):
    """The answer would come after the request's own deadline."""


class Draining(Refusal):
    """The server or the version is stopping and takes nothing new."""


class Throttled(EdgeServerError):
    """Heat, power or memory pressure forbids the work for now.

    `state` is the box's, in one word, where the governor refused; "" where something else is used up.
    """

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float | None = None, state: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.state = state


class ServingFault(EdgeServerError):
    """The server's own side failed."""


class BackendError(ServingFault):
    """A runtime refused or failed while executing."""


class SessionLost(ServingFault):
    """A session can no longer be used (device lost, runtime wedged)."""


class LoadError(EdgeServerError):
    """A version could not be brought up; becomes the version's reason in the repository index."""

    code = ErrorCode.INVALID_ARG


class BadModelConfig(LoadError):
    """The configuration contradicts itself, the schema, or the model file."""


class BackendMissing(LoadError):
    """The runtime that the model needs is not installed or does not import; says what to install."""


class MemberMissing(LoadError):
    """A model that an ensemble is made of does not serve; loaded once it does."""


class StorageFault(LoadError):
    """Reading the files failed for a cause that may pass: a disk or a network file system that stutters."""


class Untrusted(LoadError):
    """The files are not what their checksums or signature say, or lack those that are required."""


class ChangedWhileLoading(LoadError):
    """Files changed between their check and their opening; the next look at the repository finds them anew."""


class OutOfMemory(LoadError):
    """Loading would not fit, or did not fit, into memory."""


class DeviceLost(LoadError):
    """The GPU that it was to run on does not work any more in this process."""

    code = ErrorCode.UNAVAILABLE


class WarmupFailed(LoadError):
    """A warm-up sample failed; the version was never offered."""


class NotWarmedUp(WarmupFailed):
    """Made-up inputs did not suit a model that has no sample of its inputs. It may work with other inputs."""
