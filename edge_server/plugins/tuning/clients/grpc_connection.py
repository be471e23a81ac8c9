"""gRPC connection of a load test: HTTP/2 frames (RFC 9113) of unary calls or of one stream for each worker.

The header block of a request is encoded once: the first request adds its fields to the server's table, the others name
the entries (RFC 7541). The server may not use a table, so equal blocks of responses have equal bytes, and are decoded
once.
"""

from __future__ import annotations

import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from hpack import Decoder, Encoder, HPACKError

from edge_server.frontends.error_status import GrpcStatus
from edge_server.http2 import frames
from edge_server.http2.frames import HEADER, SETTING, UINT32, Http2ErrorCode, encode_frame
from edge_server.plugins.tuning.clients.connection import (
    CHECKED_EVERY,
    ConnectionLoop,
    LoadConnection,
    LoadWorker,
    OnAnswer,
    ServerAddress,
)
from edge_server.protocol import messages

_TABLE_BYTES = 4096
"""Default size of HPACK's table."""
_WINDOW = frames.MAX_WINDOW_BYTES
_WINDOW_STEP = _WINDOW // 2
"""Received bytes after which the server gets as much window again."""
_MAX_FRAME_BYTES = 1 << 20
_MAX_BLOCK_BYTES = 64 << 10
_MAX_KEPT_BLOCKS = 256
_PREFIX_BYTES = 5
"""Bytes before a message of gRPC: whether it is compressed, and its length."""
_ERROR_TAG = b"\x0a"
"""First byte of a ModelStreamInferResponse whose first field is `error_message`."""
_FINAL = "triton_final_response"

_HELLO = (
    frames.PREFACE
    + encode_frame(
        frames.SETTINGS,
        0,
        0,
        SETTING.pack(frames.HEADER_TABLE_SIZE, 0)
        + SETTING.pack(frames.ENABLE_PUSH, 0)
        + SETTING.pack(frames.INITIAL_WINDOW_SIZE, _WINDOW)
        + SETTING.pack(frames.MAX_FRAME_SIZE, _MAX_FRAME_BYTES),
    )
    + encode_frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(_WINDOW - frames.DEFAULT_WINDOW_BYTES))
)

CallOutcome = tuple[str, str]
"""Name of the status, "" for OK, and its message."""

_OK: CallOutcome = ("", "")
_NO_STATUS: CallOutcome = ("INTERNAL", "the answer ended without a grpc-status")
_STATUS_OF_RESET = {
    Http2ErrorCode.REFUSED_STREAM: "UNAVAILABLE",
    Http2ErrorCode.CANCEL: "CANCELLED",
    Http2ErrorCode.ENHANCE_YOUR_CALM: "RESOURCE_EXHAUSTED",
    Http2ErrorCode.INADEQUATE_SECURITY: "PERMISSION_DENIED",
}
"""HTTP/2 error code -> gRPC status, of gRPC's "HTTP2 Transport Mapping"; of others INTERNAL."""


class GrpcCall(NamedTuple):
    """What the calls of a connection have in common. `streams`: each worker's requests go over one stream.

    `check` raises ValueError for a message that is no answer.
    """

    path: str
    authority: str
    metadata: Sequence[tuple[str, str]] = ()
    streams: bool = False
    is_decoupled: bool = False
    check: Callable[[bytes], object] | None = None


class ResponseFields(NamedTuple):
    """Header fields or trailers of a response. `outcome` is None without grpc-status."""

    http_status: str
    outcome: CallOutcome | None


