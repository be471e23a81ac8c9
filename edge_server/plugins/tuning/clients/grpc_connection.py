"""gRPC connection of a load test: HTTP/2 frames (RFC 9113) of unary calls or of one stream for each worker.

The header block of a request is encoded once: the first request adds its fields to the server's table, the others name
the entries (RFC 7541). The server may not use a table, so equal blocks of responses have equal bytes, and are decoded
once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from edge_server.frontends.error_status import GrpcStatus
from edge_server.http2 import frames
from edge_server.http2.frames import HEADER, UINT32, ConnectionFault, Http2ErrorCode, encode_frame
from edge_server.http2.grpc_calls import PREFIX, PREFIX_BYTES, RESET_STATUS, read_status, request_fields, take_message
from edge_server.http2.header_blocks import (
    MAX_HEADER_BLOCK_BYTES,
    TABLE_BYTES,
    HeaderBlock,
    HeaderFrames,
    HeaderReader,
    encode_repeated,
)
from edge_server.plugins.tuning.clients.connection import (
    CHECKED_EVERY,
    ConnectionLoop,
    LoadConnection,
    LoadWorker,
    OnAnswer,
    ServerAddress,
)
from edge_server.protocol import messages

_WINDOW = frames.MAX_WINDOW_BYTES
_WINDOW_STEP = _WINDOW // 2
"""Received bytes after which the server gets as much window again."""
_MAX_FRAME_BYTES = 1 << 20
_ERROR_TAG = b"\x0a"
"""First byte of a ModelStreamInferResponse whose first field is `error_message`."""
_FINAL = "triton_final_response"

_HELLO = frames.PREFACE + frames.encode_greeting(
    {
        frames.HEADER_TABLE_SIZE: 0,
        frames.ENABLE_PUSH: 0,
        frames.INITIAL_WINDOW_SIZE: _WINDOW,
        frames.MAX_FRAME_SIZE: _MAX_FRAME_BYTES,
    },
    _WINDOW,
)

CallOutcome = tuple[str, str]
"""Name of the status, "" for OK, and its message."""

_OK: CallOutcome = ("", "")
_NO_STATUS: CallOutcome = ("INTERNAL", "the answer ended without a grpc-status")


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


def parse_message(message_class: messages.MessageClass, data: bytes) -> Any:
    """Raises ValueError for other bytes than a message of the class."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        raise ValueError(f"the answer is no {message_class.DESCRIPTOR.name}") from None


def frame_message(message: bytes) -> bytes:
    """Return the message as gRPC sends it."""
    return PREFIX.pack(0, len(message)) + message


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
        is_tls = server.tls_context is not None
        self._fields = request_fields(call.path, call.authority, call.metadata, is_tls=is_tls)
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
        self._header_frames = HeaderFrames()
        self._headers = HeaderReader(MAX_HEADER_BLOCK_BYTES)
        self._first_block, self._next_block = encode_repeated(self._fields, TABLE_BYTES)

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
            head = frames.encode_header_frames(stream.number, 0, block)
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
            self._output.append(frames.encode_window_update(0, self._received))
            self._received = 0
        self._data_stream = stream = self._streams.get(number)
        if stream is None:
            return
        if flags & frames.END_STREAM:
            self._end_stream(stream, now, _NO_STATUS)
            return
        stream.received += size
        if stream.received >= _WINDOW_STEP:
            self._output.append(frames.encode_window_update(number, stream.received))
            stream.received = 0

    def _take_data(self, stream: _Stream, data: bytes, now: float) -> None:
        buffer = stream.buffer
        if not buffer and data[:PREFIX_BYTES] == PREFIX.pack(0, max(0, len(data) - PREFIX_BYTES)):
            self._take_message(stream, data[PREFIX_BYTES:], now)
            return
        buffer += data
        while stream.number in self._streams and (message := take_message(buffer)) is not None:
            self._take_message(stream, message, now)

    def _take_message(self, stream: _Stream, message: bytes, now: float) -> None:
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
        if self._header_frames.stream_id:
            self._header_frames.check(kind, number)
        if kind in (frames.HEADERS, frames.CONTINUATION):
            block = self._header_frames.add(kind, flags, number, body)
            if block is not None:
                self._take_fields(number, self._header_frames.flags & frames.END_STREAM, block, now)
        elif kind == frames.DATA:
            payload = frames.without_padding(kind, flags, body)
            self._begin_data(number, flags, len(body), now)
            if self._data_stream is not None and payload:
                self._take_data(self._data_stream, payload, now)
        elif kind == frames.RST_STREAM:
            stream = self._streams.get(number)
            if stream is not None:
                code = frames.read_uint32("RST_STREAM", body)
                message = f"the server reset the stream: {_code_name(code)}"
                self._end_stream(stream, now, (RESET_STATUS.get(code, "INTERNAL"), message), resets=False)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(frames.read_settings(body))
        elif kind == frames.PING and not flags & frames.ACK:
            self._output.append(encode_frame(frames.PING, frames.ACK, 0, body))
        elif kind == frames.WINDOW_UPDATE:
            size = frames.read_uint32("WINDOW_UPDATE", body) & frames.MAX_WINDOW_BYTES
            if number == 0:
                self._window += size
            elif number in self._streams:
                self._streams[number].window += size
            if self._blocked:
                self._send_blocked()
        elif kind == frames.GOAWAY:
            self._take_goaway(body, now)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the server pushes, which it must not")

    def _take_fields(self, number: int, ends: int, block: bytes, now: float) -> None:
        """Read the header fields or, if the stream ends, the trailers of a response."""
        headers = self._headers.read_response(block)
        stream = self._streams.get(number)
        if stream is None:
            return
        if headers.memo is None:
            headers.memo = _outcome(headers)
        outcome: CallOutcome = headers.memo
        if outcome is _NO_STATUS and headers.status not in (b"", b"200") and headers.status[:1] != b"1":
            outcome = f"HTTP {headers.status.decode('latin-1')}", "the answer is not one of gRPC"
            self._end_stream(stream, now, outcome, resets=not ends or None)
        elif ends:
            if not outcome[0] and self._call.streams:
                outcome = "UNAVAILABLE", "the server ended the stream"
            elif not outcome[0] and stream.message is None:
                outcome = "INTERNAL", "the answer has no message"
            elif not outcome[0] and stream.message is not None:
                self.answer = stream.message
                outcome = self._checked(stream.message)
            self._end_stream(stream, now, outcome)

    def _take_settings(self, settings: list[tuple[int, int]]) -> None:
        for name, value in settings:
            if name == frames.INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
            elif name == frames.MAX_FRAME_SIZE:
                self._frame_bytes = value
            elif name == frames.MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif name == frames.HEADER_TABLE_SIZE and value < TABLE_BYTES:
                self._first_block, self._next_block = encode_repeated(self._fields, value)
        self._output.append(frames.SETTINGS_ACK)
        self._send_blocked()
        self._start_waiting()

    def _take_goaway(self, body: bytes, now: float) -> None:
        """Send requests that the server has not read over a new connection, once it has answered the others."""
        last, code, text = frames.read_goaway(body)
        self._is_leaving = True
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


def _outcome(headers: HeaderBlock) -> CallOutcome:
    number, message = read_status(headers)
    if number is None:
        return _NO_STATUS
    try:
        status = GrpcStatus(number)
    except ValueError:
        status = GrpcStatus.UNKNOWN
    return _OK if status == GrpcStatus.OK else (status.name, message)


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
