"""`FrameStream`, the client for programs with threads: sends camera frames to a model of a server and reads the
results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc

from edge_server.client.http2_call import Http2ClientCall
from edge_server.client.pictures import Image
from edge_server.client.server_connection import ServerEndpoint
from edge_server.client.stream_client import StreamClient
from edge_server.client.stream_errors import StreamError, status_error
from edge_server.client.stream_protocol import StreamProtocol
from edge_server.protocol.frame_codec import STREAM_PATH, frame_pieces
from edge_server.protocol.frame_messages import Frame, FrameResult

_SENDER_END_S = 2.0


class FrameStream(StreamClient[threading.Condition, "_GrpcioConnection | _Http2Connection"]):
    """Stream of frames to a model: any thread sends frames, one thread reads the results.

    `stream_id` names the camera; "" means a random id. `delivery.depth` also limits the frames that wait in the client.
    With `keeps_all` a frame is sent only when it replaces no other one in the server's mailbox: use it for files.
    `results` opens and reads the connections. With `reconnects`, it replaces a broken connection after an increasing
    wait (`back_off`). It calls `on_broken` with the reason, `on_opened` with the server's first message, and
    `on_dropped` with each drop if `delivery` requests notices.
    """

    _sender: _FrameSender | None = None

    def _make_signal(self) -> threading.Condition:
        return threading.Condition()

    def _connect(self) -> _GrpcioConnection | _Http2Connection:
        make = _GrpcioConnection if self._endpoint.needs_grpcio else _Http2Connection
        return make(self._endpoint, self._changed, self._protocol)

    def _pump(self) -> None:
        if (connection := self._connection) is not None:
            connection.pump()

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_room(self, timeout_s: float | None = None) -> bool:
        """Wait until a frame can be offered without replacing another one; False after the timeout or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._protocol.flow.has_room, timeout_s)
            return not self._is_over and self._protocol.flow.has_room

    def results(self, frames: Iterable[Image | Frame] | None = None, **layout: Any) -> Iterator[FrameResult]:
        """Yield results in the order of the frames, over all connections, until the stream is finished or closed.

        A failed frame has `error_code` and `error`. A thread sends `frames`, with `layout` as for `send`, and waits for
        room if the stream `keeps_all`. After the last one the stream is finished; errors of the iterable are raised
        here. Raises StreamError when the stream cannot continue, and ValueError when another caller reads the results
        already. If the caller reads slowly, the server slows down.
        """
        with self._changed:
            if self._is_reading:
                raise ValueError(f"the results of frame stream '{self.stream_id}' are being read already")
            self._is_reading = True
        try:
            if frames is not None:
                if self._sender is not None:
                    raise ValueError(f"frame stream '{self.stream_id}' was given frames already")
                self._sender = _FrameSender(self, frames, self._protocol.keeps_all, layout)
            while (connection := self._open_connection()) is not None:
                yield from self._read(connection)
            if self._sender is not None:
                self._sender.raise_error()
        finally:
            with self._changed:
                self._is_reading = False

    def close(self) -> None:
        """End the stream at once, from any thread. Waiting frames are dropped, frames in flight count as lost."""
        with self._changed:
            self._is_closed = True
            self._protocol.flow.clear()
            self._protocol.flow.disconnect()
            connection, self._connection = self._connection, None
            self._changed.notify_all()
        if connection is not None:
            connection.close()
        if self._sender is not None:
            self._sender.join()

    def _read(self, connection: _GrpcioConnection | _Http2Connection) -> Iterator[FrameResult]:
        """Yield the results of one connection. After its end, wait for the time of the next attempt."""
        error: StreamError | None = None
        try:
            for data in connection.call:
                with self._changed:
                    if self._is_closed:
                        return
                    message = self._protocol.receive(data)
                    self._changed.notify_all()
                    may_send = self._protocol.flow.may_send
                if may_send:
                    connection.pump()
                if isinstance(message, FrameResult):
                    yield message
                else:
                    self._callbacks.call(message)
        except grpc.RpcError as broken:
            error = status_error(broken.code(), broken.details(), self._endpoint.address)
        except StreamError as unreadable:
            error = unreadable
        self._end_connection(connection, error)

    def _end_connection(self, connection: _GrpcioConnection | _Http2Connection, error: StreamError | None) -> None:
        connection.close()
        with self._changed:
            if self._is_closed:
                return
            self._connection = None
            delay_s, reason = self._protocol.end_connection(error, random.random())
        if reason is not None and self._callbacks.on_broken is not None:
            self._callbacks.on_broken(reason)
        with self._changed:
            if delay_s is not None:
                self._changed.wait_for(lambda: self._is_closed, delay_s)


