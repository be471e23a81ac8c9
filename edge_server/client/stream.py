"""A camera's stream for programs with threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from edge_server.client.endpoint import ServerEndpoint, Tls
from edge_server.client.flow_control import BackOff, Counters
from edge_server.client.pictures import Image, Stamp
from edge_server.client.stream_errors import StreamError, from_status
from edge_server.client.stream_protocol import Conversation, Listeners
from edge_server.core.frame import Delivery, Frame, FrameDropped, FrameHeader, FrameResult, Returns, StreamOpened
from edge_server.protocol.frame_codec import STREAM_PATH, encode_client_message

_PUMP_END_S = 2.0


class FrameStream:
    """Send frames from any thread, and take results in one.

    `stream_id` names the camera, and is made up when "". `delivery.depth` is how many frames wait here too. With
    `keeps_all` a frame is sent only when its place in the server's mailbox is free, so that none has to give way: for
    files. A connection that breaks is made anew, after a wait that grows (`back_off`), unless not `reconnects`.
    `on_broken` hears why each time, `on_opened` what serves the stream, `on_dropped` of each drop if the delivery asks
    for notices; they are called on the thread that takes results. Connections are made and read by `results`.
    """

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
        self._changed = threading.Condition()
        self._link: _Link | None = None
        self._is_closed = False
        self._is_reading = False
        self._pump: _Pump | None = None

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stream_id(self) -> str:
        return self._conversation.stream_id

    @property
    def opened(self) -> StreamOpened | None:
        """What the server said of the latest connection; None before the first."""
        return self._conversation.opened

    def counters(self) -> Counters:
        with self._changed:
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
        """Offer a frame; the oldest one that waits gives way to it. Never blocks, from any thread.

        An array (height, width[, channels]) says all but its `encoding` (bgr8, bgra8, mono8, mono16 or 32FC1 when
        none is given). Bytes may be a JPEG or PNG file; other bytes, and a RegionSlice, need `height`, `width` and
        `encoding`, or `format`. A Frame is sent as it is and must not be changed any more, and neither may an array be
        when not `copies`. Without a `header`, one is made of `stamp` (seconds, or seconds and nanoseconds; None is
        now), `frame_id` and a running number. `age_us`: how old the picture is already. Raises InvalidRequest when the
        picture is none, ValueError on a stream that is closed or finished.
        """
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
        )  # fmt: skip
        with self._changed:
            if self._is_over:
                raise ValueError(f"frame stream '{self.stream_id}' is {'closed' if self._is_closed else 'finished'}")
            self._conversation.flow.offer(frame, time.monotonic())
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float | None = None) -> bool:
        """Wait until a frame can be offered that makes no other give way; False when the stream or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._conversation.flow.has_room, timeout_s)
            return not self._is_over and self._conversation.flow.has_room

    def finish(self) -> None:
        """Offer no more frames: `results` ends when those offered were answered. Any thread, any number of times."""
        with self._changed:
            self._conversation.is_finished = True
            self._changed.notify_all()

    def results(self, frames: Iterable[Image | Frame] | None = None, **layout: Any) -> Iterator[FrameResult]:
        """Yield results in the order of the frames, over all connections, until the stream is finished or closed.

        A frame that failed has `error_code` and `error` set. `frames` are sent meanwhile by a thread of their own,
        with `layout` as for `send`, waiting for room when the stream `keeps_all`; the stream is finished after the
        last one, and what reading them raises is raised here. Raises StreamError when the stream cannot go on, and
        ValueError when its results are being taken already. Not reading holds the server back.
        """
        self._begin_reading()
        try:
            if frames is not None:
                if self._pump is not None:
                    raise ValueError(f"frame stream '{self.stream_id}' was given frames already")
                self._pump = _Pump(self, frames, self._conversation.keeps_all, layout)
            while (link := self._connected()) is not None:
                yield from self._read(link)
            if self._pump is not None:
                self._pump.raise_fault()
        finally:
            with self._changed:
                self._is_reading = False

    def close(self) -> None:
        """End the stream at once, from any thread; what waits is dropped, what is under way counts as lost."""
        with self._changed:
            self._is_closed = True
            self._conversation.flow.clear()
            self._conversation.flow.disconnect()
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            link.close()
        if self._pump is not None:
            self._pump.join()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._conversation.is_finished

    def _begin_reading(self) -> None:
        with self._changed:
            if self._is_reading:
                raise ValueError(f"the results of frame stream '{self.stream_id}' are being taken already")
            self._is_reading = True

    def _connected(self) -> _Link | None:
        """Return the connection, a new one when there is none; None when the stream is over."""
        with self._changed:
            finished = self._conversation.is_finished and self._conversation.flow.is_empty
            if self._is_closed or (finished and self._link is None):
                return None
            if self._link is None:
                self._link = _Link(self._endpoint, self._changed, self._conversation)
            return self._link

    def _read(self, link: _Link) -> Iterator[FrameResult]:
        """Yield the results of one connection; when it ends, wait until it is time for the next one."""
        error: StreamError | None = None
        try:
            for data in link.call:
                with self._changed:
                    if self._is_closed:
                        return
                    message = self._conversation.hear(data)
                    self._changed.notify_all()
                if isinstance(message, FrameResult):
                    yield message
                else:
                    self._listeners.tell(message)
        except grpc.RpcError as broken:
            error = from_status(broken.code(), broken.details(), self._endpoint.address)
        except StreamError as garbage:
            error = garbage
        self._lose(link, error)

    def _lose(self, link: _Link, error: StreamError | None) -> None:
        link.close()
        with self._changed:
            if self._is_closed:
                return
            self._link = None
            delay_s, why = self._conversation.end(error, random.random())
        if why is not None and self._listeners.on_broken is not None:
            self._listeners.on_broken(why)
        with self._changed:
            if delay_s is not None:
                self._changed.wait_for(lambda: self._is_closed, delay_s)


