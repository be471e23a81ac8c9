"""gRPC transport on this server's own HTTP/2 implementation, the default: passes calls to the handlers of RPCs.

Specification: github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md (below: protocol) and doc/compression.md. The
reading thread of a connection delivers the events of its calls. Any thread may respond.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from edge_server.config import GrpcConfig
from edge_server.errors import Draining, EdgeServerError, InvalidRequest, Refusal, Throttled
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.error_status import GrpcStatus
from edge_server.frontends.grpc.call import (
    MAX_MESSAGE_BYTES,
    CallHandler,
    CallStatus,
    Message,
    Metadata,
    Methods,
    Pieces,
    RpcMethod,
    call_status,
    client_error,
)
from edge_server.frontends.grpc.tls import tls_context
from edge_server.frontends.http2.connection_writer import Stream
from edge_server.frontends.http2.limits import Http2Limits
from edge_server.frontends.http2.server import Http2Server
from edge_server.frontends.http2.stream_interface import Http2Timer, ReadingThread
from edge_server.frontends.listen_error import listen_error
from edge_server.frontends.memory_budget import MemoryBudget
from edge_server.http2.frames import Http2ErrorCode
from edge_server.http2.grpc_calls import PREFIX, PREFIX_BYTES
from edge_server.http2.header_blocks import HeaderBlock, encode_headers
from edge_server.service import READING_THREAD_HOLD_US

_CONTENT_TYPE = "application/grpc"
_SMALL_BYTES = 4096
"""Messages up to this size that arrive in one piece need no receive buffer."""

_ALIGNMENT = 16
_GRANT_BYTES = 1 << 20
"""After this number of consumed bytes of a stream, a window update allows the client to send as many again."""

_MESSAGES_IN_A_ROW = 8
"""Messages of one stream that are delivered at once. More wait for the connection's next turn."""

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_NS = {"H": 3_600_000_000_000, "M": 60_000_000_000, "S": 1_000_000_000, "m": 1_000_000, "u": 1_000, "n": 1}
_NOT_METADATA = frozenset(
    (
        b"te", b"content-length", b"grpc-message-type",
        b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding",
    )
)  # fmt: skip
_NOT_PLAIN = re.compile(rb"[^\x20-\x24\x26-\x7e]")
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""zlib's wbits for the formats of doc/compression.md."""

_ZLIB_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
_MIN_COMPRESSED_BYTES = 256
"""Shorter unary responses are not compressed: that would save less than it costs."""

_INFLATED_PIECE_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10
"""Unary responses of at least this size are not compressed on the reading thread. Compressed messages of at least a
sixteenth of it are inflated on a separate thread."""

_STALL_S = 60.0
_MIN_BYTES_PER_S = 500
"""Minimum average rate of an incomplete message. It is checked once the message or its unary call is _STALL_S old."""

_LAST_RESPONSES_S = 0.5
"""Additional time for sending the last responses, after the grace period of a stop."""

_MAX_OPEN_RATIO = 8
"""Maximum number of open calls, as a multiple of that of active calls: open calls may wait for their messages."""


