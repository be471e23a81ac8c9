"""Translation of errors between Triton's Python API (`pb_utils.TritonError`, exceptions) and the server."""

from __future__ import annotations

import enum
import logging
import traceback
from pathlib import Path

from edge_server.backends.runtime_errors import log_with_traceback, message_line
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

MODEL_EXCEPTIONS: tuple[type[BaseException], ...] = (BaseException,)
"""Exceptions of a model's code that the server catches. `sys.exit()` in a model ends its batch, not the server, and so
does asyncio.CancelledError, which is no Exception."""


class TritonModelException(Exception):
    """pb_utils.TritonModelException: raised by models, and raised to models that use pb_utils wrongly."""


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
    """An error response: of a model to one request of its batch, or of a called model."""

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


def to_server_error(error: TritonError) -> EdgeServerError:
    """Convert an error response of a model into the server's exception, with the same message."""
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


def to_triton_error(error: EdgeServerError) -> TritonError:
    """Convert an exception of the server for a model. A code that Triton lacks becomes the nearest one."""
    name = error.code.value
    if name == ErrorCode.RESOURCE_EXHAUSTED.value:
        name = TritonErrorCode.UNAVAILABLE.name
    known = name in TritonErrorCode.__members__
    return TritonError(error.message, TritonErrorCode[name] if known else TritonErrorCode.INTERNAL)


def error_line(error: BaseException, folder: Path) -> str:
    """Return an exception of a model as one line, with the place in the model's own `folder` that raised it."""
    said = message_line(error)
    if isinstance(error, TritonModelException) and said:
        text = said
    else:
        text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, ValueError) and "read-only" in said:
        text += " (inputs are views of the received request; without the parameter read_only_inputs they are copies)"
    if isinstance(error, SyntaxError):
        # Its message already contains the place.
        return text
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(folder)]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


def log_failure(log: logging.Logger, message: str, error: BaseException) -> None:
    """Log an error of a model's code: the message, the exception, and its traceback as text."""
    said = message_line(error)
    text = f"{message}: {type(error).__name__}: {said}" if said else f"{message}: {type(error).__name__}"
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    log_with_traceback(log, logging.ERROR, text, "".join(lines).rstrip())


def release_frames(error: BaseException) -> None:
    """Clear the local variables of the exception's frames, so that their tensors are freed."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
