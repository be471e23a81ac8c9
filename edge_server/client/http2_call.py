"""Client side of one bidirectional gRPC call, without grpcio, on an HTTP/2 connection of its own: sends camera frames
without copying them (TLS copies once), and starts at most one thread.

The threads that offer frames write to the socket, and the thread that takes results reads from it. grpcio copies each
frame twice and passes it through several threads, which costs more than the frame itself; it stays for what this module
does not do, see `ServerEndpoint.needs_grpcio`. Specification: RFC 9113, and PROTOCOL-HTTP2.md of gRPC.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import grpc

from edge_server.client.server_connection import CONNECT_TIMEOUT_S, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, ServerEndpoint
from edge_server.client.stream_errors import StreamError, status_error
from edge_server.http2 import frames
from edge_server.http2.frames import ConnectionFault, encode_frame
from edge_server.http2.grpc_calls import PREFIX, RESET_STATUS, read_status, request_fields, take_message
from edge_server.http2.header_blocks import MAX_HEADER_BLOCK_BYTES, HeaderFrames, HeaderReader, encode_headers
from edge_server.version import __version__

Pieces = Sequence[bytes | memoryview]

_STREAM = 1
"""The only stream of a connection."""
_WINDOW = frames.MAX_WINDOW_BYTES
"""The server may always send: a client that does not read is noticed by the socket."""
_MAX_FRAME_BYTES = 1 << 20
"""Largest frame that the server may send."""
_RECEIVE_BYTES = 64 << 10
_MAX_PIECES = 64
"""Buffers given to one system call."""
_ENCRYPTED_BYTES = 256 << 10
"""Bytes that are encrypted at once. They wait for the socket before more are."""
_MAX_UNSENT = 1000
"""Buffers that may wait for the socket: some of a message, and answers to the server's PINGs."""
_MAX_READY = 2
"""Messages that are read while no thread iterates. The server notices by the rest that its client does not read."""
_MAX_PINGS_WITHOUT_DATA = 2
"""As gRPC: a server takes more for an attack."""

