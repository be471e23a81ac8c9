"""What both clients, with threads and with asyncio, say and understand: one stream over all its connections.

No threads, no clock, no network: the caller holds its own lock around every method.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edge_server import __version__
from edge_server.client.flow_control import BackOff, FlowControl
from edge_server.client.pictures import Image, Stamp, frame_of, header_of
from edge_server.client.stream_errors import StreamError, from_garbage, from_silence
from edge_server.core.frame import (
    Delivery,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    Returns,
    ServerMessage,
    StreamOpened,
    StreamRequest,
)
from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_codec import decode_server_message, encode_client_message


@dataclass(frozen=True, slots=True)
class Listeners:
    """Called on the thread, or in the task, that reads results; none of them may block for long."""

    on_opened: Callable[[StreamOpened], None] | None = None
    on_dropped: Callable[[FrameDropped], None] | None = None
    on_broken: Callable[[StreamError], None] | None = None

    def tell(self, message: ServerMessage) -> None:
        if isinstance(message, StreamOpened) and self.on_opened is not None:
            self.on_opened(message)
        if isinstance(message, FrameDropped) and self.on_dropped is not None:
            self.on_dropped(message)


class Conversation:
    """`flow` and `opened` are for everybody to read; `is_finished`: no more frames will be offered."""

    def __init__(
        self,
        address: str,
        model: str,
        *,
        version: int,
        stream_id: str,
        returns: Returns | None,
        delivery: Delivery | None,
        keeps_all: bool,
        client: str,
        reconnects: bool,
        back_off: BackOff | None,
    ) -> None:
        delivery = delivery or Delivery()
        # Where a frame waits for its place to be free, the client must hear at once when one was dropped all the same.
        self._request = StreamRequest(
            model=model,
            version=version,
            stream_id=stream_id or str(uuid.uuid4()),
            returns=returns or Returns(),
            delivery=replace(delivery, notifies_drops=True) if keeps_all else delivery,
            client=client or f"edge_server.client {__version__}",
        )
        self._opening = encode_client_message(self._request)
        self._address = address
        self._reconnects = reconnects
        self._back_off = back_off or BackOff()
        self._failures = 0
        self.keeps_all = keeps_all
        self.flow = FlowControl(delivery.depth, delivery.depth if keeps_all else 0)
        self.opened: StreamOpened | None = None
        self.is_finished = False

    @property
    def stream_id(self) -> str:
        return self._request.stream_id

    def frame(
        self,
        image: Image | Frame,
        *,
        header: FrameHeader | None,
        stamp: Stamp | None,
        frame_id: str,
        **layout: Any,
    ) -> Frame:
        """Return what `send` was given as a frame. Raises InvalidRequest when it cannot be one."""
        if isinstance(image, Frame):
            frame = image
        else:
            frame = frame_of(image, header or header_of(stamp, frame_id, self.flow.offered + 1), **layout)
        if not isinstance(frame.data, bytes | bytearray | memoryview):
            raise InvalidRequest(f"'data' of Frame must be bytes, got {type(frame.data).__name__}")
        # A number that does not fit is told to the sender of the frame, rather than to the thread that writes it.
        encode_client_message(replace(frame, data=b""))
        return frame

    def connect(self) -> bytes:
        """Begin a connection; return the message that opens it."""
        self.flow.connect()
        return self._opening

    def hear(self, data: bytes) -> ServerMessage:
        """Read a message of the server and count it. A result's `dropped` gets the frames added that were dropped here.

        Raises StreamError when it cannot be read.
        """
        try:
            message, frames_allowed = decode_server_message(data)
        except InvalidRequest as error:
            raise from_garbage(error, self._address) from None
        self.flow.allow(frames_allowed)
        if isinstance(message, FrameResult):
            self._failures = 0
            self.flow.settle(message.dropped)
            message.dropped = self.flow.drops_to_tell(message.dropped)
        elif isinstance(message, FrameDropped):
            self.flow.notice(message.reason)
        elif isinstance(message, StreamOpened):
            self.opened = message
        return message

    def end(self, error: StreamError | None, chance: float) -> tuple[float | None, StreamError | None]:
        """Note that the connection ended, with an error or well.

        Return how long to wait for the next one, None when there is to be none, and the error to tell of. Raises it
        when it ends the stream. `chance` is a random number, 0 to 1.
        """
        self.flow.disconnect()
        if self.is_finished and self.flow.is_empty and (error is None or error.heals):
            return None, error
        error = error or from_silence(self._address)
        if not error.heals or not self._reconnects:
            raise error
        self._failures += 1
        return self._back_off.delay_s(self._failures, chance), error
