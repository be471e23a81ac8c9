"""Output of one HTTP/2 connection: frames, flow control, and the streams that send. From any thread.

RFC 9113; section numbers are given at each rule. One lock guards windows, queues and output. It is never held while
stream receivers are called.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.connection_account import ConnectionAccount
from edge_server.frontends.http2.stream_interface import NoReceiver, Pieces, ReadingThread, StreamReceiver
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode
from edge_server.http2.header_blocks import TABLE_BYTES, HeaderBlock

_DATA, _HEADERS = frames.DATA, frames.HEADERS
_END_STREAM, _END_HEADERS = frames.END_STREAM, frames.END_HEADERS
_END_BOTH = _END_HEADERS | _END_STREAM
_pack = frames.HEADER.pack
_unpack_update = frames.WINDOW_UPDATE_FRAME.unpack_from

_JOIN_BELOW_BYTES = 256 << 10
"""Output up to this size is joined and sent in one call. Above it, copying costs more than a gathering call."""

_MAX_JOINED_BYTES = frames.DEFAULT_FRAME_BYTES
"""Payload up to this size is joined to one frame, of a size that every client accepts, when nothing waits before it."""

_MAX_PIECES = 512
"""Pieces per sendmsg call. Linux accepts at most 1024."""

_SMALL_WINDOW_BYTES = 16
"""A DATA frame that a smaller window has cut pays for no WINDOW_UPDATE: each would cause such a frame again."""

_EMPTY_TABLE = b"\x20"
"""Sets the table's size to 0, RFC 7541 section 6.3."""

_STREAMS_PER_CHARGE = 32
"""Streams whose window one useless frame may change by SETTINGS. More of them count for more frames."""

_UPDATE_BYTES = frames.WINDOW_UPDATE_FRAME.size
_UPDATE_SIZE_AND_KIND = 4 << 8 | frames.WINDOW_UPDATE

_NO_RECEIVER = NoReceiver()


