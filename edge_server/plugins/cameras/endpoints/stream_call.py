"""Handler of one call of the RPC FrameService/Stream: passes its frames to a camera stream, and the results back.

It has no thread: workers send their results, and the transport's thread sends the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc.call import OK, CallStatus, Message, RpcCall, call_status, client_error, run_blocking
from edge_server.plugins.cameras.streams.camera_stream import CameraStream
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.protocol.frame_codec import decode_client_message, encode_server_message
from edge_server.protocol.frame_messages import Frame, StreamRequest

_LOG = logging.getLogger(__name__)


class FrameCall:
    """One FrameService/Stream call. `stream_registry` returns the registry, and creates it for the first camera."""

    def __init__(self, stream_registry: Callable[[], StreamRegistry], call: RpcCall) -> None:
        self._stream_registry = stream_registry
        self._call = call
        self._streams: StreamRegistry | None = None
        self._stream: CameraStream | None = None
        self._lock = threading.Lock()
        """Orders what one thread sets and another one checks: the stream and the flags of the call's end, and the flags
        of sending. Never held while a message is sent."""
        self._has_left = self._is_stopping = False
        self._may_send = True
        self._is_sending = self._must_flush = False
        self._end_logged = threading.Lock()
        """Locked by the first thread that closes the stream; this thread logs the end."""

    # -- events of the call

    def on_message(self, message: Message) -> None:
        stream = self._stream
        if stream is None:
            # Opening may block: it imports vision for the first camera, and reads the model's labels.
            run_blocking(self._call, partial(self._open, message))
            return
        try:
            frame = decode_client_message(message)
            if not isinstance(frame, Frame):
                raise InvalidRequest(f"frame stream '{stream.settings.stream_id}' is open already, got another 'open'")
            assert self._streams is not None
            stream.receive(frame, self._streams.fault_of(frame))
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            stream.end(client_error(error))
            return
        self._call.receive()

    def on_last_message(self) -> None:
        if self._stream is None:
            self._call.end(OK)
        else:
            self._stream.close_input()

    def on_woken(self) -> None:
        self._flush()

    def on_sent(self) -> None:
        self._may_send = True
        self._flush()

    def on_client_left(self) -> None:
        with self._lock:
            self._has_left, stream = True, self._stream
        if stream is not None:
            self._close(stream)

    def on_server_stopping(self) -> None:
        with self._lock:
            self._is_stopping, stream = True, self._stream
        if stream is not None:
            stream.stop()

    # -- opening, sending, and the end

    def _open(self, message: Message) -> None:
        try:
            opening = decode_client_message(message)
            del message
            if not isinstance(opening, StreamRequest):
                raise InvalidRequest("the first message of a frame stream must be 'open', got 'frame'")
            self._streams = self._stream_registry()
            stream = self._streams.open(opening)
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            self._call.end(call_status(client_error(error)))
            return
        with self._lock:
            self._stream = stream
            has_left, is_stopping = self._has_left, self._is_stopping
        if has_left:
            self._close(stream)
            return
        if is_stopping:
            stream.stop()
        # `wake` returns at once, as the stream calls it under the registry's lock. A worker sends its result itself:
        # to wake the transport's thread for it costs more than sending.
        stream.watch(self._call.wake, self._flush)
        self._call.receive()

    def _flush(self) -> None:
        """Send the waiting messages until the transport takes no more, on this thread or on the one that sends now."""
        with self._lock:
            self._must_flush = True
            if self._is_sending:
                return
            self._is_sending = True
        while True:
            with self._lock:
                self._is_sending, self._must_flush = self._must_flush, False
                if not self._is_sending:
                    return
            self._send_waiting()

    def _send_waiting(self) -> None:
        stream = self._stream
        if stream is None:
            return
        while self._may_send:
            try:
                message = stream.next_message()
                if message is not None:
                    # Cleared before `send`: `on_sent` may come before `send` returns.
                    self._may_send = False
                    if self._call.send((encode_server_message(*message),)):
                        self._may_send = True
                    continue
            except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
                self._end(stream, call_status(client_error(error)))
                return
            if stream.is_finished:
                self._end(stream, OK)
            return

    def _end(self, stream: CameraStream, status: CallStatus) -> None:
        self._may_send = False
        # Closed first: a client that has read the status finds its stream closed, whichever thread ends the call.
        self._close(stream)
        self._call.end(status)

    def _close(self, stream: CameraStream) -> None:
        stream.end()
        if not self._end_logged.acquire(blocking=False):
            return
        counts = stream.report().counts
        drops = ", ".join(f"{reason.name} {count}" for reason, count in counts.dropped.items()) or "none"
        _LOG.info(
            "frame stream '%s' is closed: %d frame(s) received, %d answered, dropped: %s",
            stream.settings.stream_id,
            counts.received,
            counts.answered,
            drops,
        )
