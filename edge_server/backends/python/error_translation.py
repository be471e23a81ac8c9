"""Translation of a model's exceptions and error responses to the server's errors."""

from __future__ import annotations

import enum
import traceback
from pathlib import Path

from edge_server.backends.runtime_library import words
from edge_server.errors import (
    AlreadyExists,
    BackendError,
    Cancelled,
    EdgeServerError,
    ErrorCode,
    InvalidRequest,
    NotFound,
    Refusal,
    ServingFault,
    Unsupported,
)

RAISED: tuple[type[BaseException], ...] = (BaseException,)
"""What a model may raise without taking a thread down: `sys.exit()` ends its batch, not the server, and so does
asyncio.CancelledError, which is no Exception."""


class TritonModelException(Exception):
    """Raised by models, and to models that use the module wrongly."""


class TritonErrorCode(enum.IntEnum):
    """TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """An error as an answer: to one request of a batch, or from a model that was called."""

    UNKNOWN = TritonErrorCode.UNKNOWN
    INTERNAL = TritonErrorCode.INTERNAL
    NOT_FOUND = TritonErrorCode.NOT_FOUND
    INVALID_ARG = TritonErrorCode.INVALID_ARG
    UNAVAILABLE = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS = TritonErrorCode.ALREADY_EXISTS
    CANCELLED = TritonErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = TritonErrorCode.INTERNAL) -> None:
        self._message = str(message)
        self._code = TritonErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> TritonErrorCode:
        return self._code

    def __str__(self) -> str:
        return self._message


def error_of(error: TritonError) -> EdgeServerError:
    """Return the answer of a model as an error of ours, the model's words unchanged."""
    code, message = error.code(), error.message()
    if code is TritonErrorCode.UNAVAILABLE:
        return Refusal(message, retry_after_s=None)
    if code is TritonErrorCode.UNKNOWN:
        unknown = ServingFault(message)
        unknown.code = ErrorCode.UNKNOWN
        return unknown
    return _KINDS[code](message)


_KINDS: dict[TritonErrorCode, type[EdgeServerError]] = {
    TritonErrorCode.INTERNAL: BackendError,
    TritonErrorCode.NOT_FOUND: NotFound,
    TritonErrorCode.INVALID_ARG: InvalidRequest,
    TritonErrorCode.UNSUPPORTED: Unsupported,
    TritonErrorCode.ALREADY_EXISTS: AlreadyExists,
    TritonErrorCode.CANCELLED: Cancelled,
}


def answer_of(error: EdgeServerError) -> TritonError:
    """Return an error of ours as a model sees it; codes that Triton lacks become the nearest it has."""
    name = error.code.value
    if name == ErrorCode.RESOURCE_EXHAUSTED.value:
        name = TritonErrorCode.UNAVAILABLE.name
    known = name in TritonErrorCode.__members__
    return TritonError(error.message, TritonErrorCode[name] if known else TritonErrorCode.INTERNAL)


def told(error: BaseException, folder: Path) -> str:
    """Return the message of a model's exception and its place in the model's folder, as one line."""
    said = words(error)
    if isinstance(error, TritonModelException) and said:
        text = said
    else:
        text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, ValueError) and "read-only" in said:
        text += " (inputs are views of the received request; without the parameter read_only_inputs they are copies)"
    place = _place(error, folder)
    return f"{text} ({place})" if place else text


def full_text(error: BaseException) -> str:
    """Return the traceback as text: the record of a log must not pin the frames, and with them the tensors."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def let_go(error: BaseException) -> None:
    """Clear what the exception's frames hold."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _place(error: BaseException, folder: Path) -> str:
    if isinstance(error, SyntaxError):
        # It says so itself.
        return ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(folder)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
