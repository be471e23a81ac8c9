"""Why a stream ended, and whether another try may help."""

from __future__ import annotations

from typing import Any

import grpc

from edge_server.errors import EdgeServerError, ErrorCode, InvalidRequest

_HEALING = {
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.UNKNOWN: ErrorCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL: ErrorCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
}
"""What a server that restarts, is overloaded or cut off answers, or what a proxy in between does."""

_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARG,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED: ErrorCode.ABORTED,
}
"""What the next try would be answered as well. ABORTED: another client took over the stream id."""


class StreamError(EdgeServerError):
    """The stream ended for a reason that trying again does not heal, or may not be tried again.

    `status` is gRPC's word for it ("NOT_FOUND"), "" when the connection was not the cause. `heals`: another try may
    succeed.
    """

    def __init__(self, message: str, code: ErrorCode, *, status: str = "", heals: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.heals = heals


def from_status(status: Any, details: str | None, address: str) -> StreamError:
    """Return the error for a call that ended with a gRPC status."""
    heals = status in _HEALING
    code = _HEALING.get(status) or _FINAL.get(status, ErrorCode.UNKNOWN)
    message = f"the frame stream to {address} ended: {status.name}: {details or 'no details'}"
    return StreamError(message, code, status=status.name, heals=heals)


def from_silence(address: str) -> StreamError:
    """Return the error for a call that the server ended well although there was more to come."""
    return StreamError(f"the frame stream to {address} was ended by the server", ErrorCode.UNAVAILABLE, heals=True)


def from_garbage(error: InvalidRequest, address: str) -> StreamError:
    """Return the error for a message that cannot be read. No restart makes the two sides speak alike."""
    return StreamError(f"{address} does not speak this frame stream's language: {error}", ErrorCode.INTERNAL)
