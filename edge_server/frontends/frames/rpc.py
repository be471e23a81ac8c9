"""FrameService/Stream as a call of bytes: the thread of the call sends, one more thread reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from edge_server.core.frame import Frame, StreamRequest
from edge_server.errors import EdgeServerError, InvalidRequest, ServingFault
from edge_server.frontends.frames.stream import CameraStream
from edge_server.frontends.frames.streams import FrameStreams
from edge_server.protocol.frame_codec import decode_client_message, encode_server_message

_LOG = logging.getLogger(__name__)


class CallContext(Protocol):
    """As much of a gRPC call as is needed."""

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Have `callback` called when the call is over; False when it is already."""


class FrameRpc:
    """Answers the one RPC of the service."""

    def __init__(self, streams: FrameStreams) -> None:
        self._streams = streams

    def answers(self, requests: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        """Yield the server's messages. Raises EdgeServerError with whose status the call is to end."""
        first = next(requests, None)
        if first is None:
            return
        opening = decode_client_message(first)
        del first
        if not isinstance(opening, StreamRequest):
            raise InvalidRequest("the first message of a frame stream must be 'open', got 'frame'")
        stream = self._streams.open(opening)
        try:
            if not context.add_callback(stream.end):
                return
            threading.Thread(target=self._read, args=(requests, stream), name="frames-read", daemon=True).start()
            while (message := stream.next_message()) is not None:
                yield encode_server_message(*message)
        finally:
            stream.end()
            counts = stream.report().counts
            drops = ", ".join(f"{reason.name} {count}" for reason, count in counts.dropped.items()) or "none"
            _LOG.info(
                "frame stream '%s' is closed: %d frame(s) received, %d answered, dropped: %s",
                stream.terms.stream_id,
                counts.received,
                counts.answered,
                drops,
            )

    def _read(self, requests: Iterator[bytes], stream: CameraStream) -> None:
        """Bring frames to the stream until the client closes its side, leaves, or sends what is none."""
        try:
            while (data := _next(requests, stream)) is not None:
                frame = decode_client_message(data)
                del data
                if not isinstance(frame, Frame):
                    raise InvalidRequest(f"frame stream '{stream.terms.stream_id}' is open already, got another 'open'")
                stream.receive(frame, self._streams.fault_of(frame))
                # Not to hold a frame while waiting for the next.
                del frame
        except EdgeServerError as error:
            stream.end(error.detached())
        except Exception:  # noqa: BLE001 - the thread's boundary: nobody else would end the call
            _LOG.exception("reading the frame stream '%s' failed", stream.terms.stream_id)
            stream.end(ServingFault("internal error: reading the stream failed"))


def _next(requests: Iterator[bytes], stream: CameraStream) -> bytes | None:
    """Return the next message; None when there is none, and then the stream knows why."""
    try:
        data = next(requests, None)
    except Exception:  # noqa: BLE001 - grpcio raises errors of its own when a call is cancelled or breaks
        stream.end()
        return None
    if data is None:
        stream.close_input()
    return data
