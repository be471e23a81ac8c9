"""Frame stream client for asyncio."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from edge_server.client.endpoint import ServerEndpoint, Tls
from edge_server.client.flow_control import Counters
from edge_server.client.pictures import Image, Stamp
from edge_server.client.stream_errors import StreamError, status_error
from edge_server.client.stream_protocol import Callbacks, StreamProtocol
from edge_server.core.back_off import BackOff
from edge_server.core.frame_stream_types import (
    Delivery,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    Returns,
    StreamOpened,
)
from edge_server.protocol.frame_codec import STREAM_PATH, encode_client_message

_REASON_LOST = "Internal error from Core"
"""Status details with which grpc.aio replaces the server's: this happens if the client writes a message after the call
has ended, but before the event loop has processed the end."""


class AioFrameStream:
    """FrameStream for asyncio. Call all methods on one event loop; the callbacks run on it."""

    def __init__(
        self,
        address: str,
        model: str,
        *,
        version: int = 0,
        stream_id: str = "",
        returns: Returns | None = None,
        delivery: Delivery | None = None,
        keeps_all: bool = False,
        tls: Tls | None = None,
        credentials: Any = None,
        metadata: Sequence[tuple[str, str]] = (),
        channel_options: Sequence[tuple[str, Any]] = (),
        client: str = "",
        reconnects: bool = True,
        back_off: BackOff | None = None,
        on_opened: Callable[[StreamOpened], None] | None = None,
        on_dropped: Callable[[FrameDropped], None] | None = None,
        on_broken: Callable[[StreamError], None] | None = None,
    ) -> None:
        self._endpoint = ServerEndpoint(address, tls, credentials, metadata, channel_options)
        self._protocol = StreamProtocol(
            address,
            model,
            version=version,
            stream_id=stream_id,
            returns=returns,
            delivery=delivery,
            keeps_all=keeps_all,
            client=client,
            reconnects=reconnects,
            back_off=back_off,
        )
        self._callbacks = Callbacks(on_opened, on_dropped, on_broken)
        self._changed = _ChangeSignal()
        self._connection: _AioConnection | None = None
        self._is_closed = False
        self._is_reading = False
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AioFrameStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def stream_id(self) -> str:
        return self._protocol.stream_id

    @property
    def opened(self) -> StreamOpened | None:
        """The server's first message on the latest connection; None before the first connection."""
        return self._protocol.opened

    def counters(self) -> Counters:
        return self._protocol.flow.counters()

    def send(
        self,
        image: Image | Frame,
        *,
        header: FrameHeader | None = None,
        stamp: Stamp | None = None,
        frame_id: str = "",
        height: int = 0,
        width: int = 0,
        encoding: str = "",
        step: int = 0,
        is_bigendian: bool = False,
        format: str = "",
        age_us: int = 0,
        copies: bool = True,
    ) -> None:
        """Offer a frame, like FrameStream.send. Never waits; not a coroutine."""
        frame = self._protocol.make_frame(
            image,
            header=header,
            stamp=stamp,
            frame_id=frame_id,
            height=height,
            width=width,
            encoding=encoding,
            step=step,
            is_bigendian=is_bigendian,
            format=format,
            age_us=age_us,
            copies=copies,
        )
        if self._is_over:
            raise ValueError(f"frame stream '{self.stream_id}' is {'closed' if self._is_closed else 'finished'}")
        self._protocol.flow.offer(frame, time.monotonic())
        self._changed.notify()

    async def wait_for_room(self) -> bool:
        """Wait until a frame can be offered without replacing another one. Return False when the stream has ended."""
        await self._changed.wait_for(lambda: self._is_over or self._protocol.flow.has_room)
        return not self._is_over

    def finish(self) -> None:
        """Declare that no more frames follow: `results` ends after the results of the offered frames."""
        self._protocol.is_finished = True
        self._changed.notify()

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
        self._changed.notify()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        if self._sender is not None and self._sender is not asyncio.current_task():
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._protocol.is_finished

    def _open_connection(self) -> _AioConnection | None:
        """Return the connection, a new one if there is none, or None when the stream has ended."""
        finished = self._protocol.is_finished and self._protocol.flow.is_empty
        if self._is_closed or (finished and self._connection is None):
            return None
        if self._connection is None:
            self._connection = _AioConnection(self._endpoint, self._changed, self._protocol)
        return self._connection

    async def _read(self, connection: _AioConnection) -> AsyncIterator[FrameResult]:
        """Yield the results of one connection. After its end, wait for the time of the next attempt."""
        error: StreamError | None = None
        try:
            while (data := await connection.read_message()) is not None:
                if self._is_closed:
                    return
                message = self._protocol.receive(data)
                self._changed.notify()
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


class _ChangeSignal:
    """Wakes tasks that wait for a condition, after each change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Report a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        while not condition():
            await self._changed.wait()


class _AioConnection:
    """One connection: its channel, its call, and the task that writes frames to it."""

    def __init__(self, endpoint: ServerEndpoint, changed: _ChangeSignal, protocol: StreamProtocol) -> None:
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
                self._changed.notify()
                await self._call.write(encode_client_message(frame))
            await self._call.done_writing()