class _Http2Connection:
    """One connection: its call, see Http2ClientCall."""

    def __init__(self, endpoint: ServerEndpoint, changed: threading.Condition, protocol: StreamProtocol) -> None:
        self._changed = changed
        self._protocol = protocol
        self._opening: bytes | None = protocol.connect()
        flow = protocol.flow
        self.call = Http2ClientCall(
            endpoint,
            STREAM_PATH,
            self._next_message,
            lambda: protocol.is_finished and flow.is_empty,
            lambda: flow.in_flight > 0,
        )

    def pump(self) -> None:
        """Send what can be sent now."""
        self.call.pump()

    def close(self) -> None:
        """End the call and the connection."""
        self.call.close()

    def _next_message(self) -> Sequence[bytes | memoryview] | None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            return (opening,)
        with self._changed:
            frame = self._protocol.flow.take_frame(time.monotonic())
            if frame is None:
                return None
            self._changed.notify_all()
        return frame_pieces(frame)


class _GrpcioConnection:
    """One connection: its channel and its call. grpcio's sending thread iterates over it to get the messages."""

    def __init__(self, endpoint: ServerEndpoint, changed: threading.Condition, protocol: StreamProtocol) -> None:
        self._changed = changed
        self._protocol = protocol
        self._opening: bytes | None = protocol.connect()
        self._is_over = False
        self._channel = endpoint.channel(grpc)
        self.call = self._channel.stream_stream(STREAM_PATH)(self, metadata=tuple(endpoint.metadata) or None)
        self.call.add_callback(self._mark_ended)

    def __iter__(self) -> _GrpcioConnection:
        return self

    def pump(self) -> None:
        """Do nothing: grpcio's thread waits for the change."""

    def __next__(self) -> bytes:
        """Wait for a frame and for credit, and return the message. Stops when the connection or the stream ends."""
        with self._changed:
            if self._opening is not None:
                opening, self._opening = self._opening, None
                return opening
            while not self._is_over:
                frame = self._protocol.flow.take_frame(time.monotonic())
                if frame is not None:
                    self._changed.notify_all()
                    break
                if self._protocol.is_finished and self._protocol.flow.is_empty:
                    raise StopIteration
                self._changed.wait()
            else:
                raise StopIteration
        return b"".join(frame_pieces(frame))

    def close(self) -> None:
        """Cancel the call and close the channel."""
        self._mark_ended()
        self.call.cancel()
        self._channel.close()

    def _mark_ended(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class _FrameSender:
    """Thread that sends the frames of an iterable. It cannot interrupt the iterable: it ends after the next frame."""

    def __init__(self, stream: FrameStream, frames: Iterable[Image | Frame], waits: bool, layout: Any) -> None:
        self._stream = stream
        self._frames = frames
        self._waits = waits
        self._layout = layout
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"frames-{stream.stream_id}", daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        """Raise the error of the iterable, if any."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait up to _SENDER_END_S for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(_SENDER_END_S)

    def _run(self) -> None:
        try:
            for frame in self._frames:
                if self._waits:
                    self._stream.wait_for_room()
                if self._stream._is_over:
                    return
                self._stream.send(frame, **self._layout)
        except Exception as error:  # noqa: BLE001 - any error of the iterable is raised by `results`
            # If the stream was closed between the two lines above, `send` raises; that is not an error.
            if not self._stream._is_over:
                self._error = error
        finally:
            self._stream.finish()
