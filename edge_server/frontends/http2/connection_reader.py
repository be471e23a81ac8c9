"""Input of one HTTP/2 connection: receives and parses frames, on the reading thread.

RFC 9113; section numbers are given at each rule. Frames are parsed in a buffer that the server's connections share,
because one thread reads them all in turn. A connection keeps only its own incomplete frame, and the frames beyond its
share of a turn.

Shares. In one turn of the reading thread a connection receives once, of a large message at most its share of bytes. It
handles frames until it has opened its share of calls or used its share of time (`limits`). The frames that are left
wait in `_rest`, and the connection in the server's queue for a second share. Who needs more waits in a second queue,
which is served in turn while time is left. Header blocks that take long to decode are decoded only there. So a client
that needs little waits for a small share of each other client, whatever those send.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from time import monotonic

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.connection_account import ConnectionAccount
from edge_server.frontends.http2.connection_writer import ConnectionWriter, Stream
from edge_server.frontends.http2.stream_interface import ReadingThread
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode
from edge_server.http2.header_blocks import MAX_HEADER_BLOCK_BYTES, HeaderBlock, HeaderFrames, HeaderReader

_DATA, _HEADERS, _WINDOW_UPDATE, _CONTINUATION = (
    frames.DATA, frames.HEADERS, frames.WINDOW_UPDATE, frames.CONTINUATION
)  # fmt: skip
_END_STREAM, _PADDED = frames.END_STREAM, frames.PADDED
_unpack_from = frames.HEADER.unpack_from
_unpack_uint32 = frames.UINT32.unpack_from

_READ_BYTES = 64 << 10
"""Largest read into the server's buffer. The rest of a large message is received directly into the receiver's
memory."""

_TARGET_FROM_BYTES = 4096
"""Smallest remainder of a frame for which the receiver is asked to provide memory."""

_TOO_LARGE_LIST_CHARGE = 64
"""How many useless frames a header list above the limit counts for."""

_UPDATES_IN_A_ROW = 16
"""WINDOW_UPDATE frames that are handled before the time of the turn is checked."""

_GRANT_FROM_BYTES = limits.CONNECTION_WINDOW_BYTES // 4

GOING_AWAY_PING = b"goingway"
"""Payload of the PING behind the first GOAWAY."""


class ConnectionReader:
    """Reads the frames of a connection, opens its streams and passes their data to the receivers.

    Owns the input that is not handled yet, and the connection's share of a turn.
    """

    __slots__ = (
        "_account", "_bytes_left", "_calls_left", "_data_flags", "_data_left", "_data_padding", "_data_stream",
        "_is_cut", "_is_tls", "_rest", "_server", "_socket", "_target",
        "_turn_end_s", "_writer", "has_preface", "has_settings", "header_frames", "headers",
        "is_going_away_known", "large_block", "last_received_s", "turn_calls",
    )  # fmt: skip

    def __init__(
        self,
        server: ReadingThread,
        sock: socket.socket,
        account: ConnectionAccount,
        writer: ConnectionWriter,
        now_s: float,
        *,
        is_tls: bool,
    ) -> None:
        self._server = server
        self._socket = sock
        self._account = account
        self._writer = writer
        self._is_tls = is_tls
        """Whether the connection uses TLS. The library forbids reading while sending, so both hold the writer's
        lock."""
        self.last_received_s = now_s
        self._rest = b""
        self.has_preface = self.has_settings = False
        self.is_going_away_known = False
        """Whether the client acknowledged the PING behind the first GOAWAY."""
        self.headers = HeaderReader(server.limits.max_header_list_bytes, server.header_memory)
        self.header_frames = HeaderFrames()
        self._data_stream: Stream | None = None
        self._data_left = self._data_flags = self._data_padding = 0
        self._target: memoryview | None = None

        # The share of a turn.
        self._is_cut = False
        """Whether `_rest` may begin with whole frames, or `large_block` waits."""
        self.large_block: tuple[int, int, bytes] | None = None
        """Stream, flags and a header block, to be decoded when the connection is served from the queue."""
        self.turn_calls: deque[Callable[[], None]] = deque()
        """Functions to be called in the next turn."""
        self._calls_left = self._bytes_left = 0
        self._turn_end_s = 0.0

    def close(self) -> None:
        """Drop the input. Call once."""
        self._target = None
        self._data_stream = None
        self.turn_calls.clear()
        self.headers.close()

    # -- turns

    def handle_input(self, *, is_turn: bool) -> bool:
        """Receive and handle input, up to the connection's share of the turn. Return whether there is more to handle
        that epoll does not report.

        `is_turn`: the connection is served from a queue. Raises OSError when the connection is lost, and
        ConnectionFault.
        """
        server = self._server
        self._calls_left = server.calls_per_turn
        self._bytes_left = server.bytes_per_turn
        self._turn_end_s = end_s = monotonic() + server.seconds_per_turn
        calls = self.turn_calls
        while is_turn and calls:
            server.guarded(calls.popleft())
            if monotonic() >= end_s:
                break
        has_more = self._resume() if self._is_cut else self._receive()
        while has_more and not self._is_cut and monotonic() < end_s:
            has_more = self._receive()
        return has_more or bool(calls)

    def _receive(self) -> bool:
        """Receive once and handle the data. Return whether there is more to handle that epoll does not report."""
        view = self._server.view
        target = self._target
        rest = self._rest
        start = len(rest)
        if start:
            view[:start] = rest
            self._rest = b""
        has_more = False
        try:
            if self._is_tls:
                with self._writer.lock:
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
        self.last_received_s = self._server.now_s
        if target is not None:
            filled = min(count, len(target))
            self._target = None
            stream, is_end = self._count_part(filled)
            if stream is not None:
                stream.receiver.on_filled(filled, is_end)
            count -= filled
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
        large, self.large_block = self.large_block, None
        if large is not None:
            self._on_header_block(*large, may_take_long=True)
        self._handle(end)
        if self._is_cut or not self._is_tls:
            return self._is_cut
        with self._writer.lock:
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
        account = self._account
        if account.ungranted >= _GRANT_FROM_BYTES:
            self._writer.send_frames(frames.encode_window_update(0, account.ungranted))
            account.ungranted = 0

    def _parse(self, end: int) -> None:
        """Handle the frames in the server's buffer, up to byte `end`, within the connection's share of the turn."""
        buffer, view = self._server.buffer, self._server.view
        position = 0
        if not self.has_preface:
            size = min(end, len(frames.PREFACE))
            if buffer[:size] != frames.PREFACE[:size]:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 (gRPC)")
            if size < len(frames.PREFACE):
                self._rest = bytes(view[:end])
                return
            self.has_preface = True
            position = size
        account, header_frames = self._account, self.header_frames
        streams = self._writer.streams
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
            if kind == _WINDOW_UPDATE and account.free_updates and not header_frames.stream_id:
                most = min(account.free_updates, _UPDATES_IN_A_ROW)
                count = self._writer.raise_windows(buffer, position, end, most)
                account.free_updates -= count
                size = count * frames.WINDOW_UPDATE_FRAME.size
                position += size
                if end - position < 9:
                    self._server.has_lone_updates = size == end
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
                    account.ungranted += size
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
            if header_frames.stream_id or not self.has_settings or size > MAX_HEADER_BLOCK_BYTES:
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
        if not self.has_settings and kind != frames.SETTINGS:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        self.header_frames.check(kind, stream_id)
        # Only DATA is handled in pieces. Every other frame must fit into the buffer.
        if size > MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {size} bytes is too large"
            )

    # -- DATA, section 6.1

    def _begin_data(self, stream: Stream | None, stream_id: int, size: int, flags: int, body: int) -> int:
        """Begin a DATA frame whose payload may be incomplete. Return the position of the payload."""
        if not self.has_settings or self.header_frames.stream_id:
            self._check_frame(_DATA, 0, stream_id)
        if size > frames.MAX_FRAME_BYTES:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"a DATA frame has {size} bytes")
        if stream is None:
            if self._account.is_idle(stream_id):
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "DATA on a stream that is not open")
            # The stream was closed while this frame was under way. Its bytes are counted and dropped.
            if stream_id not in self._account.reset_ids:
                self._account.charge()
            elif flags & _END_STREAM:
                self._forget_reset(stream_id)
        elif not stream.is_remote_open:
            self.fail_stream(stream, Http2ErrorCode.STREAM_CLOSED)
            stream = None
        elif size > stream.granted - stream.received:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window allows")
        if not size and not flags & _END_STREAM:
            self._account.charge()
        padding = 0
        if flags & _PADDED:
            if not size:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "a padded DATA frame is empty")
            padding = self._server.buffer[body]
            body += 1
            size -= 1
            self._account.ungranted += 1
            if stream is not None:
                stream.received += 1
                # The receiver never consumes padding, so the window is restored here.
                stream.consume(1 + padding)
            if padding > size:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
        if stream is not None and stream.content_left >= 0:
            stream.content_left -= size - padding
            is_short = bool(flags & _END_STREAM) and stream.content_left > 0
            if stream.content_left < 0 or is_short:  # section 8.1.1
                self.fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
                stream = None
        self._data_stream = stream
        self._data_left, self._data_flags, self._data_padding = size, flags, padding
        if not size:
            self._data_stream = None
            if stream is not None and flags & _END_STREAM:
                self._end_input(stream)
        return body

    def _take_data_part(self, position: int, end: int) -> int:
        """Pass on the received part of the current DATA frame. Return the position after it."""
        count = min(self._data_left, end - position)
        if count:
            payload = min(count, max(0, self._data_left - self._data_padding))
            stream, is_end = self._count_part(count)
            if stream is not None and (payload or is_end):
                stream.receiver.on_data(self._server.view[position : position + payload], is_end)
        return position + count

    def _count_part(self, count: int) -> tuple[Stream | None, bool]:
        """Count a received part of the current DATA frame. Return its stream, None if that is closed, and whether the
        client sends no more on it."""
        stream = self._data_stream
        self._account.ungranted += count
        self._data_left -= count
        if not self._data_left:
            self._data_stream = None
        if stream is None:
            return None, False
        stream.received += count
        if stream.is_closed:
            return None, False
        is_end = not self._data_left and bool(self._data_flags & _END_STREAM)
        if is_end:
            stream.is_remote_open = False
        return stream, is_end

    @staticmethod
    def _end_input(stream: Stream) -> None:
        """Handle that the client's side of a stream ends without payload."""
        stream.is_remote_open = False
        stream.receiver.on_data(memoryview(b""), True)

    # -- HEADERS and CONTINUATION, sections 6.2, 6.10 and 8.1

    def _on_header_block(self, stream_id: int, flags: int, block: bytes, *, may_take_long: bool = False) -> None:
        """Handle a whole header block, or keep it for later if it takes long."""
        headers = self.headers.remembered.get(block)
        if headers is None:
            headers = self.headers.read(block, may_take_long=may_take_long)
            if headers is None:
                self.large_block = (stream_id, flags, block)
                self._is_cut = True
                self._turn_end_s = 0.0
                return
            if headers.is_too_large:
                self._account.charge(_TOO_LARGE_LIST_CHARGE)
        stream = self._writer.streams.get(stream_id)
        if stream is None:
            self._open_stream(stream_id, headers, ends=bool(flags & _END_STREAM))
        elif not stream.is_remote_open:
            self.fail_stream(stream, Http2ErrorCode.STREAM_CLOSED)
        elif not flags & _END_STREAM or headers.trailers_problem() or stream.content_left > 0:
            self.fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            self._end_input(stream)

    def _open_stream(self, stream_id: int, headers: HeaderBlock, *, ends: bool) -> None:
        account, writer = self._account, self._writer
        if account.is_ending and stream_id > account.last_stream_id:
            return  # above the last GOAWAY's stream number: the client retries on another server, section 6.8
        if stream_id <= account.last_stream_id:
            # Section 5.1: the frame may have been under way when the stream was closed.
            account.charge()
            if stream_id not in account.reset_ids:
                raise ConnectionFault(Http2ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")
            if ends:
                self._forget_reset(stream_id)
            return
        account.last_stream_id = stream_id
        if not headers.is_request or (ends and headers.content_length > 0):
            account.charge()
            writer.refuse_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR, ends=ends)
            return
        server = self._server
        if len(writer.streams) >= server.limits.max_streams or writer.queued_bytes > limits.QUEUED_BYTES:
            account.charge()
            writer.refuse_stream(stream_id, Http2ErrorCode.REFUSED_STREAM, ends=ends)
            return
        stream = writer.streams[stream_id] = Stream(writer, stream_id, headers)
        account.streams_opened += 1
        self._calls_left -= 1
        stream.receiver = server.on_stream(server, stream)
        if ends and not stream.is_closed:
            self._end_input(stream)

    def _forget_reset(self, stream_id: int) -> None:
        # Other threads remove the oldest entry meanwhile.
        with self._writer.lock:
            self._account.reset_ids.pop(stream_id, None)

    # -- the other frames, sections 6.3 to 6.9

    def _on_control_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.RST_STREAM:
            code = frames.read_uint32("RST_STREAM", payload)
            if self._account.is_idle(stream_id):
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
            self._account.charge_reset()
            stream = self._writer.streams.get(stream_id)
            if stream is not None:
                with self._writer.lock:
                    was_open = stream.forget()
                if was_open:
                    stream.receiver.on_reset(code)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.PING:
            if stream_id or len(payload) != 8:
                reason = Http2ErrorCode.PROTOCOL_ERROR if stream_id else Http2ErrorCode.FRAME_SIZE_ERROR
                raise ConnectionFault(reason, "PING with a stream, or not of 8 bytes")
            if flags & frames.ACK:
                self._account.charge()
                self.is_going_away_known = self.is_going_away_known or payload == GOING_AWAY_PING
            else:
                writer = self._writer
                self._account.charge_ping(
                    self._server.now_s, has_streams=bool(writer.streams), has_sent=writer.has_sent
                )
                writer.has_sent = False
                writer.send_answer(frames.encode_frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.GOAWAY:
            if stream_id:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "GOAWAY with a stream")
            frames.read_goaway(payload)
            self._account.charge()
            # The client opens no more streams. It closes the connection when the open ones have ended.
        elif kind == frames.PRIORITY:
            self._account.charge()
            if not stream_id:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
            if len(payload) != 5:
                stream = self._writer.streams.get(stream_id)
                if stream is None:
                    raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not of 5 bytes")
                self.fail_stream(stream, Http2ErrorCode.FRAME_SIZE_ERROR)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "clients must not push")
        else:
            self._account.charge()  # unknown types are ignored, section 5.5

    def _on_window_update(self, stream_id: int, size: int, body: int) -> None:
        """Handle the WINDOW_UPDATE whose payload of `size` bytes begins at byte `body` of the server's buffer."""
        if size != 4:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not of 4 bytes")
        count = _unpack_uint32(self._server.buffer, body)[0] & 0x7FFFFFFF
        stream = self._writer.streams.get(stream_id)
        is_closed = stream is None and stream_id != 0
        if is_closed and self._account.is_idle(stream_id):
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
        if not (count or is_closed):
            self._account.charge()
            if stream is None:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.fail_stream(stream, Http2ErrorCode.PROTOCOL_ERROR)
            return
        self._account.charge_update(self._writer.frames_sent, self._writer.bytes_sent)
        if is_closed or self._writer.raise_window(stream, count):
            return
        if stream is None:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
        self.fail_stream(stream, Http2ErrorCode.FLOW_CONTROL_ERROR)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "SETTINGS with a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with ACK is not empty")
            self._account.charge()
            return
        settings = frames.read_settings(payload)
        self._account.charge()
        self.has_settings = True
        self._writer.apply_settings(settings)

    def fail_stream(self, stream: Stream, code: Http2ErrorCode) -> None:
        """End a stream because of its client's error, section 5.4.2."""
        self._account.charge()
        if stream.reset(code):
            stream.receiver.on_reset(code)