class Stream:
    """HTTP/2 stream, created by its connection's reader. Methods may be called from any thread. They do nothing after
    the stream is closed."""

    __slots__ = (
        "content_left", "granted", "headers", "id", "is_closed", "is_remote_open", "last_frames", "queue",
        "received", "receiver", "send_window", "stalled_since_s", "wants_sent", "writer",
    )  # fmt: skip

    receiver: StreamReceiver

    def __init__(self, writer: ConnectionWriter, stream_id: int, headers: HeaderBlock) -> None:
        self.writer = writer
        self.id = stream_id
        self.headers = headers
        self.is_remote_open = True
        """Whether the client may send more on the stream."""
        self.is_closed = False
        self.content_left = headers.content_length
        """Bytes of content-length that have not arrived yet; -1 without content-length."""
        self.granted = limits.STREAM_WINDOW_BYTES
        """Total bytes that the client may send on the stream. Raised under the writer's lock."""
        self.received = 0
        """Bytes received. Only the reading thread counts them."""
        self.send_window = writer.initial_window
        self.queue: deque[bytes | memoryview] | None = None
        """Payload that waits for windows or for the socket."""
        self.last_frames: bytes | None = None
        """Trailers that end the stream after the queue."""
        self.stalled_since_s = 0.0
        """When the queue was first seen to wait for the client; 0 after payload was sent."""
        self.wants_sent = False

    @property
    def peer(self) -> tuple[str, int] | str:
        """The client's address and port, or the path of a Unix socket."""
        return self.writer.peer

    def respond(self, head: bytes, body: Pieces, trailers: bytes) -> None:
        """Send a whole response (encoded headers, payload, encoded trailers) and end the stream."""
        writer = self.writer
        size = sum(map(len, body))
        stream_id = self.id
        head_size, trailers_size = len(head), len(trailers)
        with writer.lock:
            if self.is_closed:
                return
            if writer.table_update:
                head, writer.table_update = writer.table_update + head, b""
                head_size += 1
            if (
                0 < size <= self.send_window
                and size <= writer.send_window
                and size <= writer.max_frame_bytes
                and writer.output_bytes < limits.OUTPUT_BYTES
                and head_size <= frames.DEFAULT_FRAME_BYTES
                and trailers_size <= frames.DEFAULT_FRAME_BYTES
            ):
                writer.send_window -= size
                pieces = (
                    _pack(head_size >> 8, head_size & 255, _HEADERS, _END_HEADERS, stream_id),
                    head,
                    _pack(size >> 8, size & 255, _DATA, 0, stream_id),
                    *body,
                    _pack(trailers_size >> 8, trailers_size & 255, _HEADERS, _END_BOTH, stream_id),
                    trailers,
                )
                if size < _JOIN_BELOW_BYTES:
                    writer.output.append(b"".join(pieces))
                else:
                    writer.output.extend(pieces)
                writer.output_bytes += size + head_size + trailers_size + 27
                writer.has_sent = True
                if self.is_remote_open:
                    self.close()
                else:
                    self.is_closed = True
                    self.receiver = _NO_RECEIVER
                    del writer.streams[stream_id]
            else:
                writer.put_headers(stream_id, 0, head)
                self._enqueue(body)
                self._end_after_queue(trailers)
            writer.flush_if_elsewhere()

    def send(self, head: bytes | None, body: Pieces) -> bool:
        """Send headers if given, then payload. Return whether all of it went to the connection's output. If not,
        `StreamReceiver.on_sent` is called when it has. Headers are given once, before any payload."""
        writer = self.writer
        size = sum(map(len, body))
        with writer.lock:
            if self.is_closed:
                return True
            if head is not None:
                writer.put_headers(self.id, 0, head)
            if (
                not self.queue
                and 0 < size <= _MAX_JOINED_BYTES
                and size <= self.send_window
                and size <= writer.send_window
                and writer.output_bytes < limits.OUTPUT_BYTES
            ):
                # Usual case: a small message that needs not wait.
                self.send_window -= size
                writer.send_window -= size
                writer.frames_sent += 1
                writer.has_sent = True
                writer.output.append(b"".join((_pack(size >> 8, size & 255, _DATA, 0, self.id), *body)))
                writer.output_bytes += size + 9
                writer.flush_if_elsewhere()
                return True
            if self.last_frames is not None:
                return True
            self._enqueue(body)
            writer.pump()
            is_sent = not self.queue
            self.wants_sent = not is_sent
            writer.flush_if_elsewhere()
        return is_sent

    def finish(self, block: bytes) -> None:
        """Send trailers after earlier output and end the stream. If no headers were sent, `block` is the headers."""
        writer = self.writer
        with writer.lock:
            if self.is_closed or self.last_frames is not None:
                return
            self._end_after_queue(block)
            writer.flush_if_elsewhere()

    def reset(self, code: Http2ErrorCode) -> bool:
        """End the stream at once by RST_STREAM. Unsent output is dropped. Return False if it was closed already."""
        writer = self.writer
        with writer.lock:
            was_open = self.forget()
            if was_open:
                writer.put(frames.encode_reset(self.id, code))
                writer.flush_if_elsewhere()
        return was_open

    def consume(self, count: int) -> None:
        """Let the client send `count` more bytes. Section 6.9."""
        if not count:
            return
        writer = self.writer
        with writer.lock:
            if self.is_closed or not self.is_remote_open:
                return
            self.granted += count
            writer.put(frames.encode_window_update(self.id, count))
            writer.flush_if_elsewhere()

    def run_in_turn(self, call: Callable[[], None]) -> None:
        """Call a function on the reading thread in the connection's next turn. From that thread only."""
        self.writer.server.run_in_turn(self.writer.fd, call)

    # -- under the writer's lock

    def _enqueue(self, body: Pieces) -> None:
        if self.queue is None:
            self.queue = deque()
        self.queue.extend(filter(len, body))
        if self.queue:
            self.writer.queued_bytes += sum(map(len, body))
            self.writer.blocked[self.id] = self

    def _end_after_queue(self, block: bytes) -> None:
        writer = self.writer
        if self.queue:
            # Other headers may be sent before these.
            self.last_frames = frames.encode_header_frames(self.id, _END_STREAM, block)
            writer.pump()
        else:
            writer.put_headers(self.id, _END_STREAM, block)
            self.close()

    def close(self) -> None:
        """Close the stream after the server's last frame. See the state table in `stream_interface`."""
        self.forget()
        self.receiver = _NO_RECEIVER
        if self.is_remote_open:
            self.writer.put(frames.encode_reset(self.id, Http2ErrorCode.NO_ERROR))

    def forget(self) -> bool:
        """Drop the stream and its queue. Return False if it was already closed."""
        if self.is_closed:
            return False
        writer = self.writer
        self.is_closed = True
        if self.queue:
            writer.queued_bytes -= sum(map(len, self.queue))
        self.queue = None
        if self.is_remote_open:
            writer.account.remember_reset(self.id)
        writer.streams.pop(self.id, None)
        writer.blocked.pop(self.id, None)
        return True