_HTTP_STATUS = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys((b"429", b"502", b"503", b"504"), grpc.StatusCode.UNAVAILABLE),
}
"""gRPC's "HTTP to gRPC Status Code Mapping"; of others UNKNOWN."""
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class Http2ClientCall:
    """One bidirectional call on a connection of its own.

    `next_message` returns the pieces of the next message to send, or None. `is_finished` returns whether no more
    follow. `is_awaited` returns whether the server owes a message. They are called on any thread. Call `pump` when
    there may be something to send. The server's windows and PINGs are read by the thread that iterates, and by `pump`
    while none does.
    """

    def __init__(
        self,
        endpoint: ServerEndpoint,
        path: str,
        next_message: Callable[[], Pieces | None],
        is_finished: Callable[[], bool],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._endpoint = endpoint
        self._path = path
        self._next_message = next_message
        self._is_finished = is_finished
        self._is_awaited = is_awaited
        self._socket: socket.socket | None = None
        self._tls = endpoint.tls_session()
        """Used with the lock held."""
        self._is_closed = self._is_broken = False

        # Sending, with the lock held.
        self._lock = threading.Lock()
        self._output: deque[bytes | memoryview] = deque()
        """Complete frames that the socket has not taken yet."""
        self._records: deque[bytes | memoryview] = deque()
        """With TLS: those of them that are encrypted."""
        self._payload: deque[bytes | memoryview] = deque()
        """Rest of a message, for which the windows have no room yet."""
        self._stream_window = self._connection_window = self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._has_ended_output = False
        self._writer: threading.Thread | None = None
        self._is_blocked = threading.Event()
        """Set when the socket takes no more: the writer then waits for it."""

        # Receiving.
        self._reading = threading.Lock()
        """Held while a thread iterates."""
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._ready: deque[bytes] = deque()
        self._is_receiving_unread = False
        self._failure: StreamError | None = None
        """Why the call ended, raised after the messages that are ready."""
        self._input = bytearray()
        self._messages = bytearray()
        self._header_frames = HeaderFrames()
        self._headers = HeaderReader(MAX_HEADER_BLOCK_BYTES)
        self._is_greeted = self._has_headers = self._is_ended = False
        self._unupdated = 0
        self._pings = 0
        """PINGs since the last data in either direction."""

    def __iter__(self) -> Http2ClientCall:
        return self

    def __next__(self) -> bytes:
        """Wait for the server's next message. The first call connects. Stops when the call ends with OK.

        Raises StreamError for other ends. One thread at a time iterates.
        """
        message = None
        try:
            with self._reading:
                message = self._next_received()
        finally:
            if message is None or self._is_closed:
                self.close()
        if message is None:
            raise StopIteration
        return message

    def pump(self) -> None:
        """Send what there is and what the windows and the socket take. Never blocks, from any thread."""
        self._receive_unread()
        self._send()

    def _send(self) -> None:
        with self._lock:
            if (
                self._socket is None
                or self._is_closed
                or self._is_broken
                or self._is_ended
                or self._failure is not None
            ):
                return
            while True:
                self._frame_payload()
                if self._output or self._records:
                    if not self._write_output(self._socket):
                        break
                elif self._payload or self._has_ended_output or self._is_receiving_unread:
                    break  # the windows have no room, or the end of the call may be among what is unread
                elif (message := self._next_message()) is not None:
                    views = [memoryview(piece) for piece in message if len(piece)]
                    size = sum(view.nbytes for view in views)
                    self._payload.extend((PREFIX.pack(0, size), *views))
                    self._pings = 0
                elif self._is_finished():
                    self._has_ended_output = True
                    self._output.append(encode_frame(frames.DATA, frames.END_STREAM, _STREAM))
                else:
                    break
            if self._output or self._records:
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="frame-writer", daemon=True)
                    self._writer.start()
                self._is_blocked.set()

    def close(self) -> None:
        """End the call and the connection, from any thread."""
        self._is_closed = True
        self._is_blocked.set()
        sock = self._socket
        if sock is None:
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        # A thread that iterates may be about to read from the socket's number: it closes it when it is done.
        if self._reading.acquire(blocking=False):
            with self._lock:
                sock.close()
            self._reading.release()

    # -- connecting

    def _connect(self) -> socket.socket:
        try:
            sock = self._endpoint.connect()
        except OSError as error:
            raise self._broken(f"failed to connect: {error.strerror or error}") from None
        if self._tls is not None:
            try:
                self._tls.connect(sock, CONNECT_TIMEOUT_S)
            except OSError as error:
                sock.close()
                raise self._broken(f"failed to begin TLS: {_tls_reason(error)}") from None
        _set_timeout(sock, KEEPALIVE_S)
        metadata = (
            ("grpc-accept-encoding", "identity"),
            ("user-agent", f"edge-server-client/{__version__}"),
            *self._endpoint.metadata,
        )
        fields = request_fields(self._path, self._endpoint.authority, metadata, is_tls=self._tls is not None)
        settings = {frames.ENABLE_PUSH: 0, frames.INITIAL_WINDOW_SIZE: _WINDOW, frames.MAX_FRAME_SIZE: _MAX_FRAME_BYTES}
        with self._lock:
            self._socket = sock
            self._output += (
                frames.PREFACE,
                frames.encode_greeting(settings, _WINDOW),
                frames.encode_header_frames(_STREAM, 0, encode_headers(fields)),
            )
        # `close` saw no socket if it came before this.
        if self._is_closed:
            raise self._broken("closed by this client")
        self.pump()
        return sock

    # -- sending

    def _frame_payload(self) -> None:
        """Move payload to the output, as frames, as far as the windows allow."""
        payload, output = self._payload, self._output
        while payload and len(output) < _MAX_PIECES:
            room = min(self._stream_window, self._connection_window, self._max_frame_bytes)
            if room <= 0:
                return
            pieces, size = frames.take_pieces(payload, room)
            self._stream_window -= size
            self._connection_window -= size
            output.append(frames.encode_frame_header(size, frames.DATA, 0, _STREAM))
            output += pieces

    def _write_output(self, sock: socket.socket) -> bool:
        """Return whether the socket took all."""
        output = self._output if self._tls is None else self._records
        while True:
            try:
                if not (output or self._encrypt()):
                    return True
                sent = sock.sendmsg(islice(output, _MAX_PIECES), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                # The iterating thread reports the end, after what the server sent before it.
                output.clear()
                self._output.clear()
                self._is_broken = True
                return False
            while sent:
                piece = output.popleft()
                if len(piece) > sent:
                    output.appendleft(memoryview(piece)[sent:])
                    break
                sent -= len(piece)

    def _encrypt(self) -> bool:
        """With TLS, encrypt the next part of the output. Return whether there is something to send."""
        if self._tls is None:
            return False
        pieces, _ = frames.take_pieces(self._output, _ENCRYPTED_BYTES)
        if records := self._tls.encrypt(b"".join(pieces)):
            self._records.append(records)
        return bool(records)

    def _write(self) -> None:
        """Wait for the socket whenever it takes no more."""
        while True:
            self._is_blocked.wait()
            self._is_blocked.clear()
            sock = self._socket
            if self._is_closed or sock is None:
                return
            with contextlib.suppress(OSError, ValueError):
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                poll.poll()
            self.pump()

    def _put(self, frame: bytes) -> None:
        """Send a frame of the connection after those that wait."""
        with self._lock:
            if len(self._output) > _MAX_UNSENT:
                raise self._fault("it reads no answers to its PINGs")
            self._output.append(frame)
        self._send()

    # -- receiving

    def _next_received(self) -> bytes | None:
        sock = self._socket or self._connect()
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if self._is_ended:
                return None
            self._handle_input(self._receive(sock))
        return self._ready.popleft()

    def _receive_unread(self) -> None:
        """Read what the server sent while no thread iterates, up to some messages: it may have ended the call, and what
        is sent then is lost."""
        sock = self._socket
        if sock is None or self._is_closed or not self._reading.acquire(blocking=False):
            return
        self._is_receiving_unread = True
        try:
            while not self._is_ended and self._failure is None and len(self._ready) < _MAX_READY:
                count = sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
                if count:
                    self._handle_input(count)
                else:
                    self._failure = self._broken("the connection was closed")
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = self._broken(error.strerror or str(error))
        finally:
            self._is_receiving_unread = False
            self._reading.release()
        if self._is_closed:
            self.close()

    def _handle_input(self, count: int) -> None:
        """Handle received bytes. An error is raised after the messages that came before it."""
        received: bytes | memoryview = self._buffer[:count]
        try:
            if (tls := self._tls) is not None:
                with self._lock:
                    received = tls.decrypt(self._buffer[:count])
            self._input += received
            self._handle_frames()
            if tls is not None and tls.is_ended and not self._is_ended:
                raise self._broken("the connection was closed")
        except StreamError as error:
            self._failure = error
        except ssl.SSLError as error:
            self._failure = self._broken(f"TLS failed: {_tls_reason(error)}")

    def _receive(self, sock: socket.socket) -> int:
        has_timeout_pending = False
        while True:
            try:
                count = sock.recv_into(self._buffer)
            except BlockingIOError:
                if has_timeout_pending:
                    raise self._broken("no answer to a keepalive ping") from None
                if self._is_awaited() and self._pings < _MAX_PINGS_WITHOUT_DATA:
                    self._pings += 1
                    has_timeout_pending = True
                    _set_timeout(sock, KEEPALIVE_TIMEOUT_S)
                    self._put(encode_frame(frames.PING, 0, 0, bytes(8)))
                continue
            except OSError as error:
                raise self._broken(error.strerror or str(error)) from None
            if not count:
                raise self._broken("the connection was closed")
            if has_timeout_pending:
                _set_timeout(sock, KEEPALIVE_S)
            return count

    def _handle_frames(self) -> None:
        data = self._input
        while len(data) >= frames.FRAME_HEADER_BYTES and not self._is_ended:
            high, low, kind, flags, stream = frames.HEADER.unpack_from(data)
            size = high << 8 | low
            if not self._is_greeted and kind != frames.SETTINGS:
                tls = "without" if self._tls is None else "with"
                raise self._broken(f"no HTTP/2 server {tls} TLS answers there; is it the gRPC port?")
            self._is_greeted = True
            if size > _MAX_FRAME_BYTES:
                raise self._fault("a frame is too large")
            end = frames.FRAME_HEADER_BYTES + size
            if len(data) < end:
                return
            payload = bytes(memoryview(data)[frames.FRAME_HEADER_BYTES : end])
            del data[:end]
            try:
                self._handle(kind, flags, stream & frames.MAX_STREAM_ID, payload)
            except ConnectionFault as fault:
                raise self._fault(f"a malformed frame: {fault.text}") from None

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._header_frames.check(kind, stream)
        if kind == frames.DATA and stream == _STREAM and self._has_headers:
            self._count(len(payload))
            self._messages += frames.without_padding(kind, flags, payload)
            self._pings = 0
            while (message := take_message(self._messages)) is not None:
                self._ready.append(message)
            if flags & frames.END_STREAM:
                raise self._status(grpc.StatusCode.INTERNAL, "the call ended without a status")
        elif kind in (frames.HEADERS, frames.CONTINUATION) and stream == _STREAM:
            block = self._header_frames.add(kind, flags, stream, payload)
            if block is not None:
                self._handle_headers(block, bool(self._header_frames.flags & frames.END_STREAM))
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._apply_settings(frames.read_settings(payload))
            self._put(frames.SETTINGS_ACK)
        elif kind == frames.PING and not flags & frames.ACK:
            self._put(encode_frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE:
            count = frames.read_uint32("WINDOW_UPDATE", payload) & frames.MAX_WINDOW_BYTES
            with self._lock:
                if stream:
                    self._stream_window += count
                else:
                    self._connection_window += count
            self._send()
        elif kind == frames.RST_STREAM and stream == _STREAM:
            code = frames.read_uint32("RST_STREAM", payload)
            status = RESET_STATUS.get(code, "INTERNAL")
            raise self._status(grpc.StatusCode[status], f"the server reset the stream, HTTP/2 error {code}")
        elif kind == frames.GOAWAY:
            # Of a server that stops, or that accepts no new call here: this one continues if it was seen.
            last, code, text = frames.read_goaway(payload)
            if last < _STREAM or code:
                raise self._broken(f"the server ends the connection, HTTP/2 error {code} {text}".strip())
        elif kind in (frames.DATA, frames.PUSH_PROMISE):
            raise self._fault("a frame belongs to no stream")

    def _apply_settings(self, settings: list[tuple[int, int]]) -> None:
        with self._lock:
            for name, value in settings:
                if name == frames.INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
                elif name == frames.MAX_FRAME_SIZE:
                    self._max_frame_bytes = value

    def _handle_headers(self, block: bytes, is_end: bool) -> None:
        headers = self._headers.read_response(block)
        if not self._has_headers:
            http = headers.status
            if http.startswith(b"1") and not is_end:
                return
            if http != b"200":
                status = _HTTP_STATUS.get(http, grpc.StatusCode.UNKNOWN)
                raise self._status(status, f"HTTP status {http[:8].decode('latin-1')}")
            self._has_headers = True
        if not is_end:
            return
        self._is_ended = True
        number, message = read_status(headers)
        status = _STATUS.get(number, grpc.StatusCode.UNKNOWN)
        if status is not grpc.StatusCode.OK:
            raise self._status(status, message)

    def _count(self, size: int) -> None:
        """Let the server send as much again, after half of the window."""
        self._unupdated += size
        if self._unupdated > _WINDOW // 2:
            size, self._unupdated = self._unupdated, 0
            self._put(frames.encode_window_update(0, size) + frames.encode_window_update(_STREAM, size))

    # -- errors

    def _status(self, code: grpc.StatusCode, details: str) -> StreamError:
        return status_error(code, details, self._endpoint.address)

    def _broken(self, details: str) -> StreamError:
        return self._status(grpc.StatusCode.UNAVAILABLE, details)

    def _fault(self, details: str) -> StreamError:
        return self._status(grpc.StatusCode.INTERNAL, f"the server breaks the rules of HTTP/2: {details}")


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    """Have `recv` raise BlockingIOError after that time. A timeout of Python's would concern the senders too."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


def _tls_reason(error: OSError) -> str:
    """Return a text with OpenSSL's name of the failure, as grpcio gives it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"CERTIFICATE_VERIFY_FAILED: {error.verify_message.rstrip('.')}"
    return str(getattr(error, "reason", None) or error.strerror or error)
