"""HTTP/2 connection: parses frames on the reading thread, and sends frames from any thread.

RFC 9113; section numbers are given at each rule. One lock guards windows, queues and output. It is never held while
stream receivers are called. Frames are parsed in a buffer that the server's connections share, because one thread reads
them all in turn. A connection keeps only its own incomplete frame, and the frames beyond its share of a turn.

Shares. In one turn of the reading thread a connection receives once, of a large message at most its share of bytes. It
handles frames until it has opened its share of calls or used its share of time (`limits`). The frames that are left
wait in `_rest`, and the connection in the server's queue for a second share. Who needs more waits in a second queue,
which is served in turn while time is left. Header blocks that take long to decode are decoded only there. So a client
that needs little waits for a small share of each other client, whatever those send.

WINDOW_UPDATE costs the server about as much as a PING, but clients must send it. Streams and DATA pay for it: a stream
for six frames (grpcio sends two when a call begins and two for its response), each further DATA frame for three (gRPC's
C++ library sends 2.3 in a stream of small messages), and each KiB of DATA for one more. So clients may return every
frame and every KiB at once. WINDOW_UPDATE that nothing has paid for counts as a useless frame.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.limits import Http2Limits
from edge_server.frontends.http2.stream_interface import NoReceiver, Pieces, StreamReceiver
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode
from edge_server.http2.header_blocks import (
    MAX_HEADER_BLOCK_BYTES,
    TABLE_BYTES,
    HeaderBlock,
    HeaderFrames,
    HeaderMemory,
    HeaderReader,
    HPACKError,
    is_large,
    survey_block,
)

_LOG = logging.getLogger(__name__)

_DATA, _HEADERS, _WINDOW_UPDATE, _CONTINUATION = (
    frames.DATA, frames.HEADERS, frames.WINDOW_UPDATE, frames.CONTINUATION
)  # fmt: skip
_END_STREAM, _END_HEADERS, _PADDED = frames.END_STREAM, frames.END_HEADERS, frames.PADDED
_END_BOTH = _END_HEADERS | _END_STREAM
_HEADER = frames.HEADER
_pack, _unpack_from = _HEADER.pack, _HEADER.unpack_from
_unpack_uint32 = frames.UINT32.unpack_from
_unpack_update = frames.WINDOW_UPDATE_FRAME.unpack_from

_JOIN_BELOW_BYTES = 256 << 10
"""Output up to this size is joined and sent in one call. Above it, copying costs more than a gathering call."""

_MAX_JOINED_BYTES = frames.DEFAULT_FRAME_BYTES
"""Payload up to this size is joined to one frame, of a size that every client accepts, when nothing waits before it."""

_MAX_PIECES = 512
"""Pieces per sendmsg call. Linux accepts at most 1024."""

_READ_BYTES = 64 << 10
"""Largest read into the server's buffer. The rest of a large message is received directly into the receiver's
memory."""

_TARGET_FROM_BYTES = 4096
"""Smallest remainder of a frame for which the receiver is asked to provide memory."""

_SMALL_WINDOW_BYTES = 16
"""A DATA frame that a smaller window has cut pays for no WINDOW_UPDATE: each would cause such a frame again."""

_EMPTY_TABLE = b"\x20"
"""Sets the table's size to 0, RFC 7541 section 6.3."""

_TOO_LARGE_LIST_CHARGE = 64
"""How many useless frames a header list above the limit counts for."""

_STREAMS_PER_CHARGE = 32
"""Streams whose window one useless frame may change by SETTINGS. More of them count for more frames."""

_UPDATES_PER_STREAM = 6
_UPDATES_PER_FRAME = 3
"""WINDOW_UPDATE frames that an opened stream and a further DATA frame pay for."""

_UPDATE_BYTES = frames.WINDOW_UPDATE_FRAME.size
_UPDATE_SIZE_AND_KIND = 4 << 8 | _WINDOW_UPDATE
_UPDATES_IN_A_ROW = 16
"""WINDOW_UPDATE frames that are handled before the time of the turn is checked."""

_READS = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR

_GRANT_FROM_BYTES = limits.CONNECTION_WINDOW_BYTES // 4

_NO_RECEIVER = NoReceiver()

_GOING_AWAY = 2**31 - 1
"""Last stream number of the first GOAWAY. New streams are still accepted, section 6.8."""

_GOING_AWAY_PING = b"goingway"
"""Payload of the PING behind the first GOAWAY."""