class ConnectionWriter:
    """Sends the frames of a connection. Owns its open streams and the windows in which they send.

    Methods that end in "Requires the lock" are called with `lock` held, the others without it.
    """

    __slots__ = (
        "_has_output_watch", "_is_tls", "_sent", "_socket", "_unread_answers", "_unsent_since_s",
        "_window_raised", "account", "blocked", "fd", "frames_sent", "has_sent", "initial_window", "is_closed",
        "is_unsent", "lock", "max_frame_bytes", "output", "output_bytes", "peer", "queued_bytes", "send_window",
        "server", "stalled_since_s", "streams", "table_update",
    )  # fmt: skip

    def __init__(
        self,
        server: ReadingThread,
        sock: socket.socket,
        peer: tuple[str, int] | str,
        account: ConnectionAccount,
        *,
        is_tls: bool,
    ) -> None:
        settings = server.limits
        self.server = server
        self._socket = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.account = account
        self._is_tls = is_tls
        self.lock = threading.Lock()
        self.is_closed = False
        self.streams: dict[int, Stream] = {}
        """Open streams by their numbers. Added to on the reading thread."""
        self.is_unsent = False
        """Whether the connection is in the server's list of connections with unsent output."""
        self._unsent_since_s = 0.0
        """If `is_unsent`: when the oldest unsent output was made, 0 after it was sent early."""
        self.output: list[bytes | memoryview] = [
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
        self.output_bytes = len(self.output[0])
        self._unread_answers = 0
        """PING and SETTINGS acknowledgements queued since the output was last empty."""
        self._has_output_watch = False
        self.stalled_since_s = 0.0
        """When the socket last accepted part of the waiting output; 0 when no output waits."""
        self.send_window = self.initial_window = frames.DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.table_update = b""
        """Prefix of the next header block, because the client wants a small table: RFC 7541 section 4.2."""
        self.blocked: dict[int, Stream] = {}
        """Streams with a nonempty queue, in the order in which they are served."""
        self.queued_bytes = 0
        """Payload bytes in the queues of all streams."""
        self._sent: list[Stream] = []
        """Streams whose receivers must be notified that their queues are empty."""
        self.has_sent = False
        """Whether HEADERS or DATA were sent since the last PING arrived."""
        self.frames_sent = self._window_raised = 0
        """DATA frames beside those of `Stream.respond`, and the sum by which `send_window` was raised."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of DATA. Other threads may send meanwhile: a value from before is as good."""
        return frames.DEFAULT_WINDOW_BYTES + self._window_raised - self.send_window

    # -- frames of the connection

    def send_frames(self, data: bytes) -> None:
        """Send whole frames that need no window."""
        with self.lock:
            self.put(data)
            self.flush_if_elsewhere()

    def send_answer(self, data: bytes) -> None:
        """Send an acknowledgement. Raises ConnectionFault if the client reads none of them."""
        with self.lock:
            self._put_answer(data)
            self.flush_if_elsewhere()

    def refuse_stream(self, stream_id: int, code: Http2ErrorCode, *, ends: bool) -> None:
        """Send RST_STREAM for a stream that is not opened. `ends`: the client sends no more on it."""
        with self.lock:
            if not ends:
                self.account.remember_reset(stream_id)
            self.put(frames.encode_reset(stream_id, code))
            self.flush_if_elsewhere()

    def _put_answer(self, data: bytes) -> None:
        self._unread_answers += 1
        if self._unread_answers > limits.MAX_UNREAD_ANSWERS:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "answers to PING and SETTINGS are not read")
        self.put(data)

    # -- windows, sections 6.5 and 6.9

    def apply_settings(self, settings: list[tuple[int, int]]) -> None:
        """Apply the client's SETTINGS, and acknowledge them. Raises ConnectionFault."""
        with self.lock:
            window = self.initial_window
            for name, value in settings:
                if name == frames.INITIAL_WINDOW_SIZE:
                    window = value
                elif name == frames.MAX_FRAME_SIZE:
                    self.max_frame_bytes = value
                elif name == frames.HEADER_TABLE_SIZE and value < TABLE_BYTES:
                    # `encode_headers` uses no table.
                    self.table_update = _EMPTY_TABLE
            if window != self.initial_window:
                self._move_windows(window)
            self._put_answer(frames.SETTINGS_ACK)
            if self.blocked:
                self.pump()
            self.flush_if_elsewhere()

    def _move_windows(self, window: int) -> None:
        """Change the windows of all streams with the initial one, section 6.9.2. Requires the lock."""
        self.account.charge(len(self.streams) // _STREAMS_PER_CHARGE)
        change = window - self.initial_window
        self.initial_window = window
        for stream in self.streams.values():
            stream.send_window += change  # it may become negative
            if stream.queue:
                self.blocked[stream.id] = stream
            if stream.send_window > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")

    def raise_window(self, stream: Stream | None, count: int) -> bool:
        """Raise the window of a stream, or that of the connection. Return False if it is too large then."""
        with self.lock:
            if stream is None:
                self.send_window += count
                self._window_raised += count
                is_allowed = self.send_window <= frames.MAX_WINDOW_BYTES
            else:
                stream.send_window += count
                is_allowed = stream.send_window <= frames.MAX_WINDOW_BYTES
                if stream.queue:
                    self.blocked[stream.id] = stream
            if self.blocked and is_allowed:
                self.pump()
                self.flush_if_elsewhere()
        return is_allowed

    def raise_windows(self, buffer: bytearray, start: int, end: int, most: int) -> int:
        """Handle at most `most` WINDOW_UPDATE frames in a row between `start` and `end` of a buffer, as long as they
        are no error and let no stream send. Return their number.

        gRPC's C++ library sends a row of them before most DATA frames.
        """
        streams = self.streams
        position, last = start, min(end, start + most * _UPDATE_BYTES) - _UPDATE_BYTES
        with self.lock:
            while position <= last:
                size_and_kind, _, stream_id, count = _unpack_update(buffer, position)
                if size_and_kind != _UPDATE_SIZE_AND_KIND or not count:
                    break
                if stream_id:
                    stream = streams.get(stream_id)
                    if stream is None or stream.queue:
                        break
                    window = stream.send_window + count
                    if window > frames.MAX_WINDOW_BYTES:
                        break
                    stream.send_window = window
                else:
                    window = self.send_window + count
                    if self.blocked or window > frames.MAX_WINDOW_BYTES:
                        break
                    self.send_window = window
                    self._window_raised += count
                position += _UPDATE_BYTES
        return (position - start) // _UPDATE_BYTES

    # -- output

    def put(self, data: bytes | memoryview) -> None:
        """Requires the lock."""
        self.output.append(data)
        self.output_bytes += len(data)

    def put_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        """Requires the lock."""
        if self.table_update:
            block, self.table_update = self.table_update + block, b""
        data = frames.encode_header_frames(stream_id, flags, block)
        self.has_sent = True
        self.output.append(data)
        self.output_bytes += len(data)

    def pump(self) -> None:
        """Move queued payload to the output as far as the windows allow, one frame per stream in turn. Requires the
        lock.

        A stream with an exhausted window is left out until its window is raised, so each turn sends something.
        """
        blocked = self.blocked
        while blocked and self.send_window > 0 and self.output_bytes < limits.OUTPUT_BYTES:
            stream_id, stream = next(iter(blocked.items()))
            del blocked[stream_id]
            queue = stream.queue
            room = min(stream.send_window, self.send_window, self.max_frame_bytes, limits.OUTPUT_BYTES)
            if room <= 0 or not queue:
                continue
            pieces, size = frames.take_pieces(queue, room)
            stream.send_window -= size
            self.send_window -= size
            if size < room or size >= _SMALL_WINDOW_BYTES:
                self.frames_sent += 1
            self.queued_bytes -= size
            self.has_sent = True
            stream.stalled_since_s = 0.0
            self.output.append(frames.encode_frame_header(size, _DATA, 0, stream_id))
            self.output += pieces
            self.output_bytes += size + frames.FRAME_HEADER_BYTES
            if queue:
                blocked[stream_id] = stream
            elif stream.last_frames is not None:
                self.put(stream.last_frames)
                stream.close()
            elif stream.wants_sent:
                stream.wants_sent = False
                self._sent.append(stream)

    def flush_if_elsewhere(self) -> None:
        """Send now, except on the reading thread. That thread sends once after all it has read, or earlier if that
        takes long. Requires the lock."""
        server = self.server
        if threading.get_ident() != server.thread_id:
            self._flush()
            return
        if not self.is_unsent:
            self.is_unsent = True
            self._unsent_since_s = 0.0
            server.unsent.append(self.fd)
        now_s = monotonic()
        if not self._unsent_since_s:
            self._unsent_since_s = now_s
        elif now_s - self._unsent_since_s > server.max_output_wait_s:
            self._unsent_since_s = 0.0
            self._flush()

    def _flush(self) -> None:
        """Send output as far as the socket accepts it. The reading thread continues when the socket accepts more."""
        output = self.output
        if not output or self.is_closed:
            return
        try:
            while output:
                if self.output_bytes <= _JOIN_BELOW_BYTES or self._is_tls:
                    data = output[0] if len(output) == 1 else b"".join(output)
                    output[:] = (data,)
                    sent = self._socket.send(data)
                else:
                    sent = self._socket.sendmsg(output[:_MAX_PIECES])
                self.stalled_since_s = 0.0
                self.output_bytes -= sent
                if not self.output_bytes:
                    output.clear()
                    self._unread_answers = 0
                    if self.blocked:
                        self.pump()
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
            self.output_bytes = 0
        if bool(output) is not self._has_output_watch:
            self._has_output_watch = bool(output)
            self.server.watch(self.fd, select.EPOLLIN | select.EPOLLOUT if output else select.EPOLLIN)
        if output and not self.stalled_since_s:
            self.stalled_since_s = monotonic()
        if self._sent and threading.get_ident() != self.server.thread_id:
            self.server.run_soon(self.flush)

    def flush(self) -> None:
        """Send as much as the socket accepts, and notify the receivers whose queues became empty. On the reading
        thread."""
        while True:
            with self.lock:
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

    def send_last(self, data: bytes) -> None:
        """Send frames as far as the client reads, before the connection is closed."""
        with self.lock:
            self.put(data)
            self._flush()

    def close(self) -> list[Stream]:
        """Drop streams and output. Return the streams that were open. Requires the lock."""
        self.is_closed = True
        streams = list(self.streams.values())
        for stream in streams:
            stream.is_closed = True
            stream.queue = None
        self.streams.clear()
        self.blocked.clear()
        self.output.clear()
        self.output_bytes = 0
        return streams
