"""Protocol of a client's stream of camera frames, without network code: makes the messages to send, and interprets
those of the server.

No threads, no clock, no network: the caller holds its lock around each method.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edge_server.client import pictures
from edge_server.client.frame_flow_control import FlowControl
from edge_server.client.pictures import Image, Stamp
from edge_server.client.stream_errors import StreamError, early_end_error, unreadable_message_error
from edge_server.core.back_off import BackOff
from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_codec import (
    EncodedFrame,
    decode_server_message,
    encode_client_message,
    encode_frame,
)
from edge_server.protocol.frame_messages import (
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
from edge_server.version import __version__


@dataclass(frozen=True, slots=True)
class Callbacks:
    """User callbacks, called on the thread or task that reads results. They must not block for long."""

    on_opened: Callable[[StreamOpened], None] | None = None
    on_dropped: Callable[[FrameDropped], None] | None = None
    on_broken: Callable[[StreamError], None] | None = None

    def call(self, message: ServerMessage) -> None:
        """Call the callback for a message of the server, if there is one."""
        if isinstance(message, StreamOpened) and self.on_opened is not None:
            self.on_opened(message)
        if isinstance(message, FrameDropped) and self.on_dropped is not None:
            self.on_dropped(message)


class StreamProtocol:
    """One stream. The clients read `flow` and `opened`; `is_finished` means that no more frames follow."""

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
        # With `keeps_all` a frame waits for a free place in the mailbox, so the client must know of a drop at once.
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

    def make_frame(
        self,
        image: Image | Frame,
        *,
        header: FrameHeader | None,
        stamp: Stamp | None,
        frame_id: str,
        **layout: Any,
    ) -> EncodedFrame:
        """Return the frame for the arguments of `send`. Raises InvalidRequest for an invalid image.

        It is encoded here: a number out of range must raise here, not on the thread that sends the frame.
        """
        if isinstance(image, Frame):
            frame = image
        else:
            frame = pictures.make_frame(
                image, header or pictures.make_header(stamp, frame_id, self.flow.offered + 1), **layout
            )
        if not isinstance(frame.data, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"'data' of Frame must be bytes, got {type(frame.data).__name__}")
        return encode_frame(frame)

    def connect(self) -> bytes:
        """Start a connection; return its first message."""
        self.flow.connect()
        return self._opening

    def receive(self, data: bytes) -> ServerMessage:
        """Decode a message of the server and count it. Add the client's own drops to a result's `dropped`.

        Raises StreamError for a message that cannot be decoded.
        """
        try:
            message, frames_allowed = decode_server_message(data)
        except InvalidRequest as error:
            raise unreadable_message_error(error, self._address) from None
        self.flow.allow(frames_allowed)
        if isinstance(message, FrameResult):
            self._failures = 0
            self.flow.count_result(message.dropped)
            message.dropped = self.flow.drops_to_report(message.dropped)
        elif isinstance(message, FrameDropped):
            self.flow.count_drop_notice(message.reason)
        elif isinstance(message, StreamOpened):
            self.opened = message
        return message

    def end_connection(
        self, error: StreamError | None, random_fraction: float
    ) -> tuple[float | None, StreamError | None]:
        """Count the end of a connection, with an error or None. `random_fraction` is that of `BackOff.delay_s`.

        Return the wait before the next connection in seconds, None if no connection follows, and the error to report.
        Raises the error if it ends the stream.
        """
        self.flow.disconnect()
        if self.is_finished and self.flow.is_empty and (error is None or error.heals):
            return None, error
        error = error or early_end_error(self._address)
        if not error.heals or not self._reconnects:
            raise error
        self._failures += 1
        return self._back_off.delay_s(self._failures, random_fraction), error
