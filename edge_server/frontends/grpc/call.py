"""Interface between a gRPC transport and its RPCs, and the mapping of errors to gRPC statuses.

A transport (over_http2.py, over_grpcio.py) makes a `RpcCall` for each RPC and opens the method's `CallHandler` with
it. The side
takes the call's events and acts by the call's methods. Messages are whole and uncompressed on both sides of the line.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from edge_server.errors import DeadlineTooShort, EdgeServerError, ServingFault, Throttled
from edge_server.frontends.status import GrpcStatus, grpc_status

_log = logging.getLogger(__name__)

_MAX_DETAILS_CHARS, _MAX_ASCII_DETAILS_CHARS = 600, 2000
"""Statuses travel in HTTP/2 trailers, where every odd octet takes three; peers refuse more than 8 KiB of those."""

GOVERNOR_TRAILER = "edge-governor"
"""Tells the state of the box, WARM to CRITICAL, with refusals that are its doing."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""Longest message of gRPC and protobuf."""

Message: TypeAlias = bytes | memoryview
"""A received message. It does not change while it is referenced."""

Pieces: TypeAlias = Sequence[bytes | memoryview]
"""A message to be sent, in pieces. Views are of one byte an item, and must not change until they were sent."""

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Pairs of a name in lower case and a value: bytes for names that end with "-bin", else text."""


class CallStatus(NamedTuple):
    """The status with which a call ends."""

    code: GrpcStatus = GrpcStatus.OK
    details: str = ""
    trailers: Sequence[tuple[str, str]] = ()


OK = CallStatus()


class RpcCall(Protocol):
    """One RPC, made by a transport. Methods may be called from any thread; after the end they do nothing.

    `deadline_ns` is of time.monotonic_ns, 0 for none; the transport itself ends the call then. `hold_us` is for how
    many microseconds the thread that delivers events may be held, see `InferenceService.submit`.
    """

    deadline_ns: int
    hold_us: float

    @property
    def metadata(self) -> Metadata: ...

    @property
    def peer(self) -> str:
        """The client in gRPC's name of a peer, as "ipv4:10.0.0.7:40112"."""

    def answer(self, message: Pieces) -> None:
        """Send the only message of a unary call, and the status OK."""

    def end(self, ending: CallStatus) -> None:
        """Send the status, after what `send` was given before."""

    def wake(self) -> None:
        """Have `CallHandler.on_woken` called soon, by the transport. Returns at once; locks may be held."""

    def receive(self) -> None:
        """Ask for the next message of a stream. The first one comes unasked."""

    def send(self, message: Pieces) -> bool:
        """Send a message of a stream. Return whether the next may be given at once.

        If not, `CallHandler.on_sent` says when.
        """


class CallHandler(Protocol):
    """Takes the events of a call. Messages come one at a time, the other events may come meanwhile from other threads.
    A unary call has one message and neither of the next two events."""

    def on_message(self, message: Message) -> None:
        """Take a request. Of a stream, the next one comes after `RpcCall.receive`."""

    def on_last_message(self) -> None:
        """The client sends no more messages on this stream."""

    def on_sent(self) -> None:
        """The transport takes messages again, after a `RpcCall.send` that returned False."""

    def on_woken(self) -> None:
        """The transport was asked to call, by `RpcCall.wake`. Comes on the same thread as `on_sent`."""

    def on_client_left(self) -> None:
        """The answer is not wanted any more: the client left, or the deadline passed. Comes at most once."""

    def on_server_stopping(self) -> None:
        """The server stops: a stream ends as soon as nothing is outstanding on it."""


Opener: TypeAlias = Callable[[RpcCall], CallHandler]
"""Opens the side of a call that has begun. Raises EdgeServerError with which the call is to end."""


class RpcMethod(NamedTuple):
    """An RPC that is served."""

    open: Opener
    is_stream: bool


Methods: TypeAlias = Mapping[str, RpcMethod]
"""The RPCs by the HTTP/2 path that they are called by."""


class UnaryHandler:
    """A side that takes one message at once."""

    __slots__ = ()

    def on_last_message(self) -> None:
        """Of no meaning for a unary call."""

    def on_sent(self) -> None:
        """Of no meaning for a unary call."""

    def on_woken(self) -> None:
        """Of no meaning for a unary call."""

    def on_client_left(self) -> None:
        """The answer goes nowhere."""

    def on_server_stopping(self) -> None:
        """The call is waited for."""


def run_blocking(call: RpcCall, work: Callable[[], None]) -> None:
    """Run what may block, on a thread of its own unless the call's thread may be held for any time."""
    if call.hold_us == math.inf:
        work()
        return
    try:
        threading.Thread(target=work, name="grpc-call", daemon=True).start()
    except RuntimeError:
        call.end(ending(Throttled("the system grants no thread for the call")))


def ending(error: EdgeServerError) -> CallStatus:
    """Return the status of a call that failed with `error`."""
    details = error.message
    most = _MAX_ASCII_DETAILS_CHARS if details.isascii() else _MAX_DETAILS_CHARS
    if len(details) > most:
        details = details[:most] + "..."
    trailers = []
    if error.retry_after_s is not None:
        # gRPC's own name for it, which clients with a retry policy obey.
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after_s * 1000))))
    if isinstance(error, Throttled) and error.state:
        trailers.append((GOVERNOR_TRAILER, error.state))
    # gRPC has a status of its own for a deadline that passed, whether its clock or ours was first.
    code = GrpcStatus.DEADLINE_EXCEEDED if isinstance(error, DeadlineTooShort) else grpc_status(error)
    return CallStatus(code, details, trailers)


def known(error: Exception) -> EdgeServerError:
    """Return `error` as one that a client may see; what is not our own is logged whole and told in short.

    It is stripped of its traceback, which would keep the frames of the call, and with them its tensors, alive.
    """
    if isinstance(error, EdgeServerError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    _log.error("unexpected error in a gRPC call", exc_info=error)
    return ServingFault(f"internal error: {type(error).__name__}")
