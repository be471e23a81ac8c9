"""Base class of both clients (threads and asyncio): opens the stream, opens it again after a failure, and handles each
message."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from edge_server.client.frame_flow_control import Counters
from edge_server.client.pictures import Image, Stamp
from edge_server.client.server_connection import ServerEndpoint, Tls
from edge_server.client.stream_errors import StreamError
from edge_server.client.stream_protocol import Callbacks, StreamProtocol
from edge_server.core.back_off import BackOff
from edge_server.protocol.frame_messages import (
    Delivery,
    Frame,
    FrameDropped,
    FrameHeader,
    Returns,
    StreamOpened,
)


class ChangeSignal(Protocol):
    """Lock of a stream's state, which wakes those that wait for a change of it: as `threading.Condition`."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...

    def notify_all(self) -> None: ...


SignalT = TypeVar("SignalT", bound=ChangeSignal)
ConnectionT = TypeVar("ConnectionT")


class StreamClient(Generic[SignalT, ConnectionT]):
    """Base of FrameStream and AioFrameStream: all but waiting and the connection itself."""

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
        self._changed = self._make_signal()
        self._connection: ConnectionT | None = None
        self._is_closed = False
        self._is_reading = False

    def _make_signal(self) -> SignalT:
        raise NotImplementedError

    def _connect(self) -> ConnectionT:
        """Start a connection, with the lock held."""
        raise NotImplementedError

    def _pump(self) -> None:
        """Send what can be sent now, if the connection has no thread or task for it."""

    @property
    def stream_id(self) -> str:
        return self._protocol.stream_id

    @property
    def opened(self) -> StreamOpened | None:
        """The server's first message on the latest connection; None before the first connection."""
        return self._protocol.opened

    def counters(self) -> Counters:
        with self._changed:
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
        """Offer a frame; it replaces the oldest waiting one if necessary. Never blocks. May be called on any thread.

        An array has the shape (height, width[, channels]); its default `encoding` is bgr8, bgra8, mono8, mono16 or
        32FC1. Bytes can be a JPEG or PNG file; other bytes, and a RegionSlice, need `height`, `width` and `encoding`,
        or `format`. Do not change a Frame after this call, nor an array without `copies`. Without a `header`, one is
        made from `stamp` (seconds, or seconds and nanoseconds; None means now), `frame_id` and a running number.
        `age_us` is the age of the image. Raises InvalidRequest for an invalid image, ValueError when the stream is
        closed or finished.
        """
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
        )  # fmt: skip
        with self._changed:
            if self._is_over:
                raise ValueError(f"frame stream '{self.stream_id}' is {'closed' if self._is_closed else 'finished'}")
            self._protocol.flow.offer(frame, time.monotonic())
            self._changed.notify_all()
        self._pump()

    def finish(self) -> None:
        """Declare that no more frames follow: `results` ends after the results of the offered frames.

        May be called on any thread.
        """
        with self._changed:
            self._protocol.is_finished = True
            self._changed.notify_all()
        self._pump()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._protocol.is_finished

    def _open_connection(self) -> ConnectionT | None:
        """Return the connection, a new one if there is none, or None when the stream has ended."""
        with self._changed:
            finished = self._protocol.is_finished and self._protocol.flow.is_empty
            if self._is_closed or (finished and self._connection is None):
                return None
            if self._connection is None:
                self._connection = self._connect()
            return self._connection
