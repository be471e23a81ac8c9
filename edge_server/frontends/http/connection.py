"""One client's connection: reads requests, one at a time and in order, and writes their answers.

A request is its head (`request_head`), which names the target that answers it, and its body (`body_reader`). Clients
send the same head over and over, so the heads of inference requests are kept by their bytes: one seen before is neither
parsed nor routed again.
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from edge_server.errors import EdgeServerError, Refusal
from edge_server.frontends.http.body_reader import Body, BodyReader, ChunkDecoder, DiscardedBody
from edge_server.frontends.http.client_timeouts import (
    MIN_BYTES_PER_S,
    ClosingRefusal,
    ReadProgress,
    StalledBody,
    slow_text,
    stalled_text,
)
from edge_server.frontends.http.request_head import MAX_HEAD_BYTES, RequestHead
from edge_server.frontends.http.response import CONTINUE, HttpResponse, error_reply, head_bytes, reply_bytes

if TYPE_CHECKING:
    from edge_server.frontends.http.listener import Connections

TICKS = 4
"""A connection that does not move for as many ticks of its listener is stalled; what began within one has one more."""

READ_BYTES = 64 * 1024
"""Most bytes that are read at a time, but for bodies of a stated length: those are read whole."""

_HELD_BYTES = 64 * 1024
"""What may wait behind the request under way before the client's next bytes are left in the socket."""

_UNREAD_BYTES = 256 << 20
_UNREAD_CHUNKED_BYTES = 16 << 20
"""How much of a body is still read once its request was answered. A client that sends all before it reads would
otherwise not see the answer; one that sends without end is cut."""

_HEAD_END = b"\r\n\r\n"
_EMPTY_LINE = b"\r\n"

_METHOD = re.compile(rb"[A-Z-]{1,20}(?: |\Z)")
"""How a request begins: what is none is refused before its end comes, if it has one."""

_FORGOTTEN = DiscardedBody()


class HttpCall(Protocol):
    """A request that is being answered."""

    def cancel(self) -> None:
        """Take it back: the client is gone. It answers nothing any more."""


class SideProtocol(Protocol):
    """What answers some requests of a connection by a protocol of its own, from the first of them on."""

    def lost(self) -> None:
        """The connection is gone."""

    def pause_writing(self) -> None:
        """The client does not take what was sent to it."""

    def resume_writing(self) -> None:
        """It does again."""


class RequestTarget(Protocol):
    """What answers the requests with one head."""

    @property
    def aligned_at(self) -> int:
        """The byte of the body that is to lie at an aligned address, see BodyReader."""

    @property
    def is_kept(self) -> bool:
        """Whether it answers all further requests with the same head too, until `Connections.forget_heads`."""

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> HttpCall:
        """Start to answer a request, by one call of `answer` or `reply`, or a stream, perhaps before this returns.

        `reader` is what received the body if it came in pieces: `release` it when the body is decoded.
        """


class _Phase(enum.Enum):
    HEAD = enum.auto()
    """Between requests, or within a head."""
    BODY = enum.auto()
    """A body is being received."""
    BUSY = enum.auto()
    """A request is being answered, or its answer sent."""
    DISCARD = enum.auto()
    """The rest of a body whose request was answered already is read and forgotten."""
    CLOSED = enum.auto()


