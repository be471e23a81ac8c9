"""Mapping of the server's error codes to HTTP and gRPC status numbers.

Both tables are total. Where Triton's clients rely on a number, it is Triton's. The numbers of gRPC are those of
grpc/status.h, repeated here so that no gRPC library is needed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

from edge_server.errors import EdgeServerError, ErrorCode


class GrpcStatus(enum.IntEnum):
    """gRPC status codes by their published names and numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


HTTP_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    # 409 would be natural, but Triton answers 400: its clients' tests register a shared-memory region twice and expect
    # 400.
    ErrorCode.ALREADY_EXISTS: 400,
    # Triton answers 400. With 499 (nginx: client closed request) the access logs of proxies distinguish a client that
    # disconnected from a bad request.
    ErrorCode.CANCELLED: 499,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.ABORTED: 409,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
}

GRPC_STATUS: Mapping[ErrorCode, GrpcStatus] = {
    ErrorCode.UNKNOWN: GrpcStatus.UNKNOWN,
    ErrorCode.INTERNAL: GrpcStatus.INTERNAL,
    ErrorCode.NOT_FOUND: GrpcStatus.NOT_FOUND,
    ErrorCode.INVALID_ARG: GrpcStatus.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: GrpcStatus.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: GrpcStatus.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: GrpcStatus.ALREADY_EXISTS,
    ErrorCode.CANCELLED: GrpcStatus.CANCELLED,
    ErrorCode.RESOURCE_EXHAUSTED: GrpcStatus.RESOURCE_EXHAUSTED,
    ErrorCode.ABORTED: GrpcStatus.ABORTED,
    ErrorCode.UNAUTHENTICATED: GrpcStatus.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: GrpcStatus.PERMISSION_DENIED,
}


def http_status(error: EdgeServerError) -> int:
    """Return the HTTP status of an error."""
    return HTTP_STATUS[error.code]


def grpc_status(error: EdgeServerError) -> GrpcStatus:
    """Return the gRPC status of an error."""
    return GRPC_STATUS[error.code]


def retry_after(error: EdgeServerError) -> str | None:
    """Return the value of the Retry-After header: whole seconds, rounded up. None: a retry cannot succeed."""
    if error.retry_after_s is None:
        return None
    return str(max(0, math.ceil(error.retry_after_s)))