def parse_message(message_class: messages.MessageClass, data: bytes) -> Any:
    """Raises ValueError for other bytes than a message of the class."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        raise ValueError(f"the answer is no {message_class.DESCRIPTOR.name}") from None


def frame_message(message: bytes) -> bytes:
    """Return the message as gRPC sends it."""
    return b"\0" + UINT32.pack(len(message)) + message


class _Stream:
    """Stream of HTTP/2. `request` is the one in flight, None between those of a long stream."""

    __slots__ = ("buffer", "message", "number", "received", "request", "unsent", "window", "worker")

    def __init__(self, worker: LoadWorker, number: int, window: int) -> None:
        self.worker = worker
        self.number = number
        self.window = window
        self.request: bytes | None = None
        self.unsent: memoryview | None = None
        self.buffer = bytearray()
        self.message: bytes | None = None
        """Message of a unary response."""
        self.received = 0
        """Bytes since the last WINDOW_UPDATE."""


class GrpcLoadConnection(LoadConnection):
    """Connection that several workers share."""

    failure_reason = "UNAVAILABLE"
    timeout_reason = "DEADLINE_EXCEEDED"

    def __init__(self, server: ServerAddress, loop: ConnectionLoop, on_answer: OnAnswer, call: GrpcCall) -> None:
        super().__init__(server, loop, on_answer)
        self._call = call
        self._fields = [
            (":method", "POST"),
            (":scheme", "http" if server.tls_context is None else "https"),
            (":path", call.path),
            (":authority", call.authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *call.metadata,
        ]
        self.answer: bytes | None = None
        """Message of the last successful unary call."""
        self._answer_count = 0
        self._begin()

    def _begin(self) -> None:
        """Set the state of a new connection."""
        self._streams: dict[int, _Stream] = {}
        self._long_streams: dict[LoadWorker, _Stream] = {}
        self._waiting: deque[tuple[LoadWorker, bytes]] = deque()
        """Requests for which the server allows no stream now."""
        self._blocked: list[_Stream] = []
        """Streams whose output waits for the server's windows, in their order."""
        self._next_number = 1
        self._window = self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._max_streams = frames.MAX_STREAM_ID
        self._is_leaving = False
        """Whether no new stream may be opened: the server sent GOAWAY."""
        self._goaway_message = ""
        self._has_answered = False
        self._has_settings = False
        self._rest = b""
        self._data_stream: _Stream | None = None
        self._data_left = 0
        """Missing bytes of the DATA frame that is being received."""
        self._received = 0
        self._block_stream = self._block_flags = 0
        """Stream of a header block that CONTINUATION frames go on with, 0 if none, and the flags of its first frame."""
        self._block = b""
        self._use_table(_TABLE_BYTES)

    def _use_table(self, table_bytes: int) -> None:
        used_bytes = sum(len(name) + len(value) + 32 for name, value in self._fields)
        encoder = Encoder()
        if used_bytes > min(table_bytes, _TABLE_BYTES):
            encoder.header_table_size = 0
        self._first_block: bytes = encoder.encode(self._fields, huffman=False)
        self._next_block: bytes = encoder.encode(self._fields, huffman=False)

    def _open(self) -> None:
        super()._open()
        self._begin()
        self._output.append(_HELLO)

    # Requests ---------------------------------------------------------------------------------------------------------

    def _encode(self, worker: LoadWorker, request: bytes) -> None:
        stream = self._long_streams.get(worker)
        head = b""
        if stream is None:
            if self._is_leaving or len(self._streams) >= self._max_streams:
                self._waiting.append((worker, request))
                return
            stream = _Stream(worker, self._next_number, self._initial_window)
            self._next_number += 2
            self._streams[stream.number] = stream
            if self._call.streams:
                self._long_streams[worker] = stream
            block, self._first_block = self._first_block, self._next_block
            head = HEADER.pack(len(block) >> 8, len(block) & 255, frames.HEADERS, frames.END_HEADERS, stream.number)
            head += block
        stream.request = request
        size = len(request)
        if size > self._frame_bytes or size > stream.window or size > self._window or self._blocked:
            if head:
                self._output.append(head)
            stream.unsent = memoryview(request)
            self._blocked.append(stream)
            self._send_blocked()
            return
        stream.window -= size
        self._window -= size
        end = 0 if self._call.streams else frames.END_STREAM
        self._output.append(head + HEADER.pack(size >> 8, size & 255, frames.DATA, end, stream.number) + request)

    def _send_blocked(self) -> None:
        """Add to the output what the server's windows allow now."""
        for stream in self._blocked:
            while stream.unsent is not None and (size := min(len(stream.unsent), stream.window, self._window)) > 0:
                size = min(size, self._frame_bytes)
                piece, rest = stream.unsent[:size], stream.unsent[size:]
                stream.unsent = rest or None
                stream.window -= size
                self._window -= size
                end = frames.END_STREAM if stream.unsent is None and not self._call.streams else 0
                self._output += [HEADER.pack(size >> 8, size & 255, frames.DATA, end, stream.number), piece]
        self._blocked = [stream for stream in self._blocked if stream.unsent is not None]

    def cancel(self, worker: LoadWorker, message: str) -> None:
        for item in self._waiting:
            if item[0] is worker:
                self._waiting.remove(item)
                self._report(worker, time.perf_counter(), (self.timeout_reason, message))
                return
        stream = next(stream for stream in self._streams.values() if stream.worker is worker)
        self._end_stream(stream, time.perf_counter(), (self.timeout_reason, message), resets=True)
        self.flush()

    def _fail_requests(self, reason: str, message: str) -> None:
        workers = [stream.worker for stream in self._streams.values() if stream.request is not None]
        workers += [worker for worker, _ in self._waiting]
        if self._goaway_message:
            message = self._goaway_message
        self._begin()
        for worker in workers:
            self._report(worker, time.perf_counter(), (reason, message))

    # Responses --------------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes, now: float) -> None:
        if self._rest:
            data = self._rest + data
        if not self._has_settings:
            if len(data) < frames.FRAME_HEADER_BYTES:
                self._rest = data
                return
            if data.startswith(b"HTTP/"):
                raise ConnectionError("http1.x server")
            if data[3] != frames.SETTINGS:
                raise ConnectionError("Expected SETTINGS frame")
            self._has_settings = True
        wire = self._socket
        position, end = 0, len(data)
        while self._socket is wire:
            if self._data_left:
                piece = data[position : position + self._data_left]
                if not piece:
                    break
                position += len(piece)
                self._data_left -= len(piece)
                if self._data_stream is not None:
                    self._take_data(self._data_stream, piece, now)
                continue
            body = position + frames.FRAME_HEADER_BYTES
            if end < body:
                break
            high, low, kind, flags, number = HEADER.unpack_from(data, position)
            size = high << 8 | low
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"the server sent a frame of {size} bytes, at most {_MAX_FRAME_BYTES} are allowed")
            if kind == frames.DATA and not flags & frames.PADDED:
                position = body
                self._begin_data(number, flags, size, now)
                self._data_left = size
            elif end - body < size:
                break
            else:
                position = body + size
                self._take_frame(kind, flags, number & frames.MAX_STREAM_ID, data[body:position], now)
        if self._socket is wire:
            self._rest = data[position:]

    def _begin_data(self, number: int, flags: int, size: int, now: float) -> None:
        """Take the header of a DATA frame into account."""
        self._received += size
        if self._received >= _WINDOW_STEP:
            self._output.append(encode_frame(frames.WINDOW_UPDATE, 0, 0, UINT32.pack(self._received)))
            self._received = 0
        self._data_stream = stream = self._streams.get(number)
        if stream is None:
            return
        if flags & frames.END_STREAM:
            self._end_stream(stream, now, _NO_STATUS)
            return
        stream.received += size
        if stream.received >= _WINDOW_STEP:
            self._output.append(encode_frame(frames.WINDOW_UPDATE, 0, number, UINT32.pack(stream.received)))
            stream.received = 0

    def _take_data(self, stream: _Stream, data: bytes, now: float) -> None:
        buffer = stream.buffer
        if not buffer and len(data) == _PREFIX_BYTES + int.from_bytes(data[1:_PREFIX_BYTES], "big"):
            self._take_message(stream, data, now)
            return
        buffer += data
        while (
            len(buffer) >= _PREFIX_BYTES
            and len(buffer) >= (size := _PREFIX_BYTES + int.from_bytes(buffer[1:_PREFIX_BYTES], "big"))
            and stream.number in self._streams
        ):
            message = bytes(memoryview(buffer)[:size])
            del buffer[:size]
            self._take_message(stream, message, now)

    def _take_message(self, stream: _Stream, framed: bytes, now: float) -> None:
        if framed[0]:
            raise ValueError("the server compressed its answer, which this client did not offer to read")
        message = framed[_PREFIX_BYTES:]
        if not self._call.streams:
            stream.message = message
            return
        outcome = _OK
        if message[:1] == _ERROR_TAG:
            outcome = "STREAM_ERROR", parse_message(messages.ModelStreamInferResponse, message).error_message
        elif self._call.is_decoupled and not _is_final(message):
            stream.worker.since_s = now
            return
        else:
            outcome = self._checked(message)
        # After an error of a decoupled model, later responses to this request would be mistaken for those to the next.
        if self._is_leaving or stream.unsent is not None or (outcome[0] and self._call.is_decoupled):
            self._end_stream(stream, now, outcome, resets=True)
        elif stream.request is None:
            self._end_stream(stream, now, _OK, resets=True)  # a response to no request
        else:
            stream.request = None
            self._report(stream.worker, now, outcome)

    def _checked(self, message: bytes) -> CallOutcome:
        """Return OK, or why the message, if it is one of those that are checked, is no answer."""
        self._has_answered = True
        self._answer_count += 1
        if self._call.check is None or self._answer_count % CHECKED_EVERY != 1:
            return _OK
        try:
            self._call.check(message)
        except ValueError as error:
            return "INVALID ANSWER", str(error)
        return _OK

    def _take_frame(self, kind: int, flags: int, number: int, body: bytes, now: float) -> None:
        """Read a whole frame of any kind but DATA without padding. Raises ValueError."""
        if self._block_stream and kind != frames.CONTINUATION:
            raise ValueError("the server sent another frame within a header block")
        size = len(body)
        if flags & frames.PADDED and kind in (frames.DATA, frames.HEADERS):
            if not body or body[0] >= len(body):
                raise ValueError("the server sent a frame that is padded beyond its end")
            body = body[1 : len(body) - body[0]]
        if kind == frames.HEADERS or (kind == frames.CONTINUATION and self._block_stream == number):
            if kind == frames.HEADERS:
                self._block_stream, self._block_flags = number, flags
                self._block = body[5:] if flags & frames.HAS_PRIORITY else body
            else:
                self._block += body
            if len(self._block) > _MAX_BLOCK_BYTES:
                raise ValueError("the headers of the answer are too long")
            if flags & frames.END_HEADERS:
                self._block_stream = 0
                self._take_fields(number, self._block_flags & frames.END_STREAM, self._block, now)
        elif kind == frames.DATA:
            self._begin_data(number, flags, size, now)
            if self._data_stream is not None and body:
                self._take_data(self._data_stream, body, now)
        elif kind == frames.RST_STREAM:
            stream = self._streams.get(number)
            if stream is not None:
                code = UINT32.unpack(body)[0]
                message = f"the server reset the stream: {_code_name(code)}"
                self._end_stream(stream, now, (_STATUS_OF_RESET.get(code, "INTERNAL"), message), resets=False)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(body)
        elif kind == frames.PING and not flags & frames.ACK:
            self._output.append(encode_frame(frames.PING, frames.ACK, 0, body))
        elif kind == frames.WINDOW_UPDATE:
            size = UINT32.unpack(body)[0] & frames.MAX_WINDOW_BYTES
            if number == 0:
                self._window += size
            elif number in self._streams:
                self._streams[number].window += size
            if self._blocked:
                self._send_blocked()
        elif kind == frames.GOAWAY:
            self._take_goaway(body, now)
        elif kind in (frames.PUSH_PROMISE, frames.CONTINUATION):
            raise ValueError(f"the server sent a frame of type {kind} that is not allowed here")

    def _take_fields(self, number: int, ends: int, block: bytes, now: float) -> None:
        """Read the header fields or, if the stream ends, the trailers of a response."""
        known = self._loop.response_heads
        fields = known.get(block)
        if fields is None:
            fields = _decode_fields(block)
            if len(known) >= _MAX_KEPT_BLOCKS:
                known.clear()
            known[block] = fields
        stream = self._streams.get(number)
        if stream is None:
            return
        if fields.http_status not in ("", "200") and fields.outcome is None and fields.http_status[:1] != "1":
            outcome = f"HTTP {fields.http_status}", "the answer is not one of gRPC"
            self._end_stream(stream, now, outcome, resets=not ends or None)
        elif ends:
            outcome = fields.outcome or _NO_STATUS
            if not outcome[0] and self._call.streams:
                outcome = "UNAVAILABLE", "the server ended the stream"
            elif not outcome[0] and stream.message is None:
                outcome = "INTERNAL", "the answer has no message"
            elif not outcome[0] and stream.message is not None:
                self.answer = stream.message
                outcome = self._checked(stream.message)
            self._end_stream(stream, now, outcome)

    def _take_settings(self, body: bytes) -> None:
        for name, value in SETTING.iter_unpack(body):
            if name == frames.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
            elif name == frames.MAX_FRAME_SIZE:
                self._frame_bytes = value
            elif name == frames.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif name == frames.HEADER_TABLE_SIZE and value < _TABLE_BYTES:
                self._use_table(value)
        self._output.append(encode_frame(frames.SETTINGS, frames.ACK, 0))
        self._send_blocked()
        self._start_waiting()

    def _take_goaway(self, body: bytes, now: float) -> None:
        """Send requests that the server has not read over a new connection, once it has answered the others."""
        last, code = UINT32.unpack_from(body)[0] & frames.MAX_STREAM_ID, UINT32.unpack_from(body, 4)[0]
        self._is_leaving = True
        text = body[8:256].decode("utf-8", "replace")
        self._goaway_message = f"the server ended the connection: {_code_name(code)} {text}".rstrip()
        for stream in list(self._streams.values()):
            if stream.number > last and stream.request is not None and code == 0 and self._has_answered:
                request, stream.request = stream.request, None
                self._waiting.append((stream.worker, request))
            if stream.number > last or stream.request is None:
                outcome = "UNAVAILABLE", self._goaway_message
                self._end_stream(stream, now, outcome, resets=stream.number <= last)
        self._start_waiting()

    def _end_stream(self, stream: _Stream, now: float, outcome: CallOutcome, *, resets: bool | None = None) -> None:
        """Forget the stream, and report its request, if one is in flight. `resets`: whether to tell the server; None:
        if it expects more of the request."""
        del self._streams[stream.number]
        self._long_streams.pop(stream.worker, None)
        if self._data_stream is stream:
            self._data_stream = None
        if stream.unsent is not None:
            self._blocked.remove(stream)
        if resets is None:
            resets = self._call.streams or stream.unsent is not None
        if resets:
            code = UINT32.pack(Http2ErrorCode.CANCEL)
            self._output.append(encode_frame(frames.RST_STREAM, 0, stream.number, code))
        if stream.request is not None:
            self._report(stream.worker, now, outcome)
        if self._waiting:
            self._start_waiting()
        elif self._is_leaving and not self._streams:
            self.close()

    def _start_waiting(self) -> None:
        """Start requests that waited for a stream, or for a new connection."""
        if self._is_leaving and not self._streams:
            waiting = self._waiting
            self.close()
            for worker, request in waiting:
                self._start(worker, request)
        while self._waiting and not self._is_leaving and len(self._streams) < self._max_streams:
            self._encode(*self._waiting.popleft())

    def _report(self, worker: LoadWorker, now: float, outcome: CallOutcome) -> None:
        self._on_answer(worker, now, *outcome, None)


def _decode_fields(block: bytes) -> ResponseFields:
    """Raises ValueError."""
    try:
        fields = dict(Decoder(_MAX_BLOCK_BYTES).decode(block, raw=True))
    except HPACKError as error:
        raise ValueError(f"the headers of the answer cannot be decoded: {error}") from None
    http_status = fields.get(b":status", b"").decode("latin-1")
    given = fields.get(b"grpc-status")
    if given is None:
        return ResponseFields(http_status, None)
    try:
        status = GrpcStatus(int(given)).name
    except ValueError:
        status = GrpcStatus.UNKNOWN.name
    message = urllib.parse.unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return ResponseFields(http_status, _OK if status == "OK" else (status, message))


def _is_final(message: bytes) -> bool:
    """Return whether a ModelStreamInferResponse is the last one to its request."""
    if _FINAL.encode() not in message:
        return False
    parameters = parse_message(messages.ModelStreamInferResponse, message).infer_response.parameters
    return bool(parameters[_FINAL].bool_param)


def _code_name(code: int) -> str:
    try:
        return Http2ErrorCode(code).name
    except ValueError:
        return str(code)