_OK_HEADERS = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
_GZIP_HEADERS = encode_headers(
    [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-encoding", b"gzip")]
)
_OK_TRAILERS = encode_headers([(b"grpc-status", b"0")])
_STOPPING = call_status(Draining("Server is stopping and takes no further calls"))


class CallHeaders:
    """Parsed request headers of a call. All calls with the same header block share them.

    `refusal` is the status of calls that cannot be served. `http_status` is not 200 for a request that is not gRPC.
    """

    __slots__ = ("_metadata", "_pairs", "accepts_gzip", "encoding", "http_status", "method", "refusal", "timeout_ns")

    def __init__(self, headers: HeaderBlock, methods: Methods) -> None:
        self.timeout_ns = 0
        self.encoding = ""
        self.accepts_gzip = False
        self.refusal: CallStatus | None = None
        self.http_status = 200
        self.method: RpcMethod | None = None
        self._pairs = headers.pairs
        self._metadata: Metadata | None = None
        if headers.is_too_large:
            self.http_status = 431
            return
        content_type = ""
        for name, value in headers.pairs:
            if name == b"content-type":
                content_type = _text(value).lower()
            elif name == b"grpc-timeout":
                self._read_timeout(_text(value))
            elif name == b"grpc-encoding":
                self.encoding = "" if value == b"identity" else _text(value)
            elif name == b"grpc-accept-encoding":
                self.accepts_gzip = b"gzip" in value.replace(b" ", b"").split(b",")
            elif name.endswith(b"-bin"):
                try:
                    _binary_values(value)
                except binascii.Error:
                    self.refusal = CallStatus(
                        GrpcStatus.INTERNAL, f"metadata '{name[:64].decode('ascii', 'replace')}' is not base64"
                    )
        path = headers.path.decode("utf-8", "replace")
        self.method = methods.get(path)
        if headers.method != b"POST":
            self.http_status = 405
        elif not content_type.startswith(_CONTENT_TYPE) or content_type[len(_CONTENT_TYPE) :][:1] not in ("", "+", ";"):
            self.http_status = 415
        elif self.method is None:
            self.refusal = CallStatus(GrpcStatus.UNIMPLEMENTED, f"method '{path[:200]}' is not known")
        elif self.encoding and self.encoding not in _WINDOW_BITS:
            # doc/compression.md: the response lists the supported encodings.
            self.refusal = CallStatus(
                GrpcStatus.UNIMPLEMENTED,
                f"grpc-encoding '{self.encoding[:32]}' is not understood",
                (("grpc-accept-encoding", "identity,deflate,gzip"),),
            )

    @property
    def metadata(self) -> Metadata:
        """The metadata of a call that is not refused. Decoded when it is first wanted: copies of all values, which
        most calls do not need."""
        if self._metadata is None:
            metadata: list[tuple[str, str | bytes]] = []
            texts: dict[bytes, str] = {}
            for name, value in self._pairs:
                if name.endswith(b"-bin"):
                    metadata += [(name.decode("ascii"), piece) for piece in _binary_values(value)]
                elif name not in _NOT_METADATA:
                    text = texts.get(value)
                    if text is None:
                        text = texts[value] = _text(value)
                    metadata.append((name.decode("ascii"), text))
            self._metadata = tuple(metadata)
        return self._metadata

    def _read_timeout(self, value: str) -> None:
        found = _TIMEOUT.fullmatch(value)
        if found is None:
            self.refusal = CallStatus(GrpcStatus.INTERNAL, f"malformed grpc-timeout '{value[:32]}'")
        else:
            # A sent 0 is a deadline that has passed, but `timeout_ns` 0 means no deadline.
            self.timeout_ns = max(1, int(found[1]) * _UNIT_NS[found[2]])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _binary_values(value: bytes) -> list[bytes]:
    """Return the values of binary metadata. Raises binascii.Error.

    Values of one name may have been joined with commas (protocol, "Custom-Metadata"). Padding is optional (protocol,
    "Binary-Header").
    """
    return [
        base64.b64decode(piece + b"=" * (-len(piece) % 4), validate=True)
        for piece in map(bytes.strip, value.split(b","))
    ]


class Http2Call:
    """One call: the receiver of its HTTP/2 stream, and the `RpcCall` of its handler."""

    __slots__ = (
        "_buffer", "_filled", "_handler", "_has_sent_headers", "_headers", "_inbox", "_is_compressed",
        "_is_delivering", "_is_half_closed", "_is_over", "_is_requested", "_is_responding", "_length", "_lock",
        "_message", "_prefix", "_reader", "_request_lock", "_stream", "_timer", "_transport", "_ungranted", "begun_s",
        "deadline_ns", "filled", "hold_us", "is_stream",
    )  # fmt: skip

    def __init__(self, transport: Http2Transport, reader: ReadingThread, stream: Stream, headers: CallHeaders) -> None:
        self._transport = transport
        self._reader = reader
        self._stream = stream
        self._headers = headers
        self._handler: CallHandler | None = None
        self._is_over = self._is_responding = self.is_stream = False
        self._timer: Http2Timer | None = None
        self.deadline_ns = time.monotonic_ns() + headers.timeout_ns if headers.timeout_ns else 0
        self.hold_us = READING_THREAD_HOLD_US

        # Receiving, on the reading thread.
        self.begun_s = self._reader.now_s
        """Start time of the current message, or of the call."""
        self._prefix = b""
        self._buffer: memoryview | None = None
        """Receive buffer of the current message: `_filled` of `_length` bytes so far."""
        self._filled = self._length = self._ungranted = 0
        self.filled = 0
        """Bytes that the memory budget counts for this call, see memory_budget.Body."""
        self._is_compressed = self._is_half_closed = False
        self._message: Message | bytearray | None = None
        """The message of a unary call; a bytearray if it is still compressed."""

    @property
    def waits_for_message(self) -> bool:
        """Whether this is a unary call whose message is not complete yet."""
        return not (self.is_stream or self._is_half_closed)

    def open(self) -> None:
        """Open the handler, or end the call."""
        headers = self._headers
        method = headers.method
        self._lock: threading.Lock | None = None
        if headers.http_status != 200:
            self._finish(encode_headers([(b":status", str(headers.http_status).encode())]))
            return
        if headers.refusal is not None or method is None:
            self.end(headers.refusal or CallStatus(GrpcStatus.UNIMPLEMENTED))
            return
        if method.is_stream:
            self.is_stream = True
            # Makes the end of a stream wait for the first message that is being sent. Unary calls send once.
            self._lock = threading.Lock()
            self._inbox: deque[Message | bytearray] = deque()
            self._has_sent_headers = self._is_delivering = False
            self._is_requested = True
            # Beside the other lock, which is held while the socket takes a message: the reading thread must not wait.
            self._request_lock = threading.Lock()
        refusal = self._transport.admit(self)
        if refusal is not None:
            self.end(refusal)
            return
        try:
            if method.check is not None:
                method.check(self.metadata)
            self._handler = method.open(self)
        except Exception as error:  # noqa: BLE001 - any error gets a status: `client_error` logs it
            self.end(call_status(client_error(error)))

    # -- the RpcCall of the handler, from any thread

    @property
    def metadata(self) -> Metadata:
        return self._headers.metadata

    @property
    def peer(self) -> str:
        """The client's address in gRPC's peer format."""
        peer = self._stream.peer
        if isinstance(peer, str):
            return f"unix:{peer}"
        return f"ipv6:[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"ipv4:{peer[0]}:{peer[1]}"

    def respond(self, message: Pieces) -> None:
        size = 0
        for piece in message:
            size += len(piece)
        if not self._transport.zlib_level or not self._headers.accepts_gzip or size < _MIN_COMPRESSED_BYTES:
            self._send_response(_OK_HEADERS, (PREFIX.pack(0, size), *message), size)
        elif size < _LARGE_BYTES or threading.get_ident() != self._reader.thread_id:
            self._respond_compressed(message)
        else:
            threading.Thread(target=self._respond_compressed, args=(message,), name="grpc-gzip", daemon=True).start()

    def _respond_compressed(self, message: Pieces) -> None:
        body = _compressed(message, self._transport.zlib_level)
        self._send_response(_GZIP_HEADERS, body, len(body[1]))

    def _send_response(self, headers: bytes, body: Pieces, size: int) -> None:
        if size < _LARGE_BYTES:
            self._stream.respond(headers, body, _OK_TRAILERS)
            self._close()
            return
        self._is_responding = True
        if self._stream.send(headers, body):
            self._stream.finish(_OK_TRAILERS)
            self._close()
        else:
            # `on_sent` ends the call. Until then the response counts in the memory budget.
            self._reader.run_soon(partial(self._count_response, size))

    def _count_response(self, size: int) -> None:
        if not self._is_over:
            self._transport.budget.enter(self)
            self._transport.budget.grow(self, size)

    def end(self, status: CallStatus) -> None:
        lock = self._lock
        if lock is None:
            self._finish(_encoded_status(status, is_alone=True))
            return
        with lock:
            if not self._is_over:
                self._finish(_encoded_status(status, is_alone=not self._has_sent_headers))

    def send(self, message: Pieces) -> bool:
        level = self._transport.zlib_level if self._headers.accepts_gzip else 0
        if level:
            body: Pieces = _compressed(message, level)
        else:
            body = (PREFIX.pack(0, sum(map(len, message))), *message)
        if self._has_sent_headers:
            # No lock is needed: the connection drops what comes after the end.
            return not self._is_over and self._stream.send(None, body)
        assert self._lock is not None
        with self._lock:
            if self._is_over:
                return False
            is_sent = self._stream.send(_GZIP_HEADERS if level else _OK_HEADERS, body)
            self._has_sent_headers = True
            return is_sent

    def wake(self) -> None:
        self._reader.run_soon(self._wake)

    def receive(self) -> None:
        if threading.get_ident() == self._reader.thread_id:
            self._is_requested = True
            if not self._is_delivering:
                self._deliver()
            return
        # Set before the inbox is checked: the reading thread adds a message first, and checks this flag after.
        with self._request_lock:
            self._is_requested = True
        if self._inbox or self._is_half_closed:
            self._reader.run_soon(self._deliver)

    # -- the Receiver of the stream, on the reading thread

    def on_data(self, data: memoryview, is_end: bool) -> None:
        handler = self._handler
        if self._is_over or handler is None:
            return
        size = len(data)
        if PREFIX_BYTES <= size <= _SMALL_BYTES and self._buffer is None and not self._prefix:
            flag, length = PREFIX.unpack_from(data)
            if not flag and length == size - PREFIX_BYTES:
                # Usual case: a small message in one frame.
                if self.is_stream:
                    if self._is_requested and not (is_end or self._inbox or self._is_delivering):
                        self._deliver_at_once(handler, bytes(data[PREFIX_BYTES:]), size)
                    else:
                        self._inbox.append(bytes(data[PREFIX_BYTES:]))
                        self._received(size, is_end)
                    return
                if is_end and self._message is None:
                    self._is_half_closed = True
                    self._start_unary(bytes(data[PREFIX_BYTES:]))
                    return
        position = 0
        while position < size and not self._is_over:
            position = self._read(data, position)
        self._received(size, is_end)

    def target(self, size: int) -> memoryview | None:
        if self._buffer is None or self._is_over:
            return None
        # Not beyond this message: the prefix of the next one may be in the same frame.
        return self._buffer[self._filled : self._filled + size]

    def on_filled(self, count: int, is_end: bool) -> None:
        if self._is_over or self._buffer is None:
            return
        self._fill(count)
        self._received(count, is_end)

    def on_sent(self) -> None:
        if self._is_responding:
            self._stream.finish(_OK_TRAILERS)
            self._close()
        elif not self._is_over and self._handler is not None:
            self._handler.on_sent()

    def on_reset(self, code: int) -> None:
        if self._is_over:
            # The last frames of an ended call waited for the client. Its handler expects no event any more.
            return
        self._close()
        if self._handler is not None:
            self._handler.on_client_left()

    def on_tick(self, now_s: float) -> None:
        """End the call if its deadline passed or its message arrives too slowly."""
        if self.deadline_ns and time.monotonic_ns() >= self.deadline_ns:
            self._on_deadline()
            return
        waited_s = now_s - self.begun_s
        is_awaited = self._buffer is not None or self._prefix or self.waits_for_message
        if is_awaited and waited_s >= _STALL_S and self._filled < _MIN_BYTES_PER_S * waited_s:
            self._fail(Refusal(f"only {self._filled} bytes of the call's message came in {waited_s:.0f} s: too slow"))

    # -- receiving

    def _read(self, data: memoryview, position: int) -> int:
        """Consume the available part of a prefix or a message; return the position after it."""
        buffer = self._buffer
        if buffer is not None:
            count = min(self._length - self._filled, len(data) - position)
            buffer[self._filled : self._filled + count] = data[position : position + count]
            self._fill(count)
            return position + count
        if not self._prefix:
            self.begun_s = self._reader.now_s
        stop = position + PREFIX_BYTES - len(self._prefix)
        prefix = self._prefix + bytes(data[position:stop])
        if len(prefix) < PREFIX_BYTES:
            self._prefix = prefix
            return len(data)
        self._prefix = b""
        flag, length = PREFIX.unpack(prefix)
        end: int = stop + length
        if length <= _SMALL_BYTES and end <= len(data) and not flag and self._message is None:
            self._store_message(bytes(data[stop:end]))
            return end
        self._begin_message(flag, length)
        return stop

    def _begin_message(self, flag: int, length: int) -> None:
        """Allocate the buffer for a message of `length` bytes, or fail the call.

        The end of the message is aligned to 16 bytes, so that the data of its last tensor is aligned.
        """
        if flag > 1 or (flag and not self._headers.encoding):
            self._fail(InvalidRequest("a message is marked as compressed, but the call names no grpc-encoding"))
        elif length > self._transport.budget.total:
            self._fail(
                Throttled(
                    f"a message of {length} bytes is larger than the memory budget of all incomplete messages and "
                    f"bodies: {self._transport.budget.total} bytes (--http-max-body-bytes-in-flight)"
                )
            )
        elif length > MAX_MESSAGE_BYTES:
            self._fail(Throttled(f"a message of {length} bytes is longer than gRPC's {MAX_MESSAGE_BYTES}"))
        elif self._message is not None:
            self._fail(InvalidRequest("a unary call has one message, got more"))
        else:
            try:
                # Not initialised: pages that receive no bytes use no memory.
                whole = np.empty(length + -length % _ALIGNMENT, np.uint8).data
            except MemoryError:
                self._fail(Throttled(f"there is no memory for a message of {length} bytes"))
                return
            self._is_compressed = bool(flag)
            self._length, self._filled = length, 0
            self._buffer = whole[-length % _ALIGNMENT :]
            self._transport.budget.enter(self)
            self._fill(0)

    def _fill(self, count: int) -> None:
        """Count received bytes of the current message, and queue it for delivery once it is complete."""
        self._filled += count
        buffer = self._buffer
        if self._filled < self._length:
            self._transport.budget.grow(self, count)
            return
        assert buffer is not None
        self._buffer = None
        self._transport.budget.leave(self)
        self._store_message(bytearray(buffer) if self._is_compressed else buffer.toreadonly())

    def _store_message(self, message: Message | bytearray) -> None:
        """Keep a complete message until it is delivered."""
        if self.is_stream:
            self._inbox.append(message)
        else:
            self._message = message

    def _received(self, size: int, is_end: bool) -> None:
        """Deliver complete messages, and allow the client to send more."""
        if self._is_over:
            return
        self._ungranted += size
        if is_end:
            self._is_half_closed = True
            if self._buffer is not None or self._prefix:
                self._fail(InvalidRequest("the client ended the stream within a message"))
            elif self.is_stream:
                self._deliver()
            elif self._message is None:
                self._fail(InvalidRequest("the call ended before its message came"))
            else:
                message, self._message = self._message, None
                self._start_unary(message)
                return
        elif self.is_stream:
            self._deliver()
        if self.deadline_ns and self._timer is None and not self._is_over:
            self._watch_deadline()
        if self._ungranted >= _GRANT_BYTES:
            self._grant()

    def _grant(self) -> None:
        # No window update while messages wait for delivery, so that the client stops sending.
        if not self._is_half_closed and not (self.is_stream and self._inbox):
            count, self._ungranted = self._ungranted, 0
            self._stream.consume(count)

    def _deliver_at_once(self, handler: CallHandler, message: bytes, size: int) -> None:
        """Deliver a requested message that no other one waits before: as `_received` and `_deliver` do, in one step."""
        self._is_requested = False
        self._is_delivering = True
        handler.on_message(message)
        self._is_delivering = False
        self._ungranted += size
        if self._ungranted >= _GRANT_BYTES:
            self._grant()
        if self.deadline_ns and self._timer is None and not self._is_over:
            self._watch_deadline()

    def _deliver(self) -> None:
        """Deliver requested messages of a stream, at most _MESSAGES_IN_A_ROW at once."""
        if self._is_delivering or self._handler is None:
            return
        inbox = self._inbox
        for _ in range(_MESSAGES_IN_A_ROW):
            if self._is_over or not (inbox or self._is_half_closed):
                break
            if not self._is_requested:
                with self._request_lock:
                    if not self._is_requested:
                        break
            # Only this thread resets it, and no thread sets it again before the next message is delivered.
            self._is_requested = False
            self._is_delivering = True
            if not inbox:
                self._handler.on_last_message()
            elif isinstance(message := inbox.popleft(), bytearray):
                if not self._pass_compressed(message):
                    return  # `_pass_inflated` continues
            else:
                self._handler.on_message(message)
            self._is_delivering = False
        else:
            self._stream.run_in_turn(self._deliver)
        if self._ungranted >= _GRANT_BYTES:
            self._grant()

    def _pass_compressed(self, message: bytearray) -> bool:
        """Inflate a message and pass it to the handler. Return False if another thread inflates it first."""
        if len(message) < _LARGE_BYTES // 16:
            self._inflate(message)
            return True
        threading.Thread(target=self._inflate, args=(message,), name="grpc-inflate", daemon=True).start()
        return False

    def _start_unary(self, message: Message | bytearray) -> None:
        """Pass the message of a unary call to the handler, unless too many calls are active."""
        transport = self._transport
        active = transport.active
        if len(active) + len(transport.streams) + transport.calls_left_out >= transport.max_calls:
            self.end(_too_many(transport.max_calls, "calls"))
            return
        if isinstance(message, bytearray):
            self._pass_compressed(message)
        else:
            assert self._handler is not None
            self._handler.on_message(message)
        if self._is_over:
            return
        active.add(self)
        if self.deadline_ns and self._timer is None:
            self._watch_deadline()
        if self._is_over:
            # Another thread ended the call before it was added.
            active.discard(self)

    def _inflate(self, message: bytearray) -> None:
        transport = self._transport
        try:
            # One message at a time: a few bytes may inflate to a large message.
            with transport.inflating:
                inflated = _inflated(message, self._headers.encoding, transport.budget.total)
        except EdgeServerError as error:
            self._reader.run_soon(partial(self._fail, error))
            return
        self._reader.run_soon(partial(self._pass_inflated, inflated))

    def _pass_inflated(self, message: Message) -> None:
        if self._is_over or self._handler is None:
            return
        self._handler.on_message(message)
        if self.is_stream:
            self._is_delivering = False
            self._deliver()

    # -- time and the end

    def _wake(self) -> None:
        if not self._is_over and self._handler is not None:
            self._handler.on_woken()

    def _watch_deadline(self) -> None:
        self._timer = self._reader.call_at(self.deadline_ns / 1e9, self._on_deadline)

    def _on_deadline(self) -> None:
        if not self._is_over:
            self.abort(CallStatus(GrpcStatus.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def on_server_stopping(self) -> None:
        if not self._is_over and self._handler is not None:
            self._handler.on_server_stopping()

    def stop_soon(self) -> None:
        """Notify the handler that the server stops. May be called on any thread."""
        self._reader.run_soon(self.on_server_stopping)

    def refuse(self, refusal: Refusal) -> None:
        """End the call to free memory for others; see memory_budget.Body. May be called on any thread."""
        self.abort_soon(call_status(Throttled(refusal.message, retry_after_s=refusal.retry_after_s)))

    def _fail(self, error: EdgeServerError) -> None:
        if not self._is_over:
            self.abort(call_status(error))

    def abort_soon(self, status: CallStatus) -> None:
        """End the call unless it is over, at once on its reading thread. May be called on any thread."""
        if threading.get_ident() == self._reader.thread_id:
            self._abort_open(status)
        else:
            self._reader.run_soon(partial(self._abort_open, status))

    def _abort_open(self, status: CallStatus) -> None:
        if not self._is_over:
            self.abort(status)

    def abort(self, status: CallStatus) -> None:
        """End the call, and notify the handler. Must be called on the reading thread."""
        self.end(status)
        if self._handler is not None:
            self._handler.on_client_left()

    def _finish(self, block: bytes) -> None:
        if self._is_responding:
            self._stream.reset(Http2ErrorCode.ENHANCE_YOUR_CALM)
        else:
            self._stream.finish(block)
        self._close()

    def _close(self) -> None:
        """Remove the call from the transport. May be called repeatedly, from any thread."""
        self._is_over = True
        transport = self._transport
        transport.calls.discard(self)
        if self.is_stream:
            transport.streams.discard(self)
        else:
            transport.active.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._buffer is not None or self._is_responding:
            self._reader.run_soon(self._release_memory)

    def _release_memory(self) -> None:
        self._buffer = None
        self._transport.budget.leave(self)


class Http2Transport:
    """A listener on this server's HTTP/2. `start` once, then `stop` once."""

    def __init__(
        self,
        methods: Sequence[Methods],
        config: GrpcConfig,
        max_calls: int,
        max_streams: int,
        budget: MemoryBudget,
        limit: ConnectionLimit | None = None,
    ) -> None:
        """`methods` has a table for each reading thread. Raises ServingFault for unusable TLS files."""
        self._config = config
        self.max_calls = max_calls
        self._max_streams = max_streams
        self.calls_left_out = len(methods) - 1
        """Each other thread may find room for a call at the same time: the checks leave room for them."""
        self._is_tls = config.is_tls or config.is_mutual_tls
        self._is_stopping = False
        self.zlib_level = _ZLIB_LEVELS[config.compression_level]
        self.calls: set[Http2Call] = set()
        """Open calls."""
        self.active: set[Http2Call] = set()
        """Open unary calls whose handler has the message and has not responded yet."""
        self.streams: set[Http2Call] = set()
        """Open streaming calls."""
        self.inflating = threading.Lock()
        self.budget = budget
        """Limits the memory of incomplete messages, unread responses and HTTP bodies together."""
        self.server = Http2Server(
            self._on_stream,
            Http2Limits(
                # More than are served: further calls get an error, so that the client retries, or uses another server.
                max_streams=2 * max_calls,
                keepalive_time_s=config.keepalive_time_ms / 1000,
                keepalive_timeout_s=config.keepalive_timeout_ms / 1000,
                permits_keepalive_without_streams=config.keepalive_permit_without_calls,
                max_pings_without_data=config.http2_max_pings_without_data,
                min_ping_interval_s=config.http2_min_recv_ping_interval_without_data_ms / 1000,
                max_ping_strikes=config.http2_max_ping_strikes,
                max_age_s=config.max_connection_age_ms / 1000,
                max_age_grace_s=config.max_connection_age_grace_ms / 1000,
            ),
            tls_context(config, config.is_mutual_tls) if self._is_tls else None,
            limit,
            len(methods),
        )
        self._methods: dict[ReadingThread, Methods] = dict(zip(self.server.readers, methods, strict=True))

    def start(self, *, accepts: bool) -> int:
        """See GrpcFrontend.start."""
        config = self._config
        try:
            return self.server.start(config.address, config.port, reuses_port=config.reuses_port, accepts=accepts)
        except OSError as error:
            raise listen_error("gRPC", config.address, config.port, error) from None

    def accept_connections(self) -> None:
        """See GrpcFrontend.accept_connections."""
        try:
            self.server.accept_connections()
        except OSError as error:
            raise listen_error("gRPC", self._config.address, self._config.port, error) from None

    def renew_tls(self, config: GrpcConfig) -> None:
        """Use the TLS files of `config` for new handshakes. *Blocking.*

        Whether clients need a certificate does not change. Raises ServingFault, and changes nothing then.
        """
        if self._is_tls:
            self.server.use_tls(tls_context(config, self._config.is_mutual_tls))

    def begin_drain(self) -> None:
        """Ask clients to open new calls on another server, but still serve those that arrive."""
        self.server.begin_drain()

    def end_drain(self, timeout_s: float) -> None:
        """See GrpcFrontend.end_drain."""
        self.server.stop_accepting(timeout_s)

    def stop(self, grace_s: float) -> None:
        """See GrpcFrontend.stop."""
        self._is_stopping = True
        self.server.run_soon(partial(self._end_calls, grace_s))
        self.server.stop(grace_s + _LAST_RESPONSES_S)

    def _end_calls(self, grace_s: float) -> None:
        """End streams once nothing is outstanding on them, and end all remaining calls after the grace period."""
        for call in list(self.streams):
            call.stop_soon()
        self.server.call_at(self.server.now_s + grace_s, self._abort_calls)

    def _abort_calls(self) -> None:
        for call in list(self.calls):
            call.abort_soon(_STOPPING)

    # -- for calls, on the reading thread

    def _on_stream(self, reader: ReadingThread, stream: Stream) -> Http2Call:
        block = stream.headers
        headers = block.memo
        if not isinstance(headers, CallHeaders):
            headers = block.memo = CallHeaders(block, self._methods[reader])
        call = Http2Call(self, reader, stream, headers)
        call.open()
        return call

    def admit(self, call: Http2Call) -> CallStatus | None:
        """Register a call and return None, or return the status that refuses it."""
        if self._is_stopping:
            return _STOPPING
        if call.is_stream:
            count = len(self.streams) + self.calls_left_out
            if count >= self._max_streams or count + len(self.active) >= self.max_calls:
                return _too_many(self._max_streams, "streams")
            self.streams.add(call)
        elif len(self.calls) >= _MAX_OPEN_RATIO * self.max_calls:
            # Too many calls wait for a message that their clients do not send: end the oldest quarter of them.
            waiting = sorted(
                (each for each in list(self.calls) if each.waits_for_message), key=lambda each: each.begun_s
            )
            for each in waiting[: 1 + len(waiting) // 4]:
                each.abort_soon(_too_many(len(self.calls), "calls"))
        self.calls.add(call)
        return None


def _too_many(limit: int, unit: str) -> CallStatus:
    return call_status(Throttled(f"{limit} {unit} are open, which is the maximum"))


def _encoded_status(status: CallStatus, *, is_alone: bool) -> bytes:
    """Return the trailers of a status. `is_alone`: no headers were sent before (protocol, "Trailers-Only")."""
    if not (is_alone or status.code or status.trailers):
        return _OK_TRAILERS
    pairs = [(b":status", b"200"), (b"content-type", b"application/grpc")] if is_alone else []
    pairs.append((b"grpc-status", str(int(status.code)).encode()))
    if status.details:
        # Protocol, "Status-Message": percent-encoded UTF-8.
        details = status.details.encode("utf-8", "replace")
        pairs.append((b"grpc-message", _NOT_PLAIN.sub(lambda found: b"%%%02X" % found[0][0], details)))
    pairs += [(name.encode(), value.encode("ascii", "replace")) for name, value in status.trailers]
    return encode_headers(pairs)


def _compressed(message: Pieces, level: int) -> tuple[bytes, bytes]:
    """Return the prefix and the gzip-compressed message."""
    compressor = zlib.compressobj(level, wbits=_WINDOW_BITS["gzip"])
    data = b"".join([*map(compressor.compress, message), compressor.flush()])
    return PREFIX.pack(1, len(data)), data


def _inflated(message: bytearray, encoding: str, limit: int) -> memoryview:
    """Return the inflated message. Raises InvalidRequest for damaged data, Throttled for more than `limit` bytes."""
    inflator = zlib.decompressobj(_WINDOW_BITS[encoding])
    pieces: list[bytes] = []
    size = 0
    left: bytes | bytearray = message
    try:
        while piece := inflator.decompress(left, _INFLATED_PIECE_BYTES):
            size += len(piece)
            if size > min(limit, MAX_MESSAGE_BYTES):
                raise Throttled(f"a compressed message holds more than {min(limit, MAX_MESSAGE_BYTES)} bytes")
            pieces.append(piece)
            left = inflator.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"a message is not compressed as {encoding}: {error}") from None
    if not inflator.eof:
        raise InvalidRequest(f"a message is not compressed as {encoding}: its end is missing")
    return memoryview(b"".join(pieces))
