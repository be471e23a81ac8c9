"""HTTP/1.1 connection: reads requests, one at a time and in order, and writes their responses.
The body of a request that was refused by its head is discarded, up to a limit.

A request is a head (`request_head`), which decides the target, and a body (`body_reader`). Clients often repeat a head.
Heads of inference requests are cached by their bytes: a cached head is neither parsed nor routed again.
"""

from __future__ import annotations

import asyncio
import enum
import re
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

from edge_server.core.decode_cache import MAX_KEY_BYTES, DecodeCache
from edge_server.errors import EdgeServerError, Refusal
from edge_server.frontends.connection_limit import has_unread_bytes
from edge_server.frontends.http.body_reader import Body, BodyReader, ChunkDecoder, DiscardedBody
from edge_server.frontends.http.client_timeouts import (
    MIN_BYTES_PER_S,
    STALL_S,
    ClosingRefusal,
    ReadProgress,
    StalledBody,
    slow_text,
    stalled_text,
)
from edge_server.frontends.http.cors import CorsPolicy
from edge_server.frontends.http.host_check import HostCheck
from edge_server.frontends.http.request_head import MAX_HEAD_BYTES, METHOD, RequestHead, parse_head
from edge_server.frontends.http.response import CONTINUE, HttpResponse, error_response, head_bytes, response_bytes
from edge_server.frontends.memory_budget import MemoryBudget

TICKS = 4
"""A connection without activity for this number of ticks is stalled. A period that begins between two ticks gets one
tick more."""

READ_BYTES = 64 * 1024
"""Maximum bytes of one read. A body of known length is read directly into its buffer, without this limit."""

_COPY_BYTES = 4096
"""A body of this size or less that came with its head is copied: that costs less than views of it."""

_KEEP_ALIVE_S = 3630.0
"""Time after which an idle connection is closed. It is longer than that of usual proxies, so that the proxy closes
first."""

_MIN_WAIT_S = 0.01

_HELD_BYTES = 64 * 1024
"""Maximum bytes held behind the current request; further bytes stay in the socket."""

_HELD_TURN_S = 0.002
"""Time that held bytes of all connections may take in one turn of the event loop."""

_UNREAD_BYTES = 256 << 20
_UNREAD_CHUNKED_BYTES = 16 << 20
"""Maximum bytes of a body that are read and discarded after an early response. A client that sends the whole body
before it reads would otherwise miss the response. A client that sends more is disconnected."""

_HEAD_END = b"\r\n\r\n"
_EMPTY_LINE = b"\r\n"

_METHOD = re.compile(METHOD + rb"(?: |\Z)")
"""Start of a request. Other bytes are refused at once, without waiting for the end of a head."""

_DISCARDED = DiscardedBody()


class HttpCall(Protocol):
    """A request that runs."""

    def cancel(self) -> object:
        """Cancel the request: the client has disconnected. It sends no response."""


class SideProtocol(Protocol):
    """Second protocol of a connection that serves some of its requests: aiohttp."""

    def lost(self) -> None:
        """Note that the connection is lost."""

    def pause_writing(self) -> None:
        """Note that the client does not read."""

    def resume_writing(self) -> None:
        """Note that the client reads again."""


class RequestTarget(Protocol):
    """Serves the requests with one head."""

    @property
    def aligned_at(self) -> int:
        """Byte of the body that gets an aligned address, see BodyReader."""

    @property
    def is_cacheable(self) -> bool:
        """Whether it may serve all requests with the same head, until `Connections.drop_cached_headers`."""

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> HttpCall:
        """Start a request. It sends one response by `send_pieces`, `send_response` or a stream.

        The response may be sent before this returns. `reader` has received the body if it came in several reads:
        `release` it when the body is decoded.
        """


class ServerState(Protocol):
    """State of the server that decides whether connections stay open."""

    @property
    def is_in_drain_delay(self) -> bool:
        """Whether each response is the last one of its connection."""


class NoDrainDelay(NamedTuple):
    """State of a server without a drain delay."""

    is_in_drain_delay: bool = False


