"""Calls of Triton's GRPCInferenceService without a network, for a program that embeds the server: serialized messages
in and out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import CallHandler, CallStatus, Message, Metadata, Methods, Pieces
from edge_server.protocol.messages import GRPC_SERVICE

_MAX_WAITING = 64
"""Messages of a stream that wait for their reader, before the handler is asked to wait."""


class RpcError(Exception):
    """An RPC failed. `code` is the name of the gRPC status, such as "NOT_FOUND"."""

    def __init__(self, status: CallStatus) -> None:
        super().__init__(f"{status.code.name}: {status.details}")
        self.code = status.code.name
        self.details = status.details


class DirectCall:
    """One unary call. `on_end` is called once, on any thread, maybe before the constructor returns.

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
        """Cancel the request. `on_end` may still be called."""
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


class DirectStream:
    """One bidirectional stream of Triton's GRPCInferenceService, such as ModelStreamInfer. Lives on one event loop."""

    deadline_ns = 0
    metadata: Metadata = ()
    peer = ""

    def __init__(self, methods: Methods, method: str, hold_us: float) -> None:
        self.hold_us = hold_us
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[bytes] = deque()
        self._status: CallStatus | None = None
        self._has_news = asyncio.Event()
        self._may_read = asyncio.Event()
        self._is_full = False
        found = methods.get(f"/{GRPC_SERVICE}/{method}")
        if found is None or not found.is_stream:
            raise RpcError(CallStatus(GrpcStatus.UNIMPLEMENTED, f"{GRPC_SERVICE} has no stream '{method}'"))
        self._handler = found.open(self)

    async def run(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the responses to `messages`. Closing the generator cancels the requests. Raises RpcError, and what
        `messages` raises."""
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(lambda _: self._has_news.set())
        try:
            while True:
                self._has_news.clear()
                while self._outgoing:
                    yield self._outgoing.popleft()
                if self._is_full:
                    self._is_full = False
                    self._handler.on_sent()
                if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
                    raise error
                if self._status is not None and not self._outgoing:
                    break
                await self._has_news.wait()
            if self._status.code is not GrpcStatus.OK:
                raise RpcError(self._status)
        finally:
            reading.cancel()
            if self._status is None:
                self._handler.on_client_left()

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            self._may_read.clear()
            self._handler.on_message(message)
            await self._may_read.wait()
        self._handler.on_last_message()

    # -- of RpcCall, for the handler

    def respond(self, message: Pieces) -> None:
        """Raise NotImplementedError: only unary calls respond."""
        raise NotImplementedError

    def receive(self) -> None:
        self._loop.call_soon_threadsafe(self._may_read.set)

    def send(self, message: Pieces) -> bool:
        self._outgoing.append(b"".join(message))
        self._is_full = len(self._outgoing) >= _MAX_WAITING
        self._loop.call_soon_threadsafe(self._has_news.set)
        return not self._is_full

    def end(self, status: CallStatus) -> None:
        if self._status is None:
            self._status = status
            self._loop.call_soon_threadsafe(self._has_news.set)

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._handler.on_woken)
