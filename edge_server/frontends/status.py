"""Error codes to status numbers: the only place where HTTP and gRPC numbers of errors stand.

Two total tables; where Triton's clients rely on a number, Triton's number is used. gRPC's numbers are those of
grpc/status.h, repeated here so that no gRPC library is needed to read them.
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
    # Triton has no number of its own for "the name is taken" and answers 400 where 409 would be natural; its clients'
    # tests register a shared-memory region twice and look for that 400.
    ErrorCode.ALREADY_EXISTS: 400,
    # Triton answers 400. 499 (nginx: client closed request) keeps a client that left apart from a bad request in
    # access logs of proxies; nobody is left to read the body.
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
    return HTTP_STATUS[error.code]


def grpc_status(error: EdgeServerError) -> GrpcStatus:
    return GRPC_STATUS[error.code]


def retry_after(error: EdgeServerError) -> str | None:
    """Return the value of the Retry-After header: whole seconds, rounded up. None: trying again cannot help."""
    if error.retry_after_s is None:
        return None
    return str(max(0, math.ceil(error.retry_after_s)))