class HttpConnection(asyncio.BufferedProtocol):
    """See the module's text. Lives on one event loop."""

    __slots__ = (
        "_call",
        "_connections",
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
        "_known_heads",
        "_left",
        "_loop",
        "_must_wait",
        "_outgoing",
        "_phase",
        "_read_buffer",
        "_reader",
        "_server_state",
        "_taking",
        "_target",
        "_transport",
        "_will_stay",
        "began_ns",
        "has_moved",
        "is_plain",
        "is_streaming",
        "side_protocol",
    )

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._known_heads = connections.known_heads
        self._read_buffer = connections.read_buffer
        self._server_state = connections.server_state
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._phase = _Phase.HEAD
        self._head: RequestHead | None = None
        """That of the request under way, or of the latest one."""
        self._target: RequestTarget | None = None
        self._reader: BodyReader | None = None
        self._decoder: ChunkDecoder | None = None
        self._call: HttpCall | None = None
        self.side_protocol: SideProtocol | None = None
        self._held = b""
        self._held_at = 0
        self._must_wait = False
        """Whether what is held is continued with in another turn of the loop."""
        self._left = 0
        """Bytes of a body of a stated length that are still to be forgotten."""
        self._discarded = 0
        self._outgoing: deque[bytes | memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        """Waits until the client takes more of a stream."""
        self._will_stay = True
        self.is_plain = True
        """Whether the answer needs no header about the connection."""
        self.is_streaming = False
        self._is_full = False
        self._is_reading_paused = False
        self._is_closing = False
        self._idle_ticks = 0
        self._head_ticks = 0
        """Ticks that a head has taken; while a body comes, those since its rate was looked at."""
        self._filled_before = 0
        """How much of the body was there then."""
        self._taking = ReadProgress()
        self.began_ns = 0
        """When the request under way began to come (time.monotonic_ns), 0 where it came at once."""
        self.has_moved = False

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
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

    def get_buffer(self, sizehint: int) -> memoryview:
        reader = self._reader
        if self._phase is _Phase.BODY and reader is not None and type(reader.buffer) is memoryview:
            return reader.buffer[reader.received :]
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.has_moved = True
        phase = self._phase
        if phase is _Phase.BODY and self._decoder is None:
            reader = self._reader
            assert reader is not None
            reader.count(nbytes)
            if reader.received == reader.size and self._phase is _Phase.BODY:
                self._run(reader.finish())
            return
        data = bytes(self._read_buffer[:nbytes])
        if phase is _Phase.HEAD and not self._held and not self._is_full:
            self._take(data, 0)
        elif phase is not _Phase.CLOSED:
            self._hold(data)
            if not self._must_wait:
                self._go_on()

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
            self._go_on_soon()

    # -- bytes that came

    def _hold(self, data: bytes) -> None:
        self._held = self._held[self._held_at :] + data if self._held else data
        self._held_at = 0
        if len(self._held) >= _HELD_BYTES and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _go_on_soon(self) -> None:
        """Go on in another turn: a client that sends much at once must not keep others from theirs."""
        if not self._must_wait:
            self._must_wait = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Read on in what is held."""
        self._must_wait = False
        phase = self._phase
        if not self._held or phase is _Phase.BUSY or (phase is _Phase.HEAD and self._is_full):
            return
        data, start = self._held, self._held_at
        self._held = b""
        if phase is _Phase.HEAD:
            self._take(data, start)
        elif phase is _Phase.BODY:
            self._take_chunks(data, start)
        elif phase is _Phase.DISCARD:
            self._discard(data, start)
        if self._is_reading_paused and len(self._held) - self._held_at < _HELD_BYTES and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _keep_rest(self, data: bytes, start: int) -> None:
        if start < len(data):
            self._held, self._held_at = data, start

    # -- requests

    def _take(self, data: bytes, start: int) -> None:
        """Begin the request at byte `start` of `data`; what is behind it is held."""
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
        known = self._known_heads.get(raw)
        if known is None:
            try:
                known = self._connections.read_head(raw)
            except ClosingRefusal as refusal:
                self._refuse_connection(refusal)
                return
        self._head, target = head, _ = known
        self._will_stay = head.keeps_alive and not self._server_state.is_in_drain_delay
        self.is_plain = self._will_stay and not head.is_http_1_0
        size = head.body_size
        if size is None or len(data) - end < size:
            self._begin_body(head, target, data, end)
            return
        self.began_ns = 0
        self._keep_rest(data, end + size)
        if isinstance(target, HttpResponse):
            self._phase = _Phase.BUSY
            self.reply(target)
            return
        self._target = target
        self._run(memoryview(data)[end : end + size] if size else b"")

    def _begin_body(self, head: RequestHead, target: RequestTarget | HttpResponse, data: bytes, start: int) -> None:
        """Receive a body that is not all there yet, or answer at once and forget it as it comes."""
        size = head.body_size
        must_ask = head.expects_continue and start == len(data)
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
                target = error_reply(refusal)
                target.closes = True
        if isinstance(target, HttpResponse):
            if must_ask:
                # A client that is not told to send its body may send none: what follows could be anything.
                target.closes = True
                self._phase = _Phase.BUSY
                self.reply(target)
            else:
                self._answer_early(target)
            return
        self._target = target
        if must_ask and self._transport is not None:
            self._transport.write(CONTINUE)
        if self._decoder is None:
            assert self._reader is not None
            piece, self._held = memoryview(data)[start:], b""
            self._reader.append(piece)
        elif self._held:
            self._go_on()

    def _take_chunks(self, data: bytes, start: int) -> None:
        reader, decoder = self._reader, self._decoder
        assert reader is not None
        assert decoder is not None
        try:
            start, goes_on = decoder.decode(data, start, reader)
        except ClosingRefusal as refusal:
            if self._phase is _Phase.BODY:
                self._refuse_connection(refusal)
            else:
                self._close()
            return
        self._keep_rest(data, start)
        if not decoder.is_complete:
            if goes_on:
                self._go_on_soon()
        elif self._phase is _Phase.BODY:
            self._run(reader.finish())
        else:  # it was refused on the way
            self._end_request()

    def _run(self, body: Body) -> None:
        """Answer the request, whose body is all there."""
        target, reader = self._target, self._reader
        assert target is not None
        self._phase = _Phase.BUSY
        call = target.begin(self, body, reader)
        if self._phase is _Phase.BUSY and self._target is target and not self._outgoing:
            self._call = call

    def body_share(self) -> BodyReader:
        """Return the place in the budget of a body that came at once, for what is made of it."""
        self._reader = BodyReader(0, self._connections.budget, self._loop, lambda refusal: None)
        self._reader.finish()
        return self._reader

    def note_task(self, task: asyncio.Task[None]) -> None:
        """Have the listener wait for a task of the request under way before it ends."""
        self._connections.tasks.add(task)
        task.add_done_callback(self._connections.tasks.discard)

    def _refuse_connection(self, refusal: ClosingRefusal, *, is_silent: bool = False) -> None:
        """Answer what is no request, and close; at once where the client is silent.

        Else what it still sends is read and dropped until it closes: the kernel would reset a connection that is closed
        with bytes unread, and the client could lose the answer.
        """
        transport = self._transport
        if transport is None:
            self._close()
            return
        transport.write(reply_bytes(error_reply(refusal), closes=True))
        if is_silent or self._is_closing or not transport.can_write_eof():
            self._close()
            return
        transport.write_eof()
        self._release_body()
        self._held = b""
        self._decoder = None
        self._will_stay = False
        self._left, self._discarded = _UNREAD_BYTES, 0
        self._head_ticks = self._filled_before = 0
        self._phase = _Phase.DISCARD
        if self._is_reading_paused:
            self._is_reading_paused = False
            transport.resume_reading()

    def _refuse_body(self, refusal: EdgeServerError) -> None:
        """Answer a request whose body is not all there: it is wrong, or gave way to others."""
        reply = error_reply(refusal)
        reply.closes = True
        self._answer_early(reply)

    def _answer_early(self, reply: HttpResponse) -> None:
        """Answer before the body's end, which is then read and forgotten."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._left -= reader.received
            reader.release()
        self._will_stay = self._will_stay and not reply.closes
        self._phase = _Phase.DISCARD
        if self._transport is not None:
            self._transport.write(self._bytes_of(reply))
        if self._held:
            self._go_on_soon()
        elif self._decoder is None and not self._left:
            self._end_request()

    def _discard(self, data: bytes, start: int) -> None:
        decoder = self._decoder
        begun = start
        goes_on = False
        if decoder is None:
            start = min(len(data), start + self._left)
            self._left -= start - begun
            is_complete = not self._left
        else:
            try:
                start, goes_on = decoder.decode(data, start, _FORGOTTEN)
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
        elif goes_on:
            self._go_on_soon()

    # -- answers

    def answer(self, pieces: list[bytes | memoryview]) -> None:
        """Send the bytes of a whole answer."""
        self._call = None
        if self._transport is None:
            return
        self._outgoing.extend(pieces)
        self._send()

    def head_bytes(self, status: int, headers: Mapping[str, str]) -> bytes:
        """Return the head of an answer to the request under way."""
        head = self._head
        says_keep_alive = self._will_stay and head is not None and head.is_http_1_0
        return head_bytes(status, headers, says_keep_alive=says_keep_alive, closes=not self._will_stay)

    def reply(self, reply: HttpResponse) -> None:
        """Send a whole answer."""
        self._will_stay = self._will_stay and not reply.closes
        self.answer([self._bytes_of(reply)])

    def _bytes_of(self, reply: HttpResponse) -> bytes:
        head = self._head
        assert head is not None
        says_keep_alive = self._will_stay and head.is_http_1_0
        has_body = head.method != "HEAD"
        return reply_bytes(reply, closes=not self._will_stay, says_keep_alive=says_keep_alive, has_body=has_body)

    def _send(self) -> None:
        outgoing = self._outgoing
        transport = self._transport
        assert transport is not None
        while outgoing:
            # asyncio would log each piece that is written to a connection that broke, and is told of in a moment.
            if self._is_full or transport.is_closing():
                return
            transport.write(outgoing.popleft())
        if self._phase is _Phase.BUSY:
            self._end_request()

    def begin_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer whose length is not known. `write` and `end_stream` follow."""
        assert self._head is not None
        self.is_streaming = True
        if self._head.is_http_1_0:
            self._will_stay = False  # it ends with the connection
        else:
            headers = {**headers, "Transfer-Encoding": "chunked"}
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.head_bytes(status, headers))

    async def write(self, data: bytes) -> None:
        """Send a piece of a stream, not empty, and wait while the client takes nothing. Raises ConnectionResetError."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        assert self._head is not None
        self._transport.write(data if self._head.is_http_1_0 else b"%x\r\n%b\r\n" % (len(data), data))
        if self._is_full:
            self._drained = self._loop.create_future()
            await self._drained

    def end_stream(self) -> None:
        self._call = None
        self.is_streaming = False
        if self._transport is None or self._head is None:
            return
        if not self._head.is_http_1_0 and not self._transport.is_closing():
            self._transport.write(b"0\r\n\r\n")
        self._end_request()

    def end_answer(self, *, stays: bool) -> None:
        """All of an answer was written to `transport`. `stays`: whether the connection may be used further."""
        self._call = None
        self._will_stay = self._will_stay and stays
        if self._phase is _Phase.BUSY:
            self._end_request()

    def _end_request(self) -> None:
        self._phase = _Phase.HEAD
        if self._reader is not None:
            self._release_body()
        self._target = self._decoder = None
        if not self._will_stay or self._is_closing:
            self._close()
        elif self._held:
            self._go_on_soon()

    # -- life

    @property
    def transport(self) -> asyncio.Transport | None:
        """The way to the client, None once it is gone."""
        return self._transport

    @property
    def will_stay(self) -> bool:
        """Whether the connection goes on after the request under way."""
        return self._will_stay

    @property
    def is_under_way(self) -> bool:
        """Whether a request is being received, answered or sent."""
        return self._phase in (_Phase.BODY, _Phase.BUSY)

    def begin_closing(self) -> None:
        """Take no new request; close when the one under way is answered."""
        self._is_closing = True
        if self._phase in (_Phase.HEAD, _Phase.DISCARD):
            self._close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def idle_ticks(self) -> int:
        """For how many ticks nothing has been asked on it; 0 while anything is, or is on its way."""
        return self._idle_ticks if self.is_idle and not self.has_moved else 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, nor a part of one there."""
        return self._phase is _Phase.HEAD and not self._held and not self._is_full

    def close_idle(self) -> None:
        """Close a connection on which nothing is under way; at once, whatever its client has not taken yet."""
        is_left_over = self._transport is not None and self._transport.get_write_buffer_size() > 0
        self._close()
        if is_left_over:
            self.abort()

    def tick(self, idle_limit: int, stall_s: float) -> None:
        """Note that time passed, a part of `stall_s`; let go of who sends or takes too little, close what idles."""
        if self._transport is not None and self._taking.stalled_ticks(self._transport) >= TICKS:
            self._transport.abort()
            return
        self._idle_ticks = 0 if self.has_moved else self._idle_ticks + 1
        phase = self._phase
        if phase is _Phase.BODY or phase is _Phase.DISCARD:
            self._tick_body(stall_s)
        elif phase is _Phase.HEAD:
            if self._is_full:
                pass  # what is held waits for the client to read, not to send
            elif self._held:
                self._head_ticks += 1
                if self._head_ticks > TICKS:
                    self._refuse_stalled(f"the request's head is not complete after {stall_s:g} s")
            elif self._idle_ticks >= idle_limit:
                self._close()
        elif phase is _Phase.CLOSED:
            # What has nothing to send and does not end: before Python 3.11, TLS waits for the client without limit.
            self._head_ticks += 1
            if self._head_ticks > TICKS and self._transport is not None and not self._transport.get_write_buffer_size():
                self._transport.abort()
        else:
            self._idle_ticks = 0
        self.has_moved = False

    def _tick_body(self, stall_s: float) -> None:
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
            self._refuse_connection(StalledBody(message), is_silent=True)

    def _close(self) -> None:
        self._phase = _Phase.CLOSED
        self._head_ticks = 0
        self._held = b""
        self._release_body()
        if self._transport is not None:
            self._transport.close()

    def _release_body(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.release()