class _Phase(enum.Enum):
    """Phase of a connection."""

    HEAD = enum.auto()
    """Between requests, or within a head."""
    BODY = enum.auto()
    """A body is being received."""
    BUSY = enum.auto()
    """A request runs, or its response is being sent."""
    DISCARD = enum.auto()
    """The rest of a body is read and discarded: its request has its response already."""
    CLOSED = enum.auto()


class HttpConnection(asyncio.BufferedProtocol):
    """One client's connection. Lives on one event loop."""

    __slots__ = (
        "_cached_targets",
        "_call",
        "_connections",
        "_cors",
        "_decoder",
        "_discarded",
        "_drained",
        "_filled_before",
        "_head",
        "_head_ticks",
        "_held",
        "_held_at",
        "_idle_ticks",
        "_is_closing",
        "_is_full",
        "_is_reading_paused",
        "_is_scheduled",
        "_keeps_alive",
        "_left",
        "_loop",
        "_lost_poll",
        "_outgoing",
        "_phase",
        "_read_buffer",
        "_read_progress",
        "_reader",
        "_server_state",
        "_target",
        "_transport",
        "began_ns",
        "has_activity",
        "is_plain",
        "side_protocol",
        "silent_since_s",
    )

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._cached_targets = connections.cached_targets
        self._read_buffer = connections.read_buffer
        self._server_state = connections.server_state
        self._cors = connections.cors
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost_poll: select.poll | None = None
        """With TLS, reports the end of the connection, which asyncio's transport notices later."""
        self._phase = _Phase.HEAD
        self._head: RequestHead | None = None
        """Head of the current request, or of the latest one."""
        self._target: RequestTarget | None = None
        self._reader: BodyReader | None = None
        self._decoder: ChunkDecoder | None = None
        self._call: HttpCall | None = None
        self.side_protocol: SideProtocol | None = None
        self._held = b""
        self._held_at = 0
        self._is_scheduled = False
        """Whether held bytes wait for another turn of the loop."""
        self._left = 0
        """Bytes of a body of known length that are still to be discarded."""
        self._discarded = 0
        self._outgoing: deque[bytes | memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        """Waits until the client reads more of a stream."""
        self._keeps_alive = True
        self.is_plain = True
        """Whether the response needs no header about the connection or the origin of the request."""
        self._is_full = False
        self._is_reading_paused = False
        self._is_closing = False
        self._idle_ticks = 0
        self._head_ticks = 0
        """Ticks since the start of the head; during a body, ticks since the last check of its rate."""
        self._filled_before = 0
        """Bytes of the body at that check."""
        self._read_progress = ReadProgress()
        self.began_ns = 0
        """Arrival of the first byte of the current request (time.monotonic_ns), 0 if it came in one read."""
        self.has_activity = False
        self.silent_since_s = time.monotonic()
        """When the last request ended, or the connection was made (time.monotonic)."""

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if transport.get_extra_info("sslcontext") is not None:
                self._lost_poll = select.poll()
                self._lost_poll.register(connection, select.POLLRDHUP)
        self._connections.opened(self, self._transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._phase = _Phase.CLOSED
        self._held = b""
        self._outgoing.clear()
        self._transport = None
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        if self.side_protocol is not None:
            self.side_protocol.lost()
        self._release_body()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError("the client is gone"))
        self._connections.lost(self)

    def eof_received(self) -> None:
        # asyncio closes the transport now; with TLS, only this call makes `is_closing` say so.
        self._close_transport()

    def get_buffer(self, sizehint: int) -> memoryview:
        reader = self._reader
        if self._phase is _Phase.BODY and reader is not None and type(reader.buffer) is memoryview:
            return reader.buffer[reader.received :]
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.has_activity = True
        phase = self._phase
        if phase is _Phase.BODY and self._decoder is None:
            reader = self._reader
            assert reader is not None
            reader.count(nbytes)
            if reader.received == reader.size and self._phase is _Phase.BODY:
                self._run_target(reader.finish())
            return
        data = bytes(self._read_buffer[:nbytes])
        if phase is _Phase.HEAD and not self._held and not self._is_full:
            self._start_request(data, 0)
        elif phase is not _Phase.CLOSED:
            self._hold(data)
            if not self._is_scheduled:
                self.process_held()

    def pause_writing(self) -> None:
        self._is_full = True
        if self.side_protocol is not None:
            self.side_protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.side_protocol is not None:
            self.side_protocol.resume_writing()
        if self._outgoing:
            self._send()
        elif self._phase is _Phase.HEAD and self._held:
            self._continue_soon()

    # -- received bytes

    def _hold(self, data: bytes) -> None:
        """Keep bytes for later; stop reading when there are many."""
        self._held = self._held[self._held_at :] + data if self._held else data
        self._held_at = 0
        if len(self._held) >= _HELD_BYTES and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _continue_soon(self) -> None:
        """Continue in another turn of the loop, so that a client that sends much does not delay others."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._connections.continue_soon(self)

    def process_held(self) -> None:
        """Process the held bytes, or some of them."""
        self._is_scheduled = False
        phase = self._phase
        if not self._held or phase is _Phase.BUSY or (phase is _Phase.HEAD and self._is_full):
            return
        data, start = self._held, self._held_at
        self._held = b""
        if phase is _Phase.HEAD:
            self._start_request(data, start)
        elif phase is _Phase.BODY:
            self._read_chunks(data, start)
        elif phase is _Phase.DISCARD:
            self._discard(data, start)
        if self._is_reading_paused and len(self._held) - self._held_at < _HELD_BYTES and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _keep_rest(self, data: bytes, start: int) -> None:
        if start < len(data):
            self._held, self._held_at = data, start

    # -- requests

    def _start_request(self, data: bytes, start: int) -> None:
        """Start the request at byte `start` of `data`, and hold the bytes behind it."""
        while data.startswith(_EMPTY_LINE, start):  # RFC 9112, 2.2
            start += len(_EMPTY_LINE)
        end = data.find(_HEAD_END, start, start + MAX_HEAD_BYTES) + len(_HEAD_END)
        if end < len(_HEAD_END):
            is_too_long = len(data) - start >= MAX_HEAD_BYTES
            if is_too_long or (_METHOD.match(data, start) is None and data[start:] not in (b"", b"\r")):
                text = f"the request's head has more than {MAX_HEAD_BYTES} bytes" if is_too_long else "this is not HTTP"
                self._refuse_connection(ClosingRefusal(text))
            else:
                self._keep_rest(data, start)
            return
        self._head_ticks = 0
        raw = data[start:end]
        head_and_target = self._cached_targets.get(raw)
        if head_and_target is None:
            try:
                head_and_target = self._connections.read_head(raw)
            except ClosingRefusal as refusal:
                self._refuse_connection(refusal)
                return
        self._head, target = head, _ = head_and_target
        self._keeps_alive = head.keeps_alive and not self._server_state.is_in_drain_delay
        self.is_plain = self._keeps_alive and not head.is_http_1_0 and self._cors is None
        size = head.body_size
        if size is None or len(data) - end < size:
            self._start_body(head, target, data, end)
            return
        self.began_ns = 0
        if end + size < len(data):
            self._held, self._held_at = data, end + size
        if isinstance(target, HttpResponse):
            self._phase = _Phase.BUSY
            self.send_response(target)
            return
        self._target = target
        self._run_target(data[end : end + size] if size <= _COPY_BYTES else memoryview(data)[end : end + size])

    def _start_body(self, head: RequestHead, target: RequestTarget | HttpResponse, data: bytes, start: int) -> None:
        """Receive an incomplete body; if the request is refused, respond at once and discard the body."""
        size = head.body_size
        client_waits = head.expects_continue and start == len(data)
        self._decoder = ChunkDecoder() if size is None else None
        self.began_ns = time.monotonic_ns()
        self._left = size or 0
        self._discarded = self._filled_before = 0
        self._phase = _Phase.BODY
        self._keep_rest(data, start)
        if not isinstance(target, HttpResponse):
            try:
                self._reader = BodyReader(
                    size, self._connections.budget, self._loop, self._refuse_body, aligned_at=target.aligned_at
                )
            except Refusal as refusal:
                target = error_response(refusal)
                target.closes = True
        if isinstance(target, HttpResponse):
            if client_waits:
                # Without "100 Continue" the client may omit the body: the next bytes may be a body or a request.
                target.closes = True
                self._phase = _Phase.BUSY
                self.send_response(target)
            else:
                self._respond_early(target)
            return
        self._target = target
        if client_waits:
            self._write(CONTINUE)
        if self._decoder is None:
            assert self._reader is not None
            piece, self._held = memoryview(data)[start:], b""
            self._reader.append(piece)
        elif self._held:
            self.process_held()

    def _read_chunks(self, data: bytes, start: int) -> None:
        reader, decoder = self._reader, self._decoder
        assert reader is not None
        assert decoder is not None
        try:
            start, has_more = decoder.decode(data, start, reader)
        except ClosingRefusal as refusal:
            if self._phase is _Phase.BODY:
                self._refuse_connection(refusal)
            else:
                self._close()
            return
        self._keep_rest(data, start)
        if not decoder.is_complete:
            if has_more:
                self._continue_soon()
        elif self._phase is _Phase.BODY:
            self._run_target(reader.finish())
        else:  # the body was refused meanwhile
            self._end_request()

    def _run_target(self, body: Body) -> None:
        """Run the request; its body is complete."""
        target, reader = self._target, self._reader
        assert target is not None
        self._phase = _Phase.BUSY
        call = target.begin(self, body, reader)
        if self._phase is _Phase.BUSY and self._target is target and not self._outgoing:
            self._call = call

    def register_body(self) -> BodyReader:
        """Return a reader for a body that came in one read: the budget needs it to count the decompressed body."""
        self._reader = BodyReader(0, self._connections.budget, self._loop, lambda refusal: None)
        self._reader.finish()
        return self._reader

    def track_task(self, task: asyncio.Task[None]) -> None:
        """Make the listener's shutdown wait for a task of the current request."""
        self._connections.tasks.add(task)
        task.add_done_callback(self._connections.tasks.discard)

    def _refuse_connection(self, refusal: ClosingRefusal, *, client_is_silent: bool = False) -> None:
        """Send an error and close.

        If the client still sends, first read and discard its bytes until it closes: the kernel resets a connection that
        is closed with unread bytes, and the client could lose the response.
        """
        transport = self._transport
        if transport is None:
            self._close()
            return
        self._write(response_bytes(error_response(refusal), closes=True))
        if client_is_silent or self._is_closing or not transport.can_write_eof():
            self._close()
            return
        if transport.get_write_buffer_size():
            # asyncio would end the stream later, and print a traceback if the client is gone by then.
            self._close()
            return
        try:
            transport.write_eof()
        except OSError:  # the client is gone
            self._close()
            return
        self._release_body()
        self._held = b""
        self._decoder = None
        self._keeps_alive = False
        self._left, self._discarded = _UNREAD_BYTES, 0
        self._head_ticks = self._filled_before = 0
        self._phase = _Phase.DISCARD
        if self._is_reading_paused:
            self._is_reading_paused = False
            transport.resume_reading()

    def _refuse_body(self, refusal: EdgeServerError) -> None:
        """Refuse a request while its body is received."""
        response = error_response(refusal)
        response.closes = True
        self._respond_early(response)

    def _respond_early(self, response: HttpResponse) -> None:
        """Respond before the end of the body; the rest is read and discarded."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._left -= reader.received
            reader.release()
        self._keeps_alive = self._keeps_alive and not response.closes
        self._phase = _Phase.DISCARD
        self._write(self._response_bytes(response))
        if self._held:
            self._continue_soon()
        elif self._decoder is None and not self._left:
            self._end_request()

    def _discard(self, data: bytes, start: int) -> None:
        """Discard bytes of a body whose request has its response already."""
        decoder = self._decoder
        begun = start
        has_more = False
        if decoder is None:
            start = min(len(data), start + self._left)
            self._left -= start - begun
            is_complete = not self._left
        else:
            try:
                start, has_more = decoder.decode(data, start, _DISCARDED)
            except ClosingRefusal:
                self._close()
                return
            is_complete = decoder.is_complete
        self._discarded += start - begun
        self._keep_rest(data, start)
        if is_complete:
            self._end_request()
        elif self._discarded > (_UNREAD_BYTES if decoder is None else _UNREAD_CHUNKED_BYTES):
            self._close()
        elif has_more:
            self._continue_soon()

    # -- responses

    def send_pieces(self, pieces: list[bytes | memoryview]) -> None:
        """Send the bytes of a complete response."""
        self._call = None
        if self._transport is None:
            return
        self._outgoing.extend(pieces)
        self._send()

    def head_bytes(self, status: int, headers: Mapping[str, str]) -> bytes:
        """Return the head of a response to the current request."""
        head = self._head
        shows_keep_alive = self._keeps_alive and head is not None and head.is_http_1_0
        headers = {**headers, **self.cors_headers()}
        return head_bytes(status, headers, shows_keep_alive=shows_keep_alive, closes=not self._keeps_alive)

    def cors_headers(self) -> Mapping[str, str]:
        """Return the headers that allow a page of another origin to read the response to the current request."""
        return {} if self._cors is None or self._head is None else self._cors.headers(self._head)

    def send_response(self, response: HttpResponse) -> None:
        """Send a complete response."""
        self._keeps_alive = self._keeps_alive and not response.closes
        self.send_pieces([self._response_bytes(response)])

    def _response_bytes(self, response: HttpResponse) -> bytes:
        head = self._head
        assert head is not None
        shows_keep_alive = self._keeps_alive and head.is_http_1_0
        has_body = head.method != "HEAD"
        response.headers.update(self.cors_headers())
        return response_bytes(
            response, closes=not self._keeps_alive, shows_keep_alive=shows_keep_alive, has_body=has_body
        )

    def _send(self) -> None:
        outgoing = self._outgoing
        transport = self._transport
        assert transport is not None
        while outgoing:
            if self._is_full or not self.can_send():
                return
            transport.write(outgoing.popleft())
        if self._phase is _Phase.BUSY:
            self._end_request()

    def begin_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a response of unknown length. Call `write` and `end_stream` next."""
        assert self._head is not None
        if self._head.is_http_1_0:
            self._keeps_alive = False  # the response ends with the connection
        else:
            headers = {**headers, "Transfer-Encoding": "chunked"}
        self._write(self.head_bytes(status, headers))

    async def write(self, data: bytes) -> None:
        """Send a piece of a stream, and wait while the client does not read. Raises ConnectionResetError.

        `data` must not be empty: that would end the stream.
        """
        if self._transport is None or not self.can_send():
            raise ConnectionResetError("the client is gone")
        assert self._head is not None
        self._transport.write(data if self._head.is_http_1_0 else b"%x\r\n%b\r\n" % (len(data), data))
        if self._is_full:
            self._drained = self._loop.create_future()
            await self._drained

    def end_stream(self) -> None:
        """Send the end of a stream, and end the request."""
        self._call = None
        if self._transport is None or self._head is None:
            return
        if not self._head.is_http_1_0 and self._head.method != "HEAD":
            self._write(b"0\r\n\r\n")
        self._end_request()

    def end_response(self, *, may_stay_open: bool) -> None:
        """End a request whose response was written to `transport`. `may_stay_open` is about the connection."""
        self._call = None
        self._keeps_alive = self._keeps_alive and may_stay_open
        if self._phase is _Phase.BUSY:
            self._end_request()

    def _end_request(self) -> None:
        self._phase = _Phase.HEAD
        self.silent_since_s = time.monotonic()
        if self._reader is not None:
            self._release_body()
        self._target = self._decoder = None
        if not self._keeps_alive or self._is_closing:
            self._close()
        elif self._held:
            self._continue_soon()

    # -- lifetime

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport to the client, None after the connection is lost."""
        return self._transport

    def can_send(self) -> bool:
        """Return whether bytes may be written: asyncio logs writes to a broken connection. Cut one that is broken."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if self._lost_poll is None:
            return True
        for _, events in self._lost_poll.poll(0):
            # While reading is paused, asyncio's TLS transport does not report that the client sends no more, but it
            # drops what is written.
            if events & (select.POLLHUP | select.POLLERR) or self._is_reading_paused:
                transport.abort()
                return False
        return True

    def _write(self, data: bytes) -> None:
        if self._transport is not None and self.can_send():
            self._transport.write(data)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection stays open after the current request."""
        return self._keeps_alive

    @property
    def is_busy(self) -> bool:
        """Whether a body is being received, a request runs, or a response is being sent."""
        return self._phase in (_Phase.BODY, _Phase.BUSY)

    def begin_closing(self) -> None:
        """Accept no new request; close after the response to the current one."""
        self._is_closing = True
        if self._phase in (_Phase.HEAD, _Phase.DISCARD):
            self._close()

    def abort(self) -> None:
        """Close at once; unsent bytes are lost."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether the connection was set up, and is not lost. May be read by any thread."""
        return self._transport is not None

    @property
    def is_silent(self) -> bool:
        """Whether no request is under way. May be read by any thread."""
        return self._phase is _Phase.HEAD and not self._is_full and not self._is_scheduled

    @property
    def has_served(self) -> bool:
        """Whether the client has sent a request. May be read by any thread."""
        return self._head is not None

    def close_silent(self) -> bool:
        """Close the connection at once if it is silent, even if the client has not read everything.

        Return False if it is not silent, or a request has arrived that is not read yet.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or not self.is_silent:
            return False
        if has_unread_bytes(transport.get_extra_info("socket").fileno()):
            return False
        self._close()
        # `close` alone waits for unsent bytes and, with TLS, for the client.
        transport.abort()
        return True

    def tick(self, idle_limit: int, stall_s: float) -> None:
        """Check the time limits: disconnect a client that sends or reads too slowly, close an idle connection."""
        if self._transport is not None and self._read_progress.stalled_ticks(self._transport) >= TICKS:
            self._transport.abort()
            return
        self._idle_ticks = 0 if self.has_activity else self._idle_ticks + 1
        phase = self._phase
        if phase is _Phase.BODY or phase is _Phase.DISCARD:
            self._check_body_rate(stall_s)
        elif phase is _Phase.HEAD:
            if self._is_full:
                pass  # the held bytes wait until the client reads
            elif self._held:
                self._head_ticks += 1
                if self._head_ticks > TICKS:
                    self._refuse_stalled(f"the request's head is not complete after {stall_s:g} s")
            elif self._idle_ticks >= idle_limit:
                self._close()
        elif phase is _Phase.CLOSED:
            # Before Python 3.11, closing with TLS waits for the client without a time limit.
            self._head_ticks += 1
            if self._head_ticks > TICKS and self._transport is not None and not self._transport.get_write_buffer_size():
                self._transport.abort()
        else:
            self._idle_ticks = 0
        self.has_activity = False

    def _check_body_rate(self, stall_s: float) -> None:
        """Refuse a body that has stopped or is too slow."""
        reader = self._reader
        filled = self._discarded if reader is None else reader.received
        size = None if reader is None else reader.size
        if self._idle_ticks >= TICKS:
            self._refuse_stalled(stalled_text(filled, size, stall_s))
            return
        self._head_ticks += 1
        if self._head_ticks <= TICKS:
            return
        if filled - self._filled_before < MIN_BYTES_PER_S * stall_s:
            self._refuse_stalled(slow_text(filled, size, stall_s))
            return
        self._head_ticks, self._filled_before = 1, filled

    def _refuse_stalled(self, message: str) -> None:
        if self._phase is _Phase.DISCARD:
            self._close()
        else:
            self._refuse_connection(StalledBody(message), client_is_silent=True)

    def _close(self) -> None:
        self._phase = _Phase.CLOSED
        self._head_ticks = 0
        self._held = b""
        self._release_body()
        self._close_transport()

    def _close_transport(self) -> None:
        # A second `close` makes a TLS transport of asyncio unusable.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()

    def _release_body(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.release()


class Connections:
    """The connections of one listener and their shared state. Lives on one event loop.

    `route` returns the target of requests with a head, or the response that refuses them. On a loopback address,
    `host_check` comes first.
    """

    def __init__(
        self,
        route: Callable[[RequestHead], RequestTarget | HttpResponse],
        budget: MemoryBudget,
        server_state: ServerState,
        cors: CorsPolicy | None = None,
        host_check: HostCheck | None = None,
    ) -> None:
        self._route = route
        self._host_check = host_check
        self.is_on_loopback = False
        """Whether only programs on this machine can connect. Set before the first connection."""
        self._loop = asyncio.get_running_loop()
        self.budget = budget
        self.server_state = server_state
        self.cors = cors
        self.cached_targets: DecodeCache[bytes, tuple[RequestHead, RequestTarget | HttpResponse]] = DecodeCache()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """Shared by all connections: received bytes are copied or used before the next read."""
        self._waiting: deque[HttpConnection] = deque()
        """Connections that hold bytes for another turn of the loop."""
        self._is_turn_scheduled = False
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks of current requests."""
        self._expected: set[HttpConnection] = set()
        self._open: dict[HttpConnection, asyncio.Transport] = {}
        self._changed = asyncio.Event()
        self._stall_s = STALL_S
        self._tick_s = self._stall_s / TICKS
        self._ticker: asyncio.TimerHandle | None = None

    def read_head(self, raw: bytes) -> tuple[RequestHead, RequestTarget | HttpResponse]:
        """Parse a head that is not in the cache, find its target and cache it. Raises ClosingRefusal."""
        head = parse_head(raw)
        refusal = self._host_check.refusal(head) if self.is_on_loopback and self._host_check is not None else None
        target = refusal or self._route(head)
        size, limit = head.body_size or 0, self.budget.each
        if isinstance(target, HttpResponse):
            return head, target
        if size > limit:
            text = f"request body of {size} bytes is larger than the limit of {limit} bytes"
            return head, error_response(ClosingRefusal(text))
        if target.is_cacheable and len(raw) <= MAX_KEY_BYTES:
            self.cached_targets.add(raw, (head, target), octets=2 * len(raw), items=len(head.headers.items()))
        return head, target

    def continue_soon(self, connection: HttpConnection) -> None:
        """Let a connection process its held bytes in another turn of the loop, after those that wait already.

        All in one turn would delay the others: many connections may send bytes that take long, such as chunks of one
        byte.
        """
        self._waiting.append(connection)
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self._loop.call_soon(self._process_held)

    def _process_held(self) -> None:
        end_s = time.monotonic() + _HELD_TURN_S
        try:
            for _ in range(len(self._waiting)):
                self._waiting.popleft().process_held()
                if time.monotonic() >= end_s:
                    break
        finally:
            self._is_turn_scheduled = bool(self._waiting)
            if self._is_turn_scheduled:
                self._loop.call_soon(self._process_held)

    def drop_cached_headers(self) -> None:
        """Clear the head cache, because `route` decides differently now."""
        self.cached_targets.clear()

    def expect(self) -> HttpConnection:
        """Return the protocol for an accepted connection. The connection counts from now on."""
        connection = HttpConnection(self)
        self._expected.add(connection)
        return connection

    def expect_no_more(self, connection: HttpConnection) -> None:
        """Note that the connection is open, or that its setup failed."""
        self._expected.discard(connection)

    def opened(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        """Note that a connection is open, and start the ticks."""
        self._expected.discard(connection)
        self._open[connection] = transport
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)

    def lost(self, connection: HttpConnection) -> None:
        """Note that a connection is closed."""
        self._open.pop(connection, None)
        self._changed.set()

    def count(self) -> int:
        """Return the number of connections that are open or being set up."""
        return len(self._open) + len(self._expected)

    def silent(self) -> list[HttpConnection]:
        """Return the open connections without a request under way. For any thread."""
        return [item for item in list(self._open) if item.is_silent]

    def _tick(self) -> None:
        self._ticker = None
        if not self._open:
            return
        # Scheduled first, so that an error of one connection does not stop the ticks.
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        for connection in list(self._open):
            connection.tick(int(_KEEP_ALIVE_S / self._tick_s), self._stall_s)

    async def finish(self, grace_s: float) -> None:
        """Accept no new requests, wait `grace_s` for the current ones, then abort the rest."""
        limit_s = time.monotonic() + grace_s
        for connection in list(self._open):
            connection.begin_closing()
        while any(connection.is_busy for connection in self._open):
            self._changed.clear()
            left_s = limit_s - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), max(left_s, _MIN_WAIT_S))
            except asyncio.TimeoutError:
                break
        for connection in list(self._open):
            connection.abort()
        # `connection_lost` cancels their requests soon.
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._ticker is not None:
            self._ticker.cancel()
