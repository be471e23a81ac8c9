"""`AioFrameStream`, the client for programs with asyncio: sends camera frames to a model of a server and reads the
results."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from edge_server.client.pictures import Image
from edge_server.client.server_connection import ServerEndpoint
from edge_server.client.stream_client import StreamClient
from edge_server.client.stream_errors import StreamError, status_error
from edge_server.client.stream_protocol import StreamProtocol
from edge_server.protocol.frame_codec import STREAM_PATH, frame_pieces
from edge_server.protocol.frame_messages import Frame, FrameResult

_REASON_LOST = "Internal error from Core"
"""Status details with which grpc.aio replaces the server's: this happens if the client writes a message after the call
has ended, but before the event loop has processed the end."""


class AioFrameStream(StreamClient["_TaskSignal", "_AioConnection"]):
    """FrameStream for asyncio. Call all methods on one event loop; the callbacks run on it."""

    _sender: asyncio.Task[None] | None = None

    def _make_signal(self) -> _TaskSignal:
        return _TaskSignal()

    def _connect(self) -> _AioConnection:
        return _AioConnection(self._endpoint, self._changed, self._protocol)

    async def __aenter__(self) -> AioFrameStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_for_room(self) -> bool:
        """Wait until a frame can be offered without replacing another one. Return False when the stream has ended."""
        await self._changed.wait_for(lambda: self._is_over or self._protocol.flow.has_room)
        return not self._is_over

    async def results(
        self, frames: AsyncIterable[Image | Frame] | Iterable[Image | Frame] | None = None, **layout: Any
    ) -> AsyncIterator[FrameResult]:
        """Yield results, like FrameStream.results. A task sends `frames`; iterating over them must not block."""
        if self._is_reading:
            raise ValueError(f"the results of frame stream '{self.stream_id}' are being read already")
        self._is_reading = True
        try:
            if frames is not None:
                if self._sender is not None:
                    raise ValueError(f"frame stream '{self.stream_id}' was given frames already")
                self._sender = asyncio.create_task(self._send_all(frames, layout))
            while (connection := self._open_connection()) is not None:
                async for result in self._read(connection):
                    yield result
            if self._sender is not None and not self._is_closed:
                await self._sender
        finally:
            self._is_reading = False

    async def close(self) -> None:
        """End the stream at once. Waiting frames are dropped, frames in flight count as lost."""
        self._is_closed = True
        self._protocol.flow.clear()
        self._protocol.flow.disconnect()
        self._changed.notify_all()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    async def _read(self, connection: _AioConnection) -> AsyncIterator[FrameResult]:
        """Yield the results of one connection. After its end, wait for the time of the next attempt."""
        error: StreamError | None = None
        try:
            while (data := await connection.read_message()) is not None:
                if self._is_closed:
                    return
                message = self._protocol.receive(data)
                self._changed.notify_all()
                if isinstance(message, FrameResult):
                    yield message
                else:
                    self._callbacks.call(message)
        except grpc.aio.AioRpcError as broken:
            # The reason is lost: treat this as a normal end. The next attempt gets the reason if it persists.
            if broken.details() != _REASON_LOST:
                error = status_error(broken.code(), broken.details(), self._endpoint.address)
        except StreamError as unreadable:
            error = unreadable
        except asyncio.CancelledError:
            # A call that `close` has cancelled raises this too. Else this task is cancelled, and must end.
            if not self._is_closed:
                raise
        await self._end_connection(connection, error)

    async def _end_connection(self, connection: _AioConnection, error: StreamError | None) -> None:
        await connection.close()
        if self._is_closed:
            return
        self._connection = None
        delay_s, reason = self._protocol.end_connection(error, random.random())
        if reason is not None and self._callbacks.on_broken is not None:
            self._callbacks.on_broken(reason)
        if delay_s is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._is_closed), delay_s)

    async def _send_all(self, frames: AsyncIterable[Image | Frame] | Iterable[Image | Frame], layout: Any) -> None:
        try:
            if isinstance(frames, AsyncIterable):
                async for frame in frames:
                    if not await self._send_one(frame, layout):
                        return
            else:
                for frame in frames:
                    if not await self._send_one(frame, layout):
                        return
                    # Without `keeps_all` this loop has no other `await`: let other tasks run.
                    await asyncio.sleep(0)
        finally:
            self.finish()

    async def _send_one(self, frame: Image | Frame, layout: Any) -> bool:
        """Send one frame, after waiting for room if the stream `keeps_all`; False when the stream has ended."""
        if self._protocol.keeps_all:
            await self.wait_for_room()
        if self._is_over:
            return False
        self.send(frame, **layout)
        return True


class _TaskSignal:
    """Wakes tasks that wait for a condition, after each change. As a lock it does nothing: there is one thread."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """Report a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        while not condition():
            await self._changed.wait()


class _AioConnection:
    """One connection: its channel, its call, and the task that writes frames to it."""

    def __init__(self, endpoint: ServerEndpoint, changed: _TaskSignal, protocol: StreamProtocol) -> None:
        self._changed = changed
        self._protocol = protocol
        self._channel = endpoint.channel(grpc.aio)
        self._call = self._channel.stream_stream(STREAM_PATH)(metadata=tuple(endpoint.metadata) or None)
        self._writer = asyncio.create_task(self._write(protocol.connect()))

    async def read_message(self) -> bytes | None:
        """Return the server's next message, or None after a normal end. Raises AioRpcError after an error."""
        data = await self._call.read()
        if data is not grpc.aio.EOF:
            return bytes(data)
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, await self._call.initial_metadata(), await self._call.trailing_metadata(),
                details=await self._call.details(),
            )  # fmt: skip
        return None

    async def close(self) -> None:
        """Cancel the call and close the channel."""
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        await self._channel.close()

    async def _write(self, opening: bytes) -> None:
        """Write frames as credit allows. Errors of the call are reported by `read_message`, not here."""
        flow = self._protocol.flow
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(opening)
            while True:
                await self._changed.wait_for(lambda: flow.may_send or (self._protocol.is_finished and flow.is_empty))
                frame = flow.take_frame(time.monotonic())
                if frame is None:
                    break
                self._changed.notify_all()
                await self._call.write(b"".join(frame_pieces(frame)))
            await self._call.done_writing()
