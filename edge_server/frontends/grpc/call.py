"""Interface between the two gRPC transports and the handlers of RPCs, and the mapping of errors to gRPC statuses.

A transport (http2_transport.py, grpcio_transport.py) creates an `RpcCall` for each RPC, and opens the method's
`CallHandler` with it. The handler receives the events of the call, and responds by the call's methods. Messages are
complete and uncompressed in both directions.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from edge_server.errors import DeadlineTooShort, EdgeServerError, ServingFault, Throttled
from edge_server.frontends.error_status import GrpcStatus, grpc_status

_log = logging.getLogger(__name__)

_MAX_DETAILS_CHARS, _MAX_ASCII_DETAILS_CHARS = 600, 2000
"""Maximum length of status details. They are sent in HTTP/2 trailers, where an escaped octet takes three octets. Peers
refuse more than 8 KiB of trailers."""

GOVERNOR_TRAILER = "edge-governor"
"""Trailer with the governor's state, WARM to CRITICAL, on calls that the governor refuses."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""Maximum message size of gRPC and protobuf."""

Message: TypeAlias = bytes | memoryview
"""A received message. It does not change while it is referenced."""

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""A message to send, in pieces. Views have one-byte items and must not change until they are sent."""

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Pairs of lower-case name and value; the value is bytes if the name ends with "-bin", else text."""


class CallStatus(NamedTuple):
    """The status with which a call ends."""

    code: GrpcStatus = GrpcStatus.OK
    details: str = ""
    trailers: Sequence[tuple[str, str]] = ()


OK = CallStatus()


class RpcCall(Protocol):
    """One RPC. Methods may be called from any thread; after the end of the call they do nothing.

    `deadline_ns` is a time.monotonic_ns value, 0 for none; the transport ends the call at the deadline. `hold_us` is
    the maximum time in microseconds that a handler may hold the thread that delivers events, see
    `InferenceService.submit`.
    """

    deadline_ns: int
    hold_us: float

    @property
    def metadata(self) -> Metadata: ...

    @property
    def peer(self) -> str:
        """The client's address in gRPC's peer format, as "ipv4:10.0.0.7:40112"."""

    def respond(self, message: Pieces) -> None:
        """Send the only message of a unary call, and the status OK."""

    def end(self, status: CallStatus) -> None:
        """Send the status, after all messages that were passed to `send`."""

    def wake(self) -> None:
        """Make the transport call `CallHandler.on_woken` soon. Returns at once; the caller may hold locks."""

    def receive(self) -> None:
        """Request the next message of a stream. The first one needs no request."""

    def send(self, message: Pieces) -> bool:
        """Send a message of a stream. Return whether the next one may be sent at once.

        If not, wait for `CallHandler.on_sent`.
        """


class CallHandler(Protocol):
    """Receives the events of a call.

    Messages come one at a time. Other events may come at the same time, on other threads. A unary call has one message,
    and neither `on_last_message` nor `on_sent`.
    """

    def on_message(self, message: Message) -> None:
        """Process a message. On a stream, the next one comes after `RpcCall.receive`."""

    def on_last_message(self) -> None:
        """The client sends no more messages on this stream."""

    def on_sent(self) -> None:
        """The transport accepts messages again, after an `RpcCall.send` that returned False."""

    def on_woken(self) -> None:
        """`RpcCall.wake` was called. Comes on the same thread as `on_sent`."""

    def on_client_left(self) -> None:
        """The response is no longer needed: the client cancelled or disconnected, or the deadline passed.

        Comes at most once.
        """

    def on_server_stopping(self) -> None:
        """The server stops: a stream must end as soon as no request is outstanding on it."""


Opener: TypeAlias = Callable[[RpcCall], CallHandler]
"""Returns the handler of a new call. Raises EdgeServerError to end the call with that error."""


class RpcMethod(NamedTuple):
    """A served RPC. `check` raises EdgeServerError for the metadata of a call that is not permitted; a transport calls
    it before it receives a message."""

    open: Opener
    is_stream: bool
    check: Callable[[Metadata], None] | None = None


Methods: TypeAlias = Mapping[str, RpcMethod]
"""The RPCs by their HTTP/2 path."""


class UnaryHandler:
    """Base of handlers of unary calls: all events except the message do nothing."""

    __slots__ = ()

    def on_last_message(self) -> None:
        """Do nothing: a unary call has no such event."""

    def on_sent(self) -> None:
        """Do nothing: a unary call has no such event."""

    def on_woken(self) -> None:
        """Do nothing: a unary call never calls `wake`."""

    def on_client_left(self) -> None:
        """Do nothing: the transport discards the response."""

    def on_server_stopping(self) -> None:
        """Do nothing: the server waits for the call."""


def run_blocking(call: RpcCall, work: Callable[[], None]) -> None:
    """Run work that may block: on a new thread, or on this one if it may be held without limit."""
    if call.hold_us == math.inf:
        work()
        return
    try:
        threading.Thread(target=work, name="grpc-call", daemon=True).start()
    except RuntimeError:
        call.end(call_status(Throttled("the system grants no thread for the call")))


def call_status(error: EdgeServerError) -> CallStatus:
    """Return the status of a call that failed with `error`."""
    details = error.message
    most = _MAX_ASCII_DETAILS_CHARS if details.isascii() else _MAX_DETAILS_CHARS
    if len(details) > most:
        details = details[:most] + "..."
    trailers = []
    if error.retry_after_s is not None:
        # gRPC's standard key, which clients with a retry policy obey.
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))))
    if isinstance(error, Throttled) and error.state:
        trailers.append((GOVERNOR_TRAILER, error.state))
    # gRPC has a separate status for a passed deadline, whether gRPC or the core noticed it first.
    code = GrpcStatus.DEADLINE_EXCEEDED if isinstance(error, DeadlineTooShort) else grpc_status(error)
    return CallStatus(code, details, trailers)


def client_error(error: Exception) -> EdgeServerError:
    """Return the error to send to the client. An unexpected error is logged in full, but the client gets only its type.

    The traceback is removed: it would keep the call's stack frames, and so its tensors, alive.
    """
    if isinstance(error, EdgeServerError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    _log.error("unexpected error in a gRPC call", exc_info=error)
    return ServingFault(f"internal error: {type(error).__name__}")
