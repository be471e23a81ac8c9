"""A camera's stream for programs of asyncio."""

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
from edge_server.client.flow_control import BackOff, Counters
from edge_server.client.pictures import Image, Stamp
from edge_server.client.stream_errors import StreamError, from_status
from edge_server.client.stream_protocol import Conversation, Listeners
from edge_server.core.frame import Delivery, Frame, FrameDropped, FrameHeader, FrameResult, Returns, StreamOpened
from edge_server.protocol.frame_codec import STREAM_PATH, encode_client_message

_REASON_LOST = "Internal error from Core"
"""What grpc.aio says for ever instead of why a call ended, if a message was written after its end had come and before
the loop heard of it."""


class AioFrameStream:
    """As FrameStream, for one event loop: every method is called in it, and the callbacks are."""

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
        self._conversation = Conversation(
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
        self._listeners = Listeners(on_opened, on_dropped, on_broken)
        self._news = _News()
        self._link: _AioLink | None = None
        self._is_closed = False
        self._is_reading = False
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AioFrameStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def stream_id(self) -> str:
        return self._conversation.stream_id

    @property
    def opened(self) -> StreamOpened | None:
        """What the server said of the latest connection; None before the first."""
        return self._conversation.opened

    def counters(self) -> Counters:
        return self._conversation.flow.counters()

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
        """Offer a frame as FrameStream.send does: it waits for nothing, and is no coroutine."""
        frame = self._conversation.frame(
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
        self._conversation.flow.offer(frame, time.monotonic())
        self._news.tell()

    async def wait_for_room(self) -> bool:
        """Wait until a frame can be offered that makes no other give way; False when the stream is over."""
        await self._news.wait_for(lambda: self._is_over or self._conversation.flow.has_room)
        return not self._is_over

    def finish(self) -> None:
        """Offer no more frames: `results` ends when those offered were answered."""
        self._conversation.is_finished = True
        self._news.tell()

    async def results(
        self, frames: AsyncIterable[Image | Frame] | Iterable[Image | Frame] | None = None, **layout: Any
    ) -> AsyncIterator[FrameResult]:
        """Yield results as FrameStream.results does. `frames` are sent by a task; reading them must not block."""
        if self._is_reading:
            raise ValueError(f"the results of frame stream '{self.stream_id}' are being taken already")
        self._is_reading = True
        try:
            if frames is not None:
                if self._pump is not None:
                    raise ValueError(f"frame stream '{self.stream_id}' was given frames already")
                self._pump = asyncio.create_task(self._send_all(frames, layout))
            while (link := self._connected()) is not None:
                async for result in self._read(link):
                    yield result
            if self._pump is not None and not self._is_closed:
                await self._pump
        finally:
            self._is_reading = False

    async def close(self) -> None:
        """End the stream at once; what waits is dropped, what is under way counts as lost."""
        self._is_closed = True
        self._conversation.flow.clear()
        self._conversation.flow.disconnect()
        self._news.tell()
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        if self._pump is not None and self._pump is not asyncio.current_task():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._conversation.is_finished

    def _connected(self) -> _AioLink | None:
        """Return the connection, a new one when there is none; None when the stream is over."""
        finished = self._conversation.is_finished and self._conversation.flow.is_empty
        if self._is_closed or (finished and self._link is None):
            return None
        if self._link is None:
            self._link = _AioLink(self._endpoint, self._news, self._conversation)
        return self._link

    async def _read(self, link: _AioLink) -> AsyncIterator[FrameResult]:
        """Yield the results of one connection; when it ends, wait until it is time for the next one."""
        error: StreamError | None = None
        try:
            while (data := await link.read()) is not None:
                if self._is_closed:
                    return
                message = self._conversation.hear(data)
                self._news.tell()
                if isinstance(message, FrameResult):
                    yield message
                else:
                    self._listeners.tell(message)
        except grpc.aio.AioRpcError as broken:
            # As if the server had ended the call well: another try will be told the reason, should it still hold.
            if broken.details() != _REASON_LOST:
                error = from_status(broken.code(), broken.details(), self._endpoint.address)
        except StreamError as garbage:
            error = garbage
        except asyncio.CancelledError:
            # Reading a call that `close` cancelled raises this too; a task that is cancelled itself must end.
            if not self._is_closed:
                raise
        await self._lose(link, error)

    async def _lose(self, link: _AioLink, error: StreamError | None) -> None:
        await link.close()
        if self._is_closed:
            return
        self._link = None
        delay_s, why = self._conversation.end(error, random.random())
        if why is not None and self._listeners.on_broken is not None:
            self._listeners.on_broken(why)
        if delay_s is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait_for(lambda: self._is_closed), delay_s)

    async def _send_all(self, frames: AsyncIterable[Image | Frame] | Iterable[Image | Frame], layout: Any) -> None:
        try:
            async for frame in _each(frames):
                if self._conversation.keeps_all:
                    await self.wait_for_room()
                if self._is_over:
                    return
                self.send(frame, **layout)
        finally:
            self.finish()


class _News:
    """Wakes tasks that wait for a condition whenever something changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


class _AioLink:
    """One connection: its channel, its call, and the task that writes frames to it."""

    def __init__(self, endpoint: ServerEndpoint, news: _News, conversation: Conversation) -> None:
        self._news = news
        self._conversation = conversation
        self._channel = endpoint.channel(grpc.aio)
        self._call = self._channel.stream_stream(STREAM_PATH)(metadata=tuple(endpoint.metadata) or None)
        self._writer = asyncio.create_task(self._write(conversation.connect()))

    async def read(self) -> bytes | None:
        """Return the server's next message, None when it ended the call well. Raises AioRpcError when not."""
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
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        await self._channel.close()

    async def _write(self, opening: bytes) -> None:
        """Write what there is leave for. How the call ended is for its reader to tell."""
        flow = self._conversation.flow
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(opening)
            while True:
                await self._news.wait_for(lambda: flow.may_send or (self._conversation.is_finished and flow.is_empty))
                frame = flow.take(time.monotonic())
                if frame is None:
                    break
                self._news.tell()
                await self._call.write(encode_client_message(frame))
            await self._call.done_writing()


async def _each(frames: AsyncIterable[Image | Frame] | Iterable[Image | Frame]) -> AsyncIterator[Image | Frame]:
    if isinstance(frames, AsyncIterable):
        async for frame in frames:
            yield frame
    else:
        for frame in frames:
            yield frame
            # Where nothing else is waited for, as without `keeps_all`, the loop's other tasks must get their turn.
            await asyncio.sleep(0)