class _Link:
    """One connection: its channel, its call, and the frames that grpcio's sending thread takes from the stream."""

    def __init__(self, endpoint: ServerEndpoint, changed: threading.Condition, conversation: Conversation) -> None:
        self._changed = changed
        self._conversation = conversation
        self._opening: bytes | None = conversation.connect()
        self._is_over = False
        self._channel = endpoint.channel(grpc)
        self.call = self._channel.stream_stream(STREAM_PATH)(self, metadata=tuple(endpoint.metadata) or None)
        self.call.add_callback(self._end)

    def __iter__(self) -> _Link:
        return self

    def __next__(self) -> bytes:
        """Wait for leave and for a frame, and return the next message. Ends with the connection or the stream."""
        with self._changed:
            if self._opening is not None:
                opening, self._opening = self._opening, None
                return opening
            while not self._is_over:
                frame = self._conversation.flow.take(time.monotonic())
                if frame is not None:
                    self._changed.notify_all()
                    break
                if self._conversation.is_finished and self._conversation.flow.is_empty:
                    raise StopIteration
                self._changed.wait()
            else:
                raise StopIteration
        return encode_client_message(frame)

    def close(self) -> None:
        self._end()
        self.call.cancel()
        self._channel.close()

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class _Pump:
    """A thread that sends what an iterable yields. One that waits inside the iterable ends with its next frame."""

    def __init__(self, stream: FrameStream, frames: Iterable[Image | Frame], waits: bool, layout: Any) -> None:
        self._stream = stream
        self._frames = frames
        self._waits = waits
        self._layout = layout
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"frames-{stream.stream_id}", daemon=True)
        self._thread.start()

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_PUMP_END_S)

    def _run(self) -> None:
        try:
            for frame in self._frames:
                if self._waits:
                    self._stream.wait_for_room()
                if self._stream._is_over:
                    return
                self._stream.send(frame, **self._layout)
        except Exception as error:  # noqa: BLE001 - whatever the iterable raises is raised where results are taken
            # A stream that was closed between two lines above refuses the frame, which is nobody's fault.
            if not self._stream._is_over:
                self._fault = error
        finally:
            self._stream.finish()
