"""HTTP/2 connection of one client: joins its reader, its writer and its account, and ends it when its time is over.

RFC 9113; section numbers are given at each rule. The reader (`connection_reader`) owns the input, and runs on the
reading thread only. The writer (`connection_writer`) owns the open streams and the output, under a lock, because any
thread may respond. The account (`connection_account`) owns what the client has cost so far. This module has timeouts,
pings of the server, and the end.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic

from edge_server.frontends.http2 import limits
from edge_server.frontends.http2.connection_account import ConnectionAccount
from edge_server.frontends.http2.connection_reader import GOING_AWAY_PING, ConnectionReader
from edge_server.frontends.http2.connection_writer import ConnectionWriter
from edge_server.frontends.http2.stream_interface import ReadingThread
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, Http2ErrorCode

_LOG = logging.getLogger(__name__)

_READS = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR

_GOING_AWAY = frames.MAX_STREAM_ID
"""Last stream number of the first GOAWAY. New streams are still accepted, section 6.8."""


class Http2Connection:
    """HTTP/2 connection. The server creates it for each accepted socket, and only the server's thread uses it."""

    __slots__ = (
        "_age_end_s", "_goaway_end_s", "_handshake_end_s", "_is_going_away", "_ping_sent_s", "_server", "_socket",
        "account", "fd", "is_waiting", "peer", "reader", "writer",
    )  # fmt: skip

    def __init__(
        self, server: ReadingThread, sock: socket.socket, peer: tuple[str, int] | str, *, is_tls: bool
    ) -> None:
        now_s = monotonic()
        settings = server.limits
        self._server = server
        self._socket = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.account = ConnectionAccount(settings, now_s)
        self.writer = ConnectionWriter(server, sock, peer, self.account, is_tls=is_tls)
        self.reader = ConnectionReader(server, sock, self.account, self.writer, now_s, is_tls=is_tls)
        self.is_waiting = False
        """Whether the connection is in one of the server's queues, because its input was not handled completely."""
        self._is_going_away = False
        self._goaway_end_s = 0.0
        """Until when the first GOAWAY may be unread."""
        self._handshake_end_s = now_s + settings.handshake_s
        self._age_end_s = now_s + settings.max_age_s if settings.max_age_s else 0.0
        self._ping_sent_s = 0.0

    @property
    def stream_count(self) -> int:
        return len(self.writer.streams)

    @property
    def may_open_streams(self) -> bool:
        """Whether the client was asked to open its next streams elsewhere, but streams that it opened before it knew
        may still be on their way. False after `limits.GOAWAY_S`, as a dead client never acknowledges."""
        is_unknown = self._is_going_away and not (self.reader.is_going_away_known or self.account.is_ending)
        return is_unknown and self._server.now_s < self._goaway_end_s

    @property
    def is_busy(self) -> bool:
        """Whether a stream is open or output waits."""
        return bool(self.writer.streams or self.writer.output)

    # -- events

    def on_event(self, kinds: int, *, is_turn: bool = False) -> None:
        """Handle epoll events of the connection; 0 sends the pending output. Never raises.

        `is_turn`: the server took the connection from its queue, to continue with input that was not handled.
        """
        try:
            if is_turn or (kinds & _READS and not self.is_waiting):
                if is_turn:
                    self.is_waiting = False
                if self.reader.handle_input(is_turn=is_turn):
                    self._wait(is_long=is_turn)
            if self.writer.is_unsent or kinds & select.EPOLLOUT:
                self.writer.flush()
        except ConnectionFault as fault:
            self._server.drop(self.fd, fault)
        except OSError:
            self._server.drop(self.fd)
        except Exception:  # noqa: BLE001 - the thread's boundary
            # The thread serves all connections. An error in one must not end the others.
            _LOG.exception("unexpected error on the connection of %s", self.peer)
            self._server.drop(self.fd, ConnectionFault(Http2ErrorCode.INTERNAL_ERROR, "internal error"))

    def run_in_turn(self, call: Callable[[], None]) -> None:
        """See Stream.run_in_turn."""
        self.reader.turn_calls.append(call)
        self._wait(is_long=False)

    def _wait(self, *, is_long: bool) -> None:
        """Enter the server's queue, or the second one after a second share or for what takes long."""
        if not self.is_waiting:
            self.is_waiting = True
            server = self._server
            (server.long_waiting if is_long or self.reader.large_block is not None else server.waiting).append(self.fd)

    # -- the end

    def begin_going_away(self) -> None:
        """Ask the client to open its next streams elsewhere. Streams opened here are still served. Section 6.8.

        The acknowledgement of the PING comes behind all streams that the client opened before it knew.
        """
        if not self._is_going_away:
            self._is_going_away = True
            self._goaway_end_s = self._server.now_s + limits.GOAWAY_S
            ping = frames.encode_frame(frames.PING, 0, 0, GOING_AWAY_PING)
            self.writer.send_frames(frames.encode_goaway(_GOING_AWAY, Http2ErrorCode.NO_ERROR) + ping)

    def end_going_away(self) -> None:
        """Accept no more streams. Open ones continue."""
        if not self.account.is_ending:
            self._is_going_away = self.account.is_ending = True
            self.writer.send_frames(frames.encode_goaway(self.account.last_stream_id, Http2ErrorCode.NO_ERROR))

    def fail(self, fault: ConnectionFault) -> None:
        """Send the reason to the client as far as it reads. The server then closes the connection."""
        if self.reader.has_preface:
            self.writer.send_last(frames.encode_goaway(self.account.last_stream_id, fault.code, fault.text))

    def close(self, *, keeps_input: bool = False) -> socket.socket | None:
        """Notify the receivers and close the socket.

        With `keeps_input` only the output ends, and the caller gets the socket, which it closes. It receives raw bytes,
        also after TLS.
        """
        kept = self._socket if keeps_input else None
        with self.writer.lock:
            streams = self.writer.close()
            self.reader.close()
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
        settings, reader, writer = self._server.limits, self.reader, self.writer
        if not reader.has_settings and now_s >= self._handshake_end_s:
            raise ConnectionFault(Http2ErrorCode.SETTINGS_TIMEOUT, "the connection's preface did not come")
        if writer.stalled_since_s and now_s - writer.stalled_since_s >= settings.stall_s:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client reads nothing")
        if reader.header_frames.stream_id and now_s - reader.last_received_s >= settings.stall_s:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client stopped within a header block")
        reader.headers.forget_excess()
        for stream in list(writer.streams.values()):
            stream.receiver.on_tick(now_s)
            if stream.queue:
                if not stream.stalled_since_s:
                    stream.stalled_since_s = now_s
                elif now_s - stream.stalled_since_s >= settings.stall_s:
                    # The client keeps its window closed; the queue would be held forever.
                    reader.fail_stream(stream, Http2ErrorCode.CANCEL)
        is_left = self._is_going_away and not (writer.streams or self.may_open_streams)
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
        if self.account.is_ending and not self.is_busy:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "")

    def _keep_alive(self, now_s: float) -> None:
        """Ping a silent client, and end the connection if nothing comes after that."""
        settings = self._server.limits
        silent_since_s = self.reader.last_received_s
        if self._ping_sent_s >= silent_since_s:
            if now_s - self._ping_sent_s >= settings.keepalive_timeout_s:
                raise ConnectionFault(Http2ErrorCode.NO_ERROR, "the client does not answer PING")
            return
        if not settings.keepalive_time_s or now_s - silent_since_s < settings.keepalive_time_s:
            return
        if self.stream_count or settings.permits_keepalive_without_streams or not settings.max_pings_without_data:
            self._ping_sent_s = now_s
            self.writer.send_frames(frames.encode_frame(frames.PING, 0, 0, bytes(8)))