class Stream:
    """HTTP/2 stream, created by its connection. Methods may be called from any thread. They do nothing after the stream
    is closed."""

    __slots__ = (
        "connection", "content_left", "ends_after_queue", "granted", "headers", "id", "is_closed", "is_remote_open",
        "queue", "received", "receiver", "send_window", "stalled_since_s", "wants_sent",
    )  # fmt: skip

    receiver: StreamReceiver

    def __init__(
        self, connection: Http2Connection, stream_id: int, headers: HeaderBlock, send_window: int, receive_window: int
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.headers = headers
        self.is_remote_open = True
        """Whether the client may send more on the stream."""
        self.is_closed = False
        self.content_left = headers.content_length
        """Bytes of content-length that have not arrived yet; -1 without content-length."""
        self.granted = receive_window
        """Total bytes that the client may send on the stream. Raised under the connection's lock."""
        self.received = 0
        """Bytes received. Only the reading thread counts them."""
        self.send_window = send_window
        self.queue: deque[tuple[bytes | memoryview, bool]] | None = None
        """Output that waits for windows or for the socket: pieces of payload (True) and whole frames (False)."""
        self.stalled_since_s = 0.0
        """When the queue was first seen to wait for the client; 0 after payload was sent."""
        self.ends_after_queue = False
        self.wants_sent = False

    @property
    def peer(self) -> tuple[str, int] | str:
        """The client's address and port, or the path of a Unix socket."""
        return self.connection.peer

    def respond(self, head: bytes, body: Pieces, trailers: bytes) -> None:
        """Send a whole response (encoded headers, payload, encoded trailers) and end the stream."""
        self.connection.send_response(self, head, body, trailers)

    def send(self, head: bytes | None, body: Pieces) -> bool:
        """Send headers if given, then payload. Return whether all of it went to the connection's output. If not,
        `StreamReceiver.on_sent` is called when it has."""
        return self.connection.send_data(self, head, body)

    def finish(self, block: bytes) -> None:
        """Send trailers after earlier output and end the stream. If no headers were sent, `block` is the headers."""
        self.connection.send_end(self, block)

    def reset(self, code: Http2ErrorCode) -> None:
        """End the stream at once by RST_STREAM. Unsent output is dropped."""
        self.connection.reset_stream(self, code)

    def consume(self, count: int) -> None:
        """Let the client send `count` more bytes."""
        self.connection.grant(self, count)

    def run_in_turn(self, call: Callable[[], None]) -> None:
        """Call a function on the reading thread in the connection's next turn. From that thread only."""
        self.connection.run_in_turn(call)


class ScheduledCall(Protocol):
    """Call that is made at a time, unless it is cancelled."""

    def cancel(self) -> None:
        """Drop the call, from any thread."""


class ReadingThread(Protocol):
    """The thread that reads a connection, as the connection and its streams use it."""

    limits: Http2Limits
    is_draining: bool
    now_s: float
    thread_id: int
    buffer: bytearray
    view: memoryview
    waiting: deque[Http2Connection]
    long_waiting: deque[Http2Connection]
    unsent: list[Http2Connection]
    max_output_wait_s: float
    calls_per_turn: int
    seconds_per_turn: float
    bytes_per_turn: int
    header_memory: HeaderMemory
    on_stream: Callable[[ReadingThread, Stream], StreamReceiver]

    def run_soon(self, call: Callable[[], None]) -> None:
        """Call a function on the reading thread after its current work."""

    def call_at(self, when_s: float, call: Callable[[], None]) -> ScheduledCall:
        """Call a function on the reading thread at `when_s` in time.monotonic time. From that thread only."""

    def guarded(self, call: Callable[[], None]) -> None:
        """Call a function and log its exceptions."""

    def watch(self, connection: Http2Connection, events: int) -> None:
        """Wait for these epoll events of a connection."""

    def drop(self, connection: Http2Connection, fault: ConnectionFault | None = None) -> None:
        """Close a connection."""


class Http2Connection:
    """HTTP/2 connection. The server creates it for each accepted socket, and only the server's thread reads it."""

    __slots__ = (
        "_age_end_s",
        "_blocked",
        "_bytes_left",
        "_calls_left",
        "_connection_grant",
        "_control_credit",
        "_credit_s",
        "_data_flags",
        "_data_left",
        "_data_padding",
        "_data_stream",
        "_frames_sent",
        "_free_updates",
        "_goaway_end_s",
        "_handshake_end_s",
        "_has_preface",
        "_has_sent",
        "_has_settings",
        "_header_frames",
        "_headers",
        "_initial_send_window",
        "_is_cut",
        "_is_ending",
        "_is_going_away",
        "_is_going_away_known",
        "_large_block",
        "_last_ping_s",
        "_limits",
        "_lock",
        "_max_send_frame",
        "_output",
        "_output_bytes",
        "_ping_sent_s",
        "_ping_strikes",
        "_queued_bytes",
        "_reset_credit",
        "_reset_ids",
        "_rest",
        "_send_window",
        "_sent",
        "_server",
        "_socket",
        "_stalled_since_s",
        "_streams",
        "_streams_opened",
        "_table_update",
        "_target",
        "_turn_calls",
        "_turn_end_s",
        "_unread_answers",
        "_unsent_since_s",
        "_updates_paid",
        "_watches_output",
        "_window_raised",
        "fd",
        "is_closed",
        "is_tls",
        "is_unsent",
        "is_waiting",
        "last_received_s",
        "last_stream_id",
        "peer",
    )  # fmt: skip

    def __init__(
        self, server: ReadingThread, sock: socket.socket, peer: tuple[str, int] | str, *, is_tls: bool
    ) -> None:
        now_s = monotonic()
        settings = server.limits
        self._server = server
        self._limits = settings
        self._socket = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.is_tls = is_tls
        """Whether the connection uses TLS. The library forbids reading while sending, so both hold the lock."""
        self._lock = threading.Lock()
        self.is_closed = False
        self.last_stream_id = 0
        self.is_unsent = False
        """Whether the connection is in the server's list of connections with unsent output."""
        self._unsent_since_s = 0.0
        """If `is_unsent`: when the oldest unsent output was made, 0 after it was sent early."""
        self._streams: dict[int, Stream] = {}
        self._reset_ids: dict[int, None] = {}
        """Streams closed while the client could still send. Frames already under way are no error, section 5.1."""

        # Receiving.
        self._rest = b""
        self._has_preface = self._has_settings = False
        self._headers = HeaderReader(settings.max_header_list_bytes, server.header_memory)
        self._header_frames = HeaderFrames()
        self._data_stream: Stream | None = None
        self._data_left = self._data_flags = self._data_padding = 0
        self._target: memoryview | None = None
        self._connection_grant = 0
        """Bytes received since the connection's window was last raised."""

        # The share of a turn.
        self.is_waiting = False
        """Whether the connection is in one of the server's queues, because its input was not handled completely."""
        self._is_cut = False
        """Whether `_rest` may begin with whole frames, or `_large_block` waits."""
        self._large_block: tuple[int, int, bytes] | None = None
        """Stream, flags and a header block, to be decoded when the connection is served from the queue."""
        self._turn_calls: deque[Callable[[], None]] = deque()
        self._calls_left = self._bytes_left = 0
        self._turn_end_s = 0.0

        # Sending; guarded by the lock.
        self._output: list[bytes | memoryview] = [
            frames.encode_greeting(
                {
                    frames.MAX_CONCURRENT_STREAMS: settings.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW_BYTES,
                    frames.MAX_FRAME_SIZE: frames.MAX_FRAME_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: settings.max_header_list_bytes,
                },
                limits.CONNECTION_WINDOW_BYTES,
            )
        ]
        self._output_bytes = len(self._output[0])
        self._unread_answers = 0
        """PING and SETTINGS acknowledgements queued since the output was last empty."""
        self._watches_output = False
        self._send_window = self._initial_send_window = frames.DEFAULT_WINDOW_BYTES
        self._max_send_frame = frames.DEFAULT_FRAME_BYTES
        self._table_update = b""
        """Prefix of the next header block, because the client wants a small table: RFC 7541 section 4.2."""
        self._blocked: dict[int, Stream] = {}
        """Streams with a nonempty queue, in the order in which they are served."""
        self._queued_bytes = 0
        """Payload bytes in the queues of all streams."""
        self._sent: list[Stream] = []
        """Streams whose receivers must be notified that their queues are empty."""
        self._is_going_away = self._is_going_away_known = self._is_ending = False
        self._goaway_end_s = 0.0
        """Until when the first GOAWAY may be unread."""

        # Timeouts and abuse limits.
        self._handshake_end_s = now_s + settings.handshake_s
        self.last_received_s = now_s
        self._ping_sent_s = 0.0
        self._last_ping_s = 0.0
        self._ping_strikes = 0
        self._has_sent = False
        """Whether HEADERS or DATA were sent since the last PING arrived."""
        self._streams_opened = self._frames_sent = self._window_raised = self._updates_paid = 0
        """What pays for WINDOW_UPDATE: streams, DATA frames beside those of `send_response`, and the sum by which the
        connection's send window was raised, from which the sent bytes follow; and how many were paid so far, of which
        `_free_updates` have not arrived yet."""
        self._free_updates = 0
        self._control_credit = settings.control_rate
        self._reset_credit = settings.control_rate
        self._credit_s = now_s
        self._age_end_s = now_s + settings.max_age_s if settings.max_age_s else 0.0
        self._stalled_since_s = 0.0
        """When the socket last accepted part of the waiting output; 0 when no output waits."""

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    @property
    def may_open_streams(self) -> bool:
        """Whether the client was asked to open its next streams elsewhere, but streams that it opened before it knew
        may still be on their way. False after `limits.GOAWAY_S`, as a dead client never acknowledges."""
        is_unknown = self._is_going_away and not (self._is_going_away_known or self._is_ending)
        return is_unknown and self._server.now_s < self._goaway_end_s

    @property
    def is_busy(self) -> bool:
        """Whether a stream is open or output waits."""
        return bool(self._streams or self._output)

    # -- receiving: the reading thread ------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Receive once and handle the data. Return whether there is more to handle that epoll does not report.

        Raises OSError when the connection is lost, and ConnectionFault.
        """
        view = self._server.view
        target = self._target
        rest = self._rest
        start = len(rest)
        if start:
            view[:start] = rest
            self._rest = b""
        has_more = False
        try:
            if self.is_tls:
                with self._lock:
                    count = self._socket.recv_into(target if target is not None else view[start : start + _READ_BYTES])
                    has_more = self._socket.pending() > 0  # type: ignore[attr-defined]
            elif target is None:
                count = self._socket.recv_into(view[start : start + _READ_BYTES])
            else:
                # Receive the rest of a message directly into its own memory, and the bytes after it into the buffer.
                byte_limit = self._bytes_left
                count = self._socket.recvmsg_into((target[:byte_limit], view[: max(0, byte_limit - len(target))]))[0]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._rest = rest
            return False
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the client closed the connection")
        self._ping_sent_s = 0.0
        self.last_received_s = self._server.now_s
        if target is not None:
            filled = min(count, len(target))
            self._target = None
            self._count_data(filled, self._data_stream)
            self._data_left -= filled
            stream = self._data_stream
            if stream is not None and not stream.is_closed:
                is_end = not self._data_left and bool(self._data_flags & _END_STREAM)
                if is_end:
                    stream.is_remote_open = False
                stream.receiver.on_filled(filled, is_end)
            count -= filled
            if not self._data_left:
                self._data_stream = None
        self._handle(start + count)
        if count == _READ_BYTES and self._target is not None:
            # As much as fitted: the rest of a large message, which has its own memory now, may be there too.
            self._bytes_left -= count
            has_more = has_more or self._bytes_left >= _READ_BYTES
        return has_more or self._is_cut

    def _resume(self) -> bool:
        """Handle frames that were received before. Otherwise as `_receive`."""
        rest, self._rest = self._rest, b""
        end = len(rest)
        self._server.view[:end] = rest
        self._is_cut = False
        large, self._large_block = self._large_block, None
        if large is not None:
            self._on_header_block(*large, may_take_long=True)
        self._handle(end)
        if self._is_cut or not self.is_tls:
            return self._is_cut
        with self._lock:
            return self._socket.pending() > 0  # type: ignore[attr-defined,no-any-return]

    def _handle(self, end: int) -> None:
        """Handle the bytes in the server's buffer, and prepare to receive the next ones."""
        if end:
            self._parse(end)
        stream = self._data_stream
        if (
            self._data_left >= _TARGET_FROM_BYTES
            and stream is not None
            and not (stream.is_closed or self._data_padding)
        ):
            target = stream.receiver.target(self._data_left)
            self._target = target[: self._data_left] if target else None
        if self._connection_grant >= _GRANT_FROM_BYTES:
            with self._lock:
                self._put(frames.encode_window_update(0, self._connection_grant))
                self._flush_if_elsewhere()
            self._connection_grant = 0

    def _parse(self, end: int) -> None:
        """Handle the frames in the server's buffer, up to byte `end`, within the connection's share of the turn."""
        buffer, view = self._server.buffer, self._server.view
        position = 0
        if not self._has_preface:
            size = min(end, len(frames.PREFACE))
            if buffer[:size] != frames.PREFACE[:size]:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 (gRPC)")
            if size < len(frames.PREFACE):
                self._rest = bytes(view[:end])
                return
            self._has_preface = True
            position = size
        streams, header_frames = self._streams, self._header_frames
        if self._data_left:
            position = self._take_data_part(position, end)
            if self._data_left:
                return
        while True:
            if end - position < 9:
                break
            if position and (self._calls_left <= 0 or monotonic() >= self._turn_end_s):
                self._is_cut = True
                break
            high, low, kind, flags, stream_id = _unpack_from(buffer, position)
            if kind == _WINDOW_UPDATE and self._free_updates and not header_frames.stream_id:
                position = self._raise_windows(position, end)
                if end - position < 9:
                    break
                high, low, kind, flags, stream_id = _unpack_from(buffer, position)
            size = high << 8 | low
            stream_id &= 0x7FFFFFFF
            body = position + 9
            stop = body + size
            if kind == _DATA:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and stop <= end
                    and not flags & _PADDED
                    and size
                    and stream.is_remote_open
                    and stream.content_left < 0
                    and size <= stream.granted - stream.received
                    and not header_frames.stream_id
                ):
                    # Usual case: a whole frame of an open stream.
                    stream.received += size
                    self._connection_grant += size
                    position = stop
                    if flags & _END_STREAM:
                        stream.is_remote_open = False
                        stream.receiver.on_data(view[body:stop], True)
                    else:
                        stream.receiver.on_data(view[body:stop], False)
                    continue
                if flags & _PADDED and stop > end and end - body < 1:
                    break
                position = self._take_data_part(self._begin_data(stream, stream_id, size, flags, body), end)
                if self._data_left:
                    return
                continue
            if header_frames.stream_id or not self._has_settings or size > MAX_HEADER_BLOCK_BYTES:
                self._check_frame(kind, size, stream_id)
            if stop > end:
                break
            if kind == _WINDOW_UPDATE:
                self._on_window_update(stream_id, size, body)
            elif kind in (_HEADERS, _CONTINUATION):
                if not stream_id & 1:
                    raise ConnectionFault(
                        Http2ErrorCode.PROTOCOL_ERROR, f"headers on stream {stream_id}: clients open odd ones"
                    )
                block = header_frames.add(kind, flags, stream_id, bytes(view[body:stop]))
                if block is not None:
                    self._on_header_block(stream_id, header_frames.flags, block)
            else:
                self._on_control_frame(kind, flags, stream_id, bytes(view[body:stop]))
            position = stop
        if position < end:
            self._rest = bytes(view[position:end])

    def _check_frame(self, kind: int, size: int, stream_id: int) -> None:
        """Raise ConnectionFault if the frame is not allowed now or is too large. Sections 4.2, 3.4 and 6.10."""
        if not self._has_settings and kind != frames.SETTINGS:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        self._header_frames.check(kind, stream_id)
        # Only DATA is handled in pieces. Every other frame must fit into the buffer.
        if size > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {size} bytes is too large"
            )

    # -- DATA, section 6.1

    def _begin_data(self, stream: Stream | None, stream_id: int, size: int, flags: int, body: int) -> int:
        """Begin a DATA frame whose payload may be incomplete. Return the position of the payload."""
        if not self._has_settings or self._header_frames.stream_id:
            self._check_frame(_DATA, 0, stream_id)
        if size > frames.MAX_FRAME_BYTES:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"a DATA frame has {size} bytes")
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "DATA on a stream that is not open")
            # The stream was closed while this frame was under way. Its bytes are counted and dropped.
            if stream_id not in self._reset_ids:
                self._charge_control()
            elif flags & _END_STREAM:
                self._forget_reset(stream_id)
        elif not stream.is_remote_open:
            self._fail_stream(stream, Http2ErrorCode.STREAM_CLOSED)
            stream = None
        elif size > stream.granted - stream.received:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window allows")
        if not size and not flags & _END_STREAM:
            self._charge_control()
        padding = 0
        if flags & _PADDED:
            if not size:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "a padded DATA frame is empty")
            padding = self._server.buffer[body]
            body += 1
            size -= 1
            self._count_data(1, stream)
            if stream is not None:
                # The receiver never consumes padding, so the window is restored here.
                self.grant(stream, 1 + padding)
            if padding > size:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
        if stream is not None and stream.content_left >= 0:
            stream.content_left -= size - padding
            is_short = bool(flags & _END_STREAM) and stream.content_left > 0
            if stream.content_left < 0 or is_short:  # section 8.1.1
                self._fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
                stream = None
        self._data_stream = stream
        self._data_left, self._data_flags, self._data_padding = size, flags, padding
        if not size:
            self._data_stream = None
            if stream is not None and flags & _END_STREAM:
                stream.is_remote_open = False
                stream.receiver.on_data(memoryview(b""), True)
        return body

    def _take_data_part(self, position: int, end: int) -> int:
        """Pass on the received part of the current DATA frame. Return the position after it."""
        count = min(self._data_left, end - position)
        if not count:
            return position
        stop = position + count
        stream = self._data_stream
        self._count_data(count, stream)
        self._data_left -= count
        if stream is not None and not stream.is_closed:
            payload = min(count, max(0, self._data_left + count - self._data_padding))
            is_end = not self._data_left and bool(self._data_flags & _END_STREAM)
            if is_end:
                stream.is_remote_open = False
            if payload or is_end:
                stream.receiver.on_data(self._server.view[position : position + payload], is_end)
        if not self._data_left:
            self._data_stream = None
            self._data_padding = 0
        return stop

    def _count_data(self, count: int, stream: Stream | None) -> None:
        self._connection_grant += count
        if stream is not None:
            stream.received += count

    def grant(self, stream: Stream, count: int) -> None:
        """See Stream.consume. Section 6.9."""
        if not count:
            return
        with self._lock:
            if stream.is_closed or not stream.is_remote_open:
                return
            stream.granted += count
            self._put(frames.encode_window_update(stream.id, count))
            self._flush_if_elsewhere()

    # -- HEADERS and CONTINUATION, sections 6.2, 6.10 and 8.1

    def _on_header_block(self, stream_id: int, flags: int, block: bytes, *, may_take_long: bool = False) -> None:
        """Handle a whole header block, or keep it for later if it takes long."""
        headers = self._headers.remembered.get(block)
        if headers is None:
            try:
                survey = survey_block(block)
                if not may_take_long and is_large(block, survey[0]):
                    self._large_block = (stream_id, flags, block)
                    self._is_cut = True
                    self._turn_end_s = 0.0
                    return
                headers = self._headers.read(block, survey)
            except HPACKError as error:
                raise ConnectionFault(Http2ErrorCode.COMPRESSION_ERROR, f"headers cannot be decoded: {error}") from None
            if headers.is_too_large:
                self._charge_control(_TOO_LARGE_LIST_CHARGE)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._open_stream(stream_id, headers, ends=bool(flags & _END_STREAM))
        elif not stream.is_remote_open:
            self._fail_stream(stream, Http2ErrorCode.STREAM_CLOSED)
        elif not flags & _END_STREAM or headers.trailers_problem() or stream.content_left > 0:
            self._fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            stream.is_remote_open = False
            stream.receiver.on_data(memoryview(b""), True)

    def _open_stream(self, stream_id: int, headers: HeaderBlock, *, ends: bool) -> None:
        if self._is_ending and stream_id > self.last_stream_id:
            return  # above the last GOAWAY's stream number: the client retries on another server, section 6.8
        if stream_id <= self.last_stream_id:
            # Section 5.1: the frame may have been under way when the stream was closed.
            self._charge_control()
            if stream_id not in self._reset_ids:
                raise ConnectionFault(Http2ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")
            if ends:
                self._forget_reset(stream_id)
            return
        self.last_stream_id = stream_id
        stream = Stream(self, stream_id, headers, self._initial_send_window, limits.STREAM_WINDOW_BYTES)
        if not headers.is_request or (ends and headers.content_length > 0):
            self._charge_control()
            self._refuse_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR, ends=ends)
            return
        if len(self._streams) >= self._limits.max_streams or self._queued_bytes > limits.QUEUED_BYTES:
            self._charge_control()
            self._refuse_stream(stream_id, Http2ErrorCode.REFUSED_STREAM, ends=ends)
            return
        self._streams[stream_id] = stream
        self._calls_left -= 1
        stream.receiver = self._server.on_stream(self._server, stream)
        if ends and not stream.is_closed:
            stream.is_remote_open = False
            stream.receiver.on_data(memoryview(b""), True)

    def _refuse_stream(self, stream_id: int, code: Http2ErrorCode, *, ends: bool) -> None:
        with self._lock:
            if not ends:
                self._remember_reset(stream_id)
            self._put(frames.encode_frame(frames.RST_STREAM, 0, stream_id, frames.UINT32.pack(code)))
            self._flush_if_elsewhere()

    def _remember_reset(self, stream_id: int) -> None:
        """Requires the lock."""
        reset_ids = self._reset_ids
        reset_ids[stream_id] = None
        if len(reset_ids) > limits.MAX_RESET_IDS:
            del reset_ids[next(iter(reset_ids))]

    def _forget_reset(self, stream_id: int) -> None:
        # Other threads remove the oldest entry meanwhile.
        with self._lock:
            self._reset_ids.pop(stream_id, None)

    def _is_idle(self, stream_id: int) -> bool:
        """Return whether the stream was never opened, so that a frame on it is an error. Section 5.1."""
        if not stream_id % 2:
            return True
        # Streams above the last GOAWAY's stream number are ignored with all their frames, section 6.8.
        return stream_id > self.last_stream_id and not self._is_ending

    # -- the other frames, sections 6.3 to 6.9

    def _on_control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.PING:
            if stream_id or len(payload) != 8:
                code = Http2ErrorCode.PROTOCOL_ERROR if stream_id else Http2ErrorCode.FRAME_SIZE_ERROR
                raise ConnectionFault(code, "PING with a stream, or not of 8 bytes")
            if flags & frames.ACK:
                self._charge_control()
                self._is_going_away_known = self._is_going_away_known or payload == _GOING_AWAY_PING
            else:
                self._on_ping(payload)
        elif kind == frames.GOAWAY:
            if stream_id:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY with a stream")
            frames.read_goaway(payload)
            self._charge_control()
            # The client opens no more streams. It closes the connection when the open ones have ended.
        elif kind == frames.PRIORITY:
            self._charge_control()
            if not stream_id:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
            if len(payload) != 5:
                stream = self._streams.get(stream_id)
                if stream is None:
                    raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 bytes")
                self._fail_stream(stream, Http2ErrorCode.FRAME_SIZE_ERROR)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "clients must not push")
        else:
            self._charge_control()  # unknown types are ignored, section 5.5

    def _raise_windows(self, position: int, end: int) -> int:
        """Handle the WINDOW_UPDATE frames in a row from `position` on, as long as they are paid for, are no error and
        let no stream send. Return the position behind them.

        gRPC's C++ library sends a row of them before most DATA frames.
        """
        buffer, streams = self._server.buffer, self._streams
        most = frames.MAX_WINDOW_BYTES
        last = min(end, position + min(self._free_updates, _UPDATES_IN_A_ROW) * _UPDATE_BYTES) - _UPDATE_BYTES
        start = position
        with self._lock:
            while position <= last:
                size_and_kind, _, stream_id, count = _unpack_update(buffer, position)
                if size_and_kind != _UPDATE_SIZE_AND_KIND or not count:
                    break
                if stream_id:
                    stream = streams.get(stream_id)
                    if stream is None or stream.queue or (window := stream.send_window + count) > most:
                        break
                    stream.send_window = window
                else:
                    window = self._send_window + count
                    if self._blocked or window > most:
                        break
                    self._send_window = window
                    self._window_raised += count
                position += _UPDATE_BYTES
        self._free_updates -= (position - start) // _UPDATE_BYTES
        return position

    def _on_window_update(self, stream_id: int, size: int, body: int) -> None:
        """Handle the WINDOW_UPDATE whose payload of `size` bytes begins at byte `body` of the server's buffer."""
        if size != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not of 4 bytes")
        count = _unpack_uint32(self._server.buffer, body)[0] & 0x7FFFFFFF
        stream = self._streams.get(stream_id)
        is_closed = stream is None and stream_id != 0
        if is_closed and self._is_idle(stream_id):
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
        if not (count or is_closed):
            self._charge_control()
            if stream is None:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self._fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
            return
        if self._free_updates:
            self._free_updates -= 1
        else:
            self._pay_update()
        if is_closed:
            return
        with self._lock:
            if stream is None:
                self._send_window += count
                self._window_raised += count
                is_too_much = self._send_window > frames.MAX_WINDOW_BYTES
            else:
                stream.send_window += count
                is_too_much = stream.send_window > frames.MAX_WINDOW_BYTES
                if stream.queue:
                    self._blocked[stream_id] = stream
            if self._blocked and not is_too_much:
                self._pump()
                self._flush_if_elsewhere()
        if is_too_much:
            if stream is None:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
            self._fail_stream(stream, Http2ErrorCode.FLOW_CONTROL_ERROR)

    def _pay_update(self) -> None:
        """Charge a WINDOW_UPDATE, unless DATA or a stream has paid for it: see the module's first lines."""
        opened = self._streams_opened + self._server.calls_per_turn - self._calls_left
        # Other threads may send meanwhile: values from before are as good.
        sent_bytes = frames.DEFAULT_WINDOW_BYTES + self._window_raised - self._send_window
        paid = _UPDATES_PER_STREAM * opened + _UPDATES_PER_FRAME * self._frames_sent + (sent_bytes >> 10)
        left = paid - self._updates_paid
        if left <= 0:
            self._charge_control()
            return
        # Half of what may be paid in advance: as much may be paid until these are used.
        self._free_updates = min(left, limits.MAX_FREE_UPDATES // 2) - 1
        self._updates_paid = paid

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        code = frames.read_uint32("RST_STREAM", payload)
        if self._is_idle(stream_id):
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
        # Endless opening and cancelling of streams costs the server more than the client (CVE-2023-44487).
        self._refill_credit()
        self._reset_credit -= 1
        if self._reset_credit < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many streams are cancelled")
        stream = self._streams.get(stream_id)
        if stream is not None:
            with self._lock:
                was_open = self._forget(stream)
            if was_open:
                stream.receiver.on_reset(code)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "SETTINGS with a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK is not empty")
            self._charge_control()
            return
        settings = frames.read_settings(payload)
        self._charge_control()
        self._has_settings = True
        self._handshake_end_s = 0.0
        with self._lock:
            window = self._initial_send_window
            for name, value in settings:
                if name == frames.INITIAL_WINDOW_SIZE:
                    window = value
                elif name == frames.MAX_FRAME_SIZE:
                    self._max_send_frame = value
                elif name == frames.HEADER_TABLE_SIZE and value < TABLE_BYTES:
                    # `encode_headers` uses no table.
                    self._table_update = _EMPTY_TABLE
            if window != self._initial_send_window:
                self._move_windows(window)
            self._put(frames.SETTINGS_ACK)
            self._count_answer()
            if self._blocked:
                self._pump()
            self._flush_if_elsewhere()

    def _move_windows(self, window: int) -> None:
        """Change the windows of all streams with the initial one, section 6.9.2. Requires the lock."""
        self._charge_control(len(self._streams) // _STREAMS_PER_CHARGE)
        change = window - self._initial_send_window
        self._initial_send_window = window
        for stream in self._streams.values():
            stream.send_window += change  # it may become negative
            if stream.queue:
                self._blocked[stream.id] = stream
            if stream.send_window > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")

    def _on_ping(self, payload: bytes) -> None:
        """Answer a PING and count PINGs that arrive too often: gRPC's rule for servers (gRFC A8)."""
        self._charge_control()
        now_s = self._server.now_s
        settings = self._limits
        has_leave = self._streams or settings.permits_keepalive_without_streams
        interval_s = settings.min_ping_interval_s if has_leave else max(settings.min_ping_interval_s, 7200.0)
        if self._has_sent:
            # As in gRPC's core: output sent since the last PING permits the next one.
            self._has_sent = False
            self._ping_strikes = 0
        elif self._last_ping_s and now_s - self._last_ping_s < interval_s:
            self._ping_strikes += 1
            if settings.max_ping_strikes and self._ping_strikes > settings.max_ping_strikes:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping_s = now_s
        with self._lock:
            self._count_answer()
            self._put(frames.encode_frame(frames.PING, frames.ACK, 0, payload))
            self._flush_if_elsewhere()

    def _count_answer(self) -> None:
        self._unread_answers += 1
        if self._unread_answers > limits.MAX_UNREAD_ANSWERS:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "answers to PING and SETTINGS are not read")

    def _charge_control(self, count: int = 1) -> None:
        """Charge useless frames. Raises ConnectionFault for too many of them."""
        self._control_credit -= count
        if self._control_credit < 0:
            self._refill_credit()
            if self._control_credit < 0:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _refill_credit(self) -> None:
        now_s = monotonic()
        rate = self._limits.control_rate
        gained = (now_s - self._credit_s) * rate
        self._credit_s = now_s
        self._control_credit = min(rate, self._control_credit + gained)
        self._reset_credit = min(rate, self._reset_credit + gained)

    # -- sending: any thread ----------------------------------------------------------------------------------------

    def send_response(self, stream: Stream, head: bytes, body: Pieces, trailers: bytes) -> None:
        """See Stream.respond."""
        size = sum(map(len, body))
        stream_id = stream.id
        head_size, trailers_size = len(head), len(trailers)
        with self._lock:
            if stream.is_closed:
                return
            if self._table_update:
                head, self._table_update = self._table_update + head, b""
                head_size += 1
            if (
                0 < size <= stream.send_window
                and size <= self._send_window
                and size <= self._max_send_frame
                and self._output_bytes < limits.OUTPUT_BYTES
                and head_size <= frames.DEFAULT_FRAME_BYTES
                and trailers_size <= frames.DEFAULT_FRAME_BYTES
            ):
                self._send_window -= size
                pieces = (
                    _pack(head_size >> 8, head_size & 255, _HEADERS, _END_HEADERS, stream_id),
                    head,
                    _pack(size >> 8, size & 255, _DATA, 0, stream_id),
                    *body,
                    _pack(trailers_size >> 8, trailers_size & 255, _HEADERS, _END_BOTH, stream_id),
                    trailers,
                )
                if size < _JOIN_BELOW_BYTES:
                    self._output.append(b"".join(pieces))
                else:
                    self._output.extend(pieces)
                self._output_bytes += size + head_size + trailers_size + 27
                self._has_sent = True
                if stream.is_remote_open:
                    self._close_stream(stream)
                else:
                    stream.is_closed = True
                    stream.receiver = _NO_RECEIVER
                    del self._streams[stream_id]
            else:
                self._queue_headers(stream, head, 0)
                self._queue_payload(stream, body)
                self._end_after_queue(stream, trailers)
            self._flush_if_elsewhere()

    def send_data(self, stream: Stream, head: bytes | None, body: Pieces) -> bool:
        """See Stream.send."""
        size = sum(map(len, body))
        with self._lock:
            if stream.is_closed:
                return True
            if head is not None:
                self._queue_headers(stream, head, 0)
            if (
                not stream.queue
                and 0 < size <= _MAX_JOINED_BYTES
                and size <= stream.send_window
                and size <= self._send_window
                and self._output_bytes < limits.OUTPUT_BYTES
            ):
                # Usual case: a small message that needs not wait.
                stream.send_window -= size
                self._send_window -= size
                self._frames_sent += 1
                self._has_sent = True
                self._output.append(b"".join((_pack(size >> 8, size & 255, _DATA, 0, stream.id), *body)))
                self._output_bytes += size + 9
                self._flush_if_elsewhere()
                return True
            if stream.ends_after_queue:
                return True
            self._queue_payload(stream, body)
            self._pump()
            is_sent = not stream.queue
            stream.wants_sent = not is_sent
            self._flush_if_elsewhere()
        return is_sent

    def send_end(self, stream: Stream, block: bytes) -> None:
        """See Stream.finish."""
        with self._lock:
            if stream.is_closed or stream.ends_after_queue:
                return
            self._end_after_queue(stream, block)
            self._flush_if_elsewhere()

    def reset_stream(self, stream: Stream, code: Http2ErrorCode) -> None:
        """See Stream.reset."""
        with self._lock:
            if not self._forget(stream):
                return
            self._put(frames.encode_frame(frames.RST_STREAM, 0, stream.id, frames.UINT32.pack(code)))
            self._flush_if_elsewhere()

    def _fail_stream(self, stream: Stream, code: Http2ErrorCode) -> None:
        """End a stream because of its client's error, section 5.4.2."""
        self._charge_control()
        with self._lock:
            was_open = self._forget(stream)
            if was_open:
                self._put(frames.encode_frame(frames.RST_STREAM, 0, stream.id, frames.UINT32.pack(code)))
                self._flush_if_elsewhere()
        if was_open:
            stream.receiver.on_reset(code)

    # -- under the lock

    def _queue_headers(self, stream: Stream, block: bytes, flags: int) -> None:
        """Send a header block after the waiting payload, in frames of a size that every client accepts."""
        if self._table_update and not stream.queue:
            block, self._table_update = self._table_update + block, b""
        most = frames.DEFAULT_FRAME_BYTES
        kind = _HEADERS
        for start in range(0, len(block), most) or (0,):
            part = block[start : start + most]
            own = (flags if kind == _HEADERS else 0) | (_END_HEADERS if start + most >= len(block) else 0)
            data = frames.encode_frame(kind, own, stream.id, part)
            if stream.queue:
                stream.queue.append((data, False))
            else:
                self._has_sent = True
                self._put(data)
            kind = _CONTINUATION

    def _queue_payload(self, stream: Stream, body: Pieces) -> None:
        if stream.queue is None:
            stream.queue = deque()
        for piece in body:
            if len(piece):
                stream.queue.append((piece, True))
                self._queued_bytes += len(piece)
        if stream.queue:
            self._blocked[stream.id] = stream

    def _end_after_queue(self, stream: Stream, block: bytes) -> None:
        stream.ends_after_queue = True
        self._queue_headers(stream, block, _END_STREAM)
        if stream.queue:
            self._pump()
        else:
            self._close_stream(stream)

    def _pump(self) -> None:
        """Move queued payload to the output as far as the windows allow, one frame per stream in turn.

        A stream with an exhausted window is left out until its window is raised, so each turn sends something.
        """
        blocked = self._blocked
        while blocked and self._send_window > 0 and self._output_bytes < limits.OUTPUT_BYTES:
            stream_id, stream = next(iter(blocked.items()))
            del blocked[stream_id]
            queue = stream.queue
            room = min(stream.send_window, self._send_window, self._max_send_frame, limits.OUTPUT_BYTES)
            if room <= 0 or not queue:
                continue
            size = 0
            pieces: list[bytes | memoryview] = []
            while queue and queue[0][1] and size < room:
                piece = queue.popleft()[0]
                if size + len(piece) > room:
                    whole = memoryview(piece)
                    queue.appendleft((whole[room - size :], True))
                    piece = whole[: room - size]
                size += len(piece)
                pieces.append(piece)
            stream.send_window -= size
            self._send_window -= size
            if size < room or size >= _SMALL_WINDOW_BYTES:
                self._frames_sent += 1
            self._queued_bytes -= size
            self._has_sent = True
            stream.stalled_since_s = 0.0
            self._put(frames.encode_frame_header(size, _DATA, 0, stream_id))
            for piece in pieces:
                self._put(piece)
            while queue and not queue[0][1]:
                self._put(queue.popleft()[0])
            if queue:
                blocked[stream_id] = stream
            elif stream.ends_after_queue:
                self._close_stream(stream)
            elif stream.wants_sent:
                stream.wants_sent = False
                self._sent.append(stream)

    def _close_stream(self, stream: Stream) -> None:
        """Close a stream after the server's last frame. See the state table in `stream_interface`."""
        stream.is_closed = True
        stream.receiver = _NO_RECEIVER
        self._streams.pop(stream.id, None)
        if stream.is_remote_open:
            self._remember_reset(stream.id)
            self._put(frames.encode_frame(frames.RST_STREAM, 0, stream.id, frames.UINT32.pack(Http2ErrorCode.NO_ERROR)))

    def _forget(self, stream: Stream) -> bool:
        """Drop a stream and its queue. Return False if it was already closed."""
        if stream.is_closed:
            return False
        stream.is_closed = True
        if stream.queue:
            self._queued_bytes -= sum(len(piece) for piece, is_payload in stream.queue if is_payload)
        stream.queue = None
        if stream.is_remote_open:
            self._remember_reset(stream.id)
        self._streams.pop(stream.id, None)
        self._blocked.pop(stream.id, None)
        return True

    def _put(self, data: bytes | memoryview) -> None:
        self._output.append(data)
        self._output_bytes += len(data)

    def _flush_if_elsewhere(self) -> None:
        """Send now, except on the reading thread. That thread sends once after all it has read, or earlier if that
        takes long."""
        server = self._server
        if threading.get_ident() != server.thread_id:
            self._flush()
            return
        if not self.is_unsent:
            self.is_unsent = True
            self._unsent_since_s = 0.0
            server.unsent.append(self)
        now_s = monotonic()
        if not self._unsent_since_s:
            self._unsent_since_s = now_s
        elif now_s - self._unsent_since_s > server.max_output_wait_s:
            self._unsent_since_s = 0.0
            self._flush()

    def _flush(self) -> None:
        """Send output as far as the socket accepts it. The reading thread continues when the socket accepts more."""
        output = self._output
        if not output or self.is_closed:
            return
        try:
            while output:
                if self._output_bytes <= _JOIN_BELOW_BYTES or self.is_tls:
                    data = output[0] if len(output) == 1 else b"".join(output)
                    output[:] = (data,)
                    sent = self._socket.send(data)
                else:
                    sent = self._socket.sendmsg(output[:_MAX_PIECES])
                self._stalled_since_s = 0.0
                self._output_bytes -= sent
                if not self._output_bytes:
                    output.clear()
                    self._unread_answers = 0
                    if self._blocked:
                        self._pump()
                    continue
                done = 0
                while sent >= len(output[done]):
                    sent -= len(output[done])
                    done += 1
                if sent:
                    output[done] = memoryview(output[done])[sent:]
                del output[:done]
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            # The reading thread gets the same error and closes the connection.
            output.clear()
            self._output_bytes = 0
        if bool(output) is not self._watches_output:
            self._watches_output = bool(output)
            self._server.watch(self, select.EPOLLIN | select.EPOLLOUT if output else select.EPOLLIN)
        if output and not self._stalled_since_s:
            self._stalled_since_s = monotonic()
        if self._sent and threading.get_ident() != self._server.thread_id:
            self._server.run_soon(self.flush)

    # -- events from the server's thread ----------------------------------------------------------------------------

    def on_event(self, kinds: int, *, is_turn: bool = False) -> None:
        """Handle epoll events of the connection; 0 sends the pending output. Never raises.

        `is_turn`: the server took the connection from its queue, to continue with input that was not handled.
        """
        try:
            if is_turn:
                self.is_waiting = False
                self._handle_input(is_turn=True)
            elif kinds & _READS and not self.is_waiting:
                self._handle_input()
            if self.is_unsent or kinds & select.EPOLLOUT:
                self.flush()
        except ConnectionFault as fault:
            self._server.drop(self, fault)
        except OSError:
            self._server.drop(self)
        except Exception:  # noqa: BLE001 - the thread's boundary
            # The thread serves all connections. An error in one must not end the others.
            _LOG.exception("unexpected error on the connection of %s", self.peer)
            self._server.drop(self, ConnectionFault(Http2ErrorCode.INTERNAL_ERROR, "internal error"))

    def _handle_input(self, *, is_turn: bool = False) -> None:
        """Receive and handle input, up to the connection's share of the turn."""
        server = self._server
        self._calls_left = server.calls_per_turn
        self._bytes_left = server.bytes_per_turn
        self._turn_end_s = end_s = monotonic() + server.seconds_per_turn
        calls = self._turn_calls
        while is_turn and calls:
            server.guarded(calls.popleft())
            if monotonic() >= end_s:
                break
        has_more = self._resume() if self._is_cut else self._receive()
        while has_more and not self._is_cut and monotonic() < end_s:
            has_more = self._receive()
        self._streams_opened += server.calls_per_turn - self._calls_left
        if has_more or calls:
            self._wait(is_long=is_turn)

    def run_in_turn(self, call: Callable[[], None]) -> None:
        """See Stream.run_in_turn."""
        self._turn_calls.append(call)
        self._wait(is_long=False)

    def _wait(self, *, is_long: bool) -> None:
        """Enter the server's queue, or the second one after a second share or for what takes long."""
        if not self.is_waiting:
            self.is_waiting = True
            server = self._server
            (server.long_waiting if is_long or self._large_block is not None else server.waiting).append(self)

    def flush(self) -> None:
        """Send as much as the socket accepts, and notify the receivers whose queues became empty."""
        while True:
            with self._lock:
                self.is_unsent = False
                self._flush()
                if not self._sent:
                    return
                sent, self._sent = self._sent, []
            for stream in sent:
                if not stream.is_closed:
                    stream.receiver.on_sent()
            if not self.is_unsent and not self._sent:
                return

    def begin_going_away(self) -> None:
        """Ask the client to open its next streams elsewhere. Streams opened here are still served. Section 6.8.

        The acknowledgement of the PING comes behind all streams that the client opened before it knew.
        """
        with self._lock:
            if not self._is_going_away:
                self._is_going_away = True
                self._goaway_end_s = self._server.now_s + limits.GOAWAY_S
                self._put(frames.encode_goaway(_GOING_AWAY, Http2ErrorCode.NO_ERROR))
                self._put(frames.encode_frame(frames.PING, 0, 0, _GOING_AWAY_PING))
                self._flush_if_elsewhere()

    def end_going_away(self, code: Http2ErrorCode = Http2ErrorCode.NO_ERROR, text: str = "") -> None:
        """Accept no more streams. Open ones continue."""
        with self._lock:
            if not self._is_ending:
                self._is_going_away = self._is_ending = True
                self._put(frames.encode_goaway(self.last_stream_id, code, text))
                self._flush_if_elsewhere()

    def fail(self, fault: ConnectionFault) -> None:
        """Send the reason to the client as far as it reads. The server then closes the connection."""
        with self._lock:
            if self._has_preface:
                self._put(frames.encode_goaway(self.last_stream_id, fault.code, fault.text))
                self._flush()

    def close(self, *, keeps_input: bool = False) -> socket.socket | None:
        """Notify the receivers and close the socket. On the reading thread.

        With `keeps_input` only the output ends, and the caller gets the socket, which it closes. It receives raw bytes,
        also after TLS.
        """
        kept = self._socket if keeps_input else None
        with self._lock:
            self.is_closed = True
            streams = list(self._streams.values())
            for stream in streams:
                stream.is_closed = True
                stream.queue = None
            self._streams.clear()
            self._blocked.clear()
            self._output.clear()
            self._output_bytes = 0
            self._target = None
            self._data_stream = None
            self._turn_calls.clear()
            self._headers.close()
            if kept is None:
                self._socket.close()
            else:
                with contextlib.suppress(OSError):
                    kept.shutdown(socket.SHUT_WR)
        for stream in streams:
            self._server.guarded(partial(stream.receiver.on_reset, Http2ErrorCode.CANCEL))
        return kept

    def tick(self, now_s: float) -> None:
        """Check timeouts. Raises ConnectionFault when the connection must end."""
        settings = self._limits
        if self._handshake_end_s and now_s >= self._handshake_end_s:
            raise ConnectionFault(Http2ErrorCode.SETTINGS_TIMEOUT, "the connection's preface did not come")
        if self._stalled_since_s and now_s - self._stalled_since_s >= settings.stall_s:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client reads nothing")
        if self._header_frames.stream_id and now_s - self.last_received_s >= settings.stall_s:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client stopped within a header block")
        self._headers.forget_excess()
        for stream in list(self._streams.values()):
            stream.receiver.on_tick(now_s)
            if stream.queue:
                if not stream.stalled_since_s:
                    stream.stalled_since_s = now_s
                elif now_s - stream.stalled_since_s >= settings.stall_s:
                    # The client keeps its window closed; the queue would be held forever.
                    self._fail_stream(stream, Http2ErrorCode.CANCEL)
        is_left = self._is_going_away and not (self._streams or self.may_open_streams)
        if settings.max_age_s and is_left and not self._server.is_draining:
            # GOAWAY was sent at an earlier tick, and the client has read it.
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the connection is too old")
        if self._age_end_s and now_s >= self._age_end_s:
            if not self._is_going_away:
                self.begin_going_away()
                self._age_end_s = now_s + settings.max_age_grace_s if settings.max_age_grace_s else 0.0
            else:
                raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the connection is too old")
        self._keep_alive(now_s)
        if self._is_ending and not self._streams and not self._output:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "")

    def _keep_alive(self, now_s: float) -> None:
        """Ping a silent client, and end the connection if it does not answer."""
        settings = self._limits
        if self._ping_sent_s:
            if now_s - self._ping_sent_s >= settings.keepalive_timeout_s:
                raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client does not answer PING")
            return
        if not settings.keepalive_time_s or now_s - self.last_received_s < settings.keepalive_time_s:
            return
        if self._streams or settings.permits_keepalive_without_streams or not settings.max_pings_without_data:
            self._ping_sent_s = now_s
            with self._lock:
                self._put(frames.encode_frame(frames.PING, 0, 0, bytes(8)))
                self._flush_if_elsewhere()
