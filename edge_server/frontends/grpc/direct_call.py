"""Unary RPCs of Triton's GRPCInferenceService for a program in this process: bytes in, bytes out, no connection."""

from __future__ import annotations

from collections.abc import Callable

from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import CallHandler, CallStatus, Message, Metadata, Methods, Pieces
from edge_server.protocol.messages import GRPC_SERVICE


class RpcError(Exception):
    """An RPC failed. `code` is the name of the gRPC status, such as "NOT_FOUND"."""

    def __init__(self, status: CallStatus) -> None:
        super().__init__(f"{status.code.name}: {status.details}")
        self.code = status.code.name
        self.details = status.details


class DirectCall:
    """One call. `on_end` is called once, on any thread, maybe before the constructor returns.

    `hold_us` as in `InferenceService.submit`. `message` must not change until the end.
    """

    deadline_ns = 0
    metadata: Metadata = ()
    peer = ""

    def __init__(
        self, methods: Methods, method: str, message: Message, on_end: Callable[[], None], hold_us: float
    ) -> None:
        self.hold_us = hold_us
        self._on_end = on_end
        self._result: bytes | CallStatus | None = None
        self._handler: CallHandler | None = None
        found = methods.get(f"/{GRPC_SERVICE}/{method}")
        if found is None or found.is_stream:
            self.end(CallStatus(GrpcStatus.UNIMPLEMENTED, f"{GRPC_SERVICE} has no unary method '{method}'"))
            return
        handler = found.open(self)
        self._handler = handler
        handler.on_message(message)

    def result(self) -> bytes:
        """Return the response message of a call that has ended. Raises RpcError."""
        if isinstance(self._result, bytes):
            return self._result
        raise RpcError(self._result or CallStatus(GrpcStatus.INTERNAL, "the call has not ended"))

    def cancel(self) -> None:
        """Tell the server that nobody needs the response. `on_end` may still be called."""
        if self._handler is not None:
            self._handler.on_client_left()

    # -- of RpcCall, for the handler

    def respond(self, message: Pieces) -> None:
        self._finish(b"".join(message))

    def end(self, status: CallStatus) -> None:
        self._finish(status)

    def wake(self) -> None:
        """Do nothing: only streams are woken."""

    def receive(self) -> None:
        """Do nothing: there is one message."""

    def send(self, message: Pieces) -> bool:
        """Raise NotImplementedError: only streams send."""
        raise NotImplementedError

    def _finish(self, result: bytes | CallStatus) -> None:
        self._result = result
        self._on_end()
