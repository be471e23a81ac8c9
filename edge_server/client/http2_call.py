"""gRPC call over an HTTP/2 connection, for a stream of camera frames: no copies but those of TLS, and no thread but one
that waits while the socket is full.

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
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import grpc
from hpack import Decoder, Encoder, HPACKError

from edge_server.client.endpoint import CONNECT_TIMEOUT_S, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, ServerEndpoint
from edge_server.client.stream_errors import StreamError, status_error
from edge_server.version import __version__

Pieces = Sequence[bytes | memoryview]

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER = struct.Struct(">HBBBI")
"""Frame header: upper two octets and lower octet of the length, type, flags, stream."""
_SETTING, _UINT32, _PREFIX = struct.Struct(">HI"), struct.Struct(">I"), struct.Struct(">BI")
_HEADER_BYTES, _PREFIX_BYTES = 9, 5
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _ENABLE_PUSH = 4, 5, 2

_STREAM = 1
"""The only stream of a connection."""
_WINDOW = 2**31 - 1
"""The server may always send: a client that does not read is noticed by the socket."""
_MAX_BLOCK_BYTES = 64 << 10
"""Largest header block, over all its frames."""
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

_RESET_STATUS = {
    7: grpc.StatusCode.UNAVAILABLE,  # REFUSED_STREAM
    8: grpc.StatusCode.CANCELLED,  # CANCEL
    11: grpc.StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
}
"""HTTP/2 error code -> status, of gRPC's "HTTP2 Transport Mapping"; of others INTERNAL."""
_HTTP_STATUS = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
"""gRPC's "HTTP to gRPC Status Code Mapping"; of others UNKNOWN."""
_STATUS = {str(code.value[0]): code for code in grpc.StatusCode}


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
        self._payload: deque[memoryview] = deque()
        """Rest of a message, for which the windows have no room yet."""
        self._stream_window = self._connection_window = self._initial_window = 65_535
        self._max_frame_bytes = 16_384
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
        self._block = bytearray()
        self._block_flags = 0
        self._is_in_block = False
        self._decoder = Decoder(max_header_list_size=_MAX_BLOCK_BYTES)
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
                    self._payload.extend((memoryview(_PREFIX.pack(0, size)), *views))
                    self._pings = 0
                elif self._is_finished():
                    self._has_ended_output = True
                    self._output.append(_frame(_DATA, _END_STREAM, _STREAM))
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
        fields = [
            (":method", "POST"), (":scheme", "https" if self._tls else "http"), (":path", self._path),
            (":authority", self._endpoint.authority),
            ("te", "trailers"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity"),
            ("user-agent", f"edge-server-client/{__version__}"), *self._endpoint.metadata,
        ]  # fmt: skip
        settings = ((_ENABLE_PUSH, 0), (_INITIAL_WINDOW_SIZE, _WINDOW), (_MAX_FRAME_SIZE, _MAX_FRAME_BYTES))
        with self._lock:
            self._socket = sock
            self._output += (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                _frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings)),
                _frame(_WINDOW_UPDATE, 0, 0, _UINT32.pack(_WINDOW - self._connection_window)),
                _frame(_HEADERS, _END_HEADERS, _STREAM, Encoder().encode(fields, huffman=False)),
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
            room = left = min(self._stream_window, self._connection_window, self._max_frame_bytes)
            if room <= 0:
                return
            pieces = []
            while payload and left:
                piece = payload.popleft()
                if len(piece) > left:
                    payload.appendleft(piece[left:])
                    piece = piece[:left]
                pieces.append(piece)
                left -= len(piece)
            size = room - left
            self._stream_window -= size
            self._connection_window -= size
            output.append(_HEADER.pack(size >> 8, size & 255, _DATA, 0, _STREAM))
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
        pieces, left, output = [], _ENCRYPTED_BYTES, self._output
        while output and left:
            piece = memoryview(output.popleft())
            if len(piece) > left:
                output.appendleft(piece[left:])
                piece = piece[:left]
            pieces.append(piece)
            left -= len(piece)
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
                    self._put(_frame(_PING, 0, 0, bytes(8)))
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
        while len(data) >= _HEADER_BYTES and not self._is_ended:
            high, low, kind, flags, stream = _HEADER.unpack_from(data)
            size = high << 8 | low
            if not self._is_greeted and kind != _SETTINGS:
                tls = "without" if self._tls is None else "with"
                raise self._broken(f"no HTTP/2 server {tls} TLS answers there; is it the gRPC port?")
            self._is_greeted = True
            if size > _MAX_FRAME_BYTES:
                raise self._fault("a frame is too large")
            if len(data) < _HEADER_BYTES + size:
                return
            payload = bytes(memoryview(data)[_HEADER_BYTES : _HEADER_BYTES + size])
            del data[: _HEADER_BYTES + size]
            if self._is_in_block and kind != _CONTINUATION:
                raise self._fault("a header block is incomplete")
            try:
                self._handle(kind, flags, stream & _WINDOW, payload)
            except (struct.error, IndexError, HPACKError):
                raise self._fault("a frame is malformed") from None

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and stream == _STREAM and self._has_headers:
            self._count(len(payload))
            self._messages += _without_padding(flags, payload)
            self._pings = 0
            self._take_messages()
            if flags & _END_STREAM:
                raise self._status(grpc.StatusCode.INTERNAL, "the call ended without a status")
        elif kind in (_HEADERS, _CONTINUATION) and stream == _STREAM:
            if kind == _HEADERS:
                payload = _without_padding(flags, payload)
                self._block_flags = flags
                if flags & _HAS_PRIORITY:
                    payload = payload[5:]
            elif not self._is_in_block:
                raise self._fault("a CONTINUATION continues nothing")
            self._block += payload
            if len(self._block) > _MAX_BLOCK_BYTES:
                raise self._fault("a header block is too large")
            self._is_in_block = not flags & _END_HEADERS
            if not self._is_in_block:
                block, self._block = bytes(self._block), bytearray()
                fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
                self._handle_headers(fields, bool(self._block_flags & _END_STREAM))
        elif kind == _SETTINGS and not flags & _ACK:
            self._apply_settings(payload)
            self._put(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._put(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            (count,) = _UINT32.unpack(payload)
            with self._lock:
                if stream:
                    self._stream_window += count & _WINDOW
                else:
                    self._connection_window += count & _WINDOW
            self._send()
        elif kind == _RST_STREAM and stream == _STREAM:
            (code,) = _UINT32.unpack(payload)
            raise self._status(
                _RESET_STATUS.get(code, grpc.StatusCode.INTERNAL), f"the server reset the stream, HTTP/2 error {code}"
            )
        elif kind == _GOAWAY:
            # Of a server that stops, or that accepts no new call here: this one continues if it was seen.
            last, code = _UINT32.unpack_from(payload)[0] & _WINDOW, _UINT32.unpack_from(payload, 4)[0]
            if last < _STREAM or code:
                text = payload[8:208].decode("utf-8", "replace")
                raise self._broken(f"the server ends the connection, HTTP/2 error {code} {text}".strip())
        elif kind in (_DATA, _PUSH_PROMISE):
            raise self._fault("a frame belongs to no stream")

    def _apply_settings(self, payload: bytes) -> None:
        with self._lock:
            for name, value in _SETTING.iter_unpack(payload):
                if name == _INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
                elif name == _MAX_FRAME_SIZE:
                    self._max_frame_bytes = max(16_384, min(value, 2**24 - 1))

    def _handle_headers(self, fields: dict[str, str], is_end: bool) -> None:
        if not self._has_headers:
            http = fields.get(":status", "")
            if http.startswith("1") and not is_end:
                return
            if http != "200":
                raise self._status(_HTTP_STATUS.get(http, grpc.StatusCode.UNKNOWN), f"HTTP status {http[:8]}")
            self._has_headers = True
        if not is_end:
            return
        self._is_ended = True
        code = _STATUS.get(fields.get("grpc-status", ""), grpc.StatusCode.UNKNOWN)
        if code is not grpc.StatusCode.OK:
            raise self._status(code, urllib.parse.unquote(fields.get("grpc-message", ""), errors="replace"))

    def _take_messages(self) -> None:
        data = self._messages
        while len(data) >= _PREFIX_BYTES:
            is_compressed, size = _PREFIX.unpack_from(data)
            if is_compressed:
                raise self._fault("a message is compressed, which this client does not accept")
            end = _PREFIX_BYTES + size
            if len(data) < end:
                return
            self._ready.append(bytes(memoryview(data)[_PREFIX_BYTES:end]))
            del data[:end]

    def _count(self, size: int) -> None:
        """Let the server send as much again, after half of the window."""
        self._unupdated += size
        if self._unupdated > _WINDOW // 2:
            update, self._unupdated = _UINT32.pack(self._unupdated), 0
            self._put(_frame(_WINDOW_UPDATE, 0, 0, update) + _frame(_WINDOW_UPDATE, 0, _STREAM, update))

    # -- errors

    def _status(self, code: grpc.StatusCode, details: str) -> StreamError:
        return status_error(code, details, self._endpoint.address)

    def _broken(self, details: str) -> StreamError:
        return self._status(grpc.StatusCode.UNAVAILABLE, details)

    def _fault(self, details: str) -> StreamError:
        return self._status(grpc.StatusCode.INTERNAL, f"the server breaks the rules of HTTP/2: {details}")


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEADER.pack(size >> 8, size & 255, kind, flags, stream) + payload


def _without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if payload[0] >= len(payload):
        raise IndexError
    return payload[1 : len(payload) - payload[0]]


def _set_timeout(sock: socket.socket, seconds: float) -> None:
    """Have `recv` raise BlockingIOError after that time. A timeout of Python's would concern the senders too."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


def _tls_reason(error: OSError) -> str:
    """Return a text with OpenSSL's name of the failure, as grpcio gives it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"CERTIFICATE_VERIFY_FAILED: {error.verify_message.rstrip('.')}"
    return str(getattr(error, "reason", None) or error.strerror or error)
