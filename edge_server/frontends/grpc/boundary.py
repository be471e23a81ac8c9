"""Where calls end: errors become gRPC statuses here, and nothing else escapes into grpcio."""

from __future__ import annotations

import logging
import math
from typing import NoReturn

import grpc

from edge_server.errors import EdgeServerError, ServingFault, Throttled, TooLate
from edge_server.frontends.status import grpc_status
from edge_server.records import dataclass

_log = logging.getLogger(__name__)

_MAX_DETAILS_CHARS = 2000
"""Statuses travel in HTTP/2 trailers, where every odd octet takes three; peers refuse more than 8 KiB of those."""

GOVERNOR_TRAILER = "edge-governor"
"""Tells the state of the box, WARM to CRITICAL, with refusals that are its doing."""

_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status_code(error: EdgeServerError) -> grpc.StatusCode:
    if isinstance(error, TooLate):
        # The word that gRPC itself has for it, whether its clock or ours was first.
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return _STATUS_CODES[int(grpc_status(error))]


@dataclass(slots=True)
class Ending:
    """How a unary call ends: with a message, or with an error's status, details and trailing metadata."""

    message: bytes | None = None
    code: int = 0
    details: bytes = b""
    trailers: tuple[tuple[str, str], ...] | None = None


def abort(context: grpc.ServicerContext, error: EdgeServerError) -> NoReturn:
    """End the call with the error's status."""
    end = ending(error)
    if end.trailers:
        context.set_trailing_metadata(end.trailers)
    context.abort(status_code(error), end.details.decode())
    raise AssertionError("abort returned")


def ending(error: EdgeServerError) -> Ending:
    """Return what a call ends with that met `error`."""
    details = error.message
    if len(details) > _MAX_DETAILS_CHARS:
        details = details[:_MAX_DETAILS_CHARS] + "..."
    trailers = []
    if error.retry_after_s is not None:
        # gRPC's own name for it, which clients with a retry policy obey.
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))))
    if isinstance(error, Throttled) and error.state:
        trailers.append((GOVERNOR_TRAILER, error.state))
    return Ending(None, status_code(error).value[0], details.encode("utf-8", "replace"), tuple(trailers) or None)


def known(error: Exception) -> EdgeServerError:
    """Return `error` as one that a client may see; what is not our own is logged whole and told in short.

    It is stripped of its traceback, which would keep the frames of the call, and with them its tensors, alive.
    """
    if isinstance(error, EdgeServerError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    _log.error("unexpected error in a gRPC call", exc_info=error)
    return ServingFault(f"internal error: {type(error).__name__}")
