"""Exceptions of a client's stream of camera frames, each with the information whether a new connection can succeed."""

from __future__ import annotations

from typing import Any

import grpc

from edge_server.errors import EdgeServerError, ErrorCode, InvalidRequest

_TEMPORARY = {
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.UNKNOWN: ErrorCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL: ErrorCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
}
"""Statuses after which a new attempt may succeed: of a proxy, or of a server that restarts or is overloaded."""

_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARG,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED: ErrorCode.ABORTED,
}
"""Statuses that a new attempt would get again. ABORTED: another client uses the stream id now."""


class StreamError(EdgeServerError):
    """The stream ended, and is not opened again.

    `status` is the name of the gRPC status, for example "NOT_FOUND"; "" if no status is the cause. `heals`: whether a
    new attempt may succeed.
    """

    def __init__(self, message: str, code: ErrorCode, *, status: str = "", heals: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.heals = heals


def status_error(status: Any, details: str | None, address: str) -> StreamError:
    """Return the error for a call that ended with a gRPC status."""
    heals = status in _TEMPORARY
    code = _TEMPORARY.get(status) or _FINAL.get(status, ErrorCode.UNKNOWN)
    message = f"the frame stream to {address} ended: {status.name}: {details or 'no details'}"
    return StreamError(message, code, status=status.name, heals=heals)


def early_end_error(address: str) -> StreamError:
    """Return the error for a call that the server ended, without an error, before the end of the stream."""
    return StreamError(f"the frame stream to {address} was ended by the server", ErrorCode.UNAVAILABLE, heals=True)


def unreadable_message_error(error: InvalidRequest, address: str) -> StreamError:
    """Return the error for a message that cannot be decoded. A new attempt would fail too."""
    return StreamError(f"{address} sent a message that is not valid in a frame stream: {error}", ErrorCode.INTERNAL)
