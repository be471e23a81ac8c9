"""One client's connection: plain inferences are answered here, everything else by aiohttp behind it.

aiohttp makes a task, a request, a stream and a response object of each request, which for a small inference costs as
much as the rest of it. So the connection looks at each head itself (`head`). A plain inference goes straight to the
service; any other request is passed on to an aiohttp handler, byte for byte and up to its end, and the connection looks
again at what comes after its answer. What cannot be told apart in the plainest way, such as chunks or a malformed head,
hands the connection over to aiohttp for good. One request of a connection is under way at a time.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections import deque
from typing import TYPE_CHECKING, cast

from aiohttp.tcp_helpers import tcp_keepalive

from edge_server.errors import EdgeServerError
from edge_server.frontends.http.body import Body
from edge_server.frontends.http.collector import Collector
from edge_server.frontends.http.head import MAX_HEAD_BYTES, Head, HeadReader, InferTarget
from edge_server.frontends.http.lanes import Call, FastInference, OrdinaryHandler
from edge_server.frontends.http.pace import LEAST_BYTES_PER_S, StalledBody, Taking, slow_text, stalled_text
from edge_server.frontends.http.reply import error_reply
from edge_server.frontends.http.wire import wire_reply

if TYPE_CHECKING:
    from edge_server.frontends.http.listener import Connections

TICKS = 4
"""A connection that does not move for as many ticks of its listener is stalled; what began within one has one more."""

_HELD_BYTES = 64 * 1024
"""What may wait behind the request under way before the client's next bytes are left in the socket."""

_MOST_WAITING = 64
"""Requests that may wait behind the one under way where aiohttp has the connection; more than it lets itself."""

_FED_BYTES = 16 * 1024
"""What aiohttp is given in one turn of the loop where it has the connection: of chunks of one byte, this is 2,700."""

_UNREAD_BYTES = 256 << 20
_UNREAD_CHUNKED_BYTES = 16 << 20
"""How much of a body is still read once its request was answered. A client that sends all before it reads would
otherwise not see the answer; one that sends without end is cut."""

_END = b"\r\n\r\n"

_METHOD = re.compile(rb"[A-Z-]{1,20}(?: |\Z)")
"""How a request begins: what is none is refused before its end comes, if it has one."""


class _Phase(enum.Enum):
    HEAD = enum.auto()
    """Between requests, or within a head."""
    BODY = enum.auto()
    """An inference's body is being received."""
    BUSY = enum.auto()
    """An inference is under way, or its answer being sent."""
    ORDINARY = enum.auto()
    """aiohttp has one request."""
    HANDED = enum.auto()
    """aiohttp has the connection for good."""
    CLOSED = enum.auto()


class Connection(asyncio.Protocol):
    """See the module's text. Lives on one event loop."""

    __slots__ = (
        "_answered",
        "_call",
        "_collector",
        "_connections",
        "_fast",
        "_head_ticks",
        "_heads",
        "_held",
        "_held_at",
        "_idle_ticks",
        "_inner",
        "_is_closing",
        "_is_full",
        "_is_reading_paused",
        "_left",
        "_loop",
        "_outgoing",
        "_phase",
        "_taking",
        "_transport",
        "_unread",
        "_will_stay",
        "has_moved",
    )

    def __init__(self, connections: Connections, heads: HeadReader, fast: FastInference) -> None:
        self._connections = connections
        self._heads = heads
        self._fast = fast
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._inner: OrdinaryHandler | None = None
        self._phase = _Phase.HEAD
        self._call: Call | None = None
        self._collector: Collector | None = None
        self._held = b""
        self._held_at = 0
        self._left = 0
        """Bytes of an ordinary request's body that are still to come."""
        self._answered = False
        self._outgoing: deque[bytes | memoryview] = deque()
        self._will_stay = True
        self._is_full = False
        self._is_reading_paused = False
        self._is_closing = False
        self._idle_ticks = 0
        self._head_ticks = 0
        self._taking = Taking()
        self._unread: int | None = None
        """How many bytes of an answered request's body are still read; None: it was answered when all was there."""
        self.has_moved = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        tcp_keepalive(self._transport)
        self._connections.opened(self, self._transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._phase = _Phase.CLOSED
        self._held = b""
        self._outgoing.clear()
        call, self._call = self._call, None
        self._drop_body()
        self._transport = self._collector = None
        if call is not None:
            call.cancel()
        if self._inner is not None:
            self._inner.connection_lost(exc)
            self._inner = None
        self._connections.lost(self)

    def data_received(self, data: bytes) -> None:
        self.has_moved = True
        if self._unread is not None and self._is_too_much(data):
            return
        phase = self._phase
        if phase is _Phase.HEAD and not self._is_full:
            if self._held:
                data = self._held[self._held_at :] + data
                self._held = b""
            self._take(data, 0)
        elif phase is _Phase.HANDED:
            self._feed(data)
        elif phase is _Phase.ORDINARY and self._left:
            self._pass_on(data, 0)
        elif phase is not _Phase.CLOSED:
            self._hold(data)

    def pause_writing(self) -> None:
        self._is_full = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._inner is not None:
            self._inner.resume_writing()
        if self._outgoing:
            self._send()
        elif self._phase is _Phase.HEAD and self._held:
            self._loop.call_soon(self._go_on)

    # -- requests

    def _take(self, data: bytes, start: int) -> None:
        """Begin the request at byte `start` of `data`; what is behind it is held."""
        end = data.find(_END, start, start + MAX_HEAD_BYTES)
        if end < 0:
            if len(data) - start >= MAX_HEAD_BYTES or _METHOD.match(data, start) is None:
                self._hand_over(data[start:])
            else:
                self._held, self._held_at = data, start
            return
        end += len(_END)
        self._head_ticks = 0
        head = self._heads.read(data[start:end])
        if head is None:
            self._hand_over(data[start:])
        elif head.target is None or not self._fast.is_open():
            self._begin_ordinary(head, data, start, end)
        else:
            self._begin_infer(head.target, head.body_size, data, end)

    def _begin_infer(self, target: InferTarget, size: int, data: bytes, start: int) -> None:
        end = start + size
        if len(data) < end:
            self._collector = collector = Collector(self, target, size, self._connections.budget)
            self._phase = _Phase.BODY
            assert self._transport is not None
            self._transport.set_protocol(collector)
            collector.begin(data[start:])
            return
        if len(data) > end:
            self._held, self._held_at = data, end
        self._begin(target, memoryview(data)[start:end])

    def collected(self, target: InferTarget, body: Body) -> None:
        """Take an inference's body that has come in pieces."""
        assert self._transport is not None
        self._collector = None
        self._transport.set_protocol(self)
        self._begin(target, body)

    def refuse_body(self, refusal: EdgeServerError) -> None:
        """Answer a body that is not all there yet: it has no place, or gave it up, and is only read to its end."""
        assert self._transport is not None
        self._transport.write(wire_reply(error_reply(refusal), will_stay=False))

    def forgotten(self) -> None:
        """Close, now that a refused body was read to its end."""
        self._close()

    def _begin(self, target: InferTarget, body: Body) -> None:
        self._phase = _Phase.BUSY
        call = self._fast.begin(target, body, self._answer)
        if self._phase is _Phase.BUSY and not self._outgoing:
            self._call = call

    def _answer(self, pieces: list[bytes | memoryview], will_stay: bool) -> None:
        self._call = None
        if self._transport is None:
            return
        self._will_stay = will_stay
        self._outgoing.extend(pieces)
        self._send()

    def _send(self) -> None:
        outgoing = self._outgoing
        assert self._transport is not None
        while outgoing:
            # asyncio would log each piece that is written to a connection that broke, and is told of in a moment.
            if self._is_full or self._transport.is_closing():
                return
            self._transport.write(outgoing.popleft())
        if self._phase is not _Phase.BUSY:
            return
        self._end_request(self._will_stay)

    def _end_request(self, will_stay: bool) -> None:
        self._phase = _Phase.HEAD
        self._unread = None
        if not will_stay or self._is_closing:
            self._close()
        elif self._held:
            # In another turn: whoever sends many requests at once must not keep others from theirs.
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._phase is not _Phase.HEAD or self._is_full or not self._held:
            return
        data, start = self._held, self._held_at
        self._held = b""
        self._take(data, start)
        if self._is_reading_paused and len(self._held) - self._held_at < _HELD_BYTES and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _hold(self, data: bytes) -> None:
        self._held = self._held[self._held_at :] + data if self._held else data
        self._held_at = 0
        if len(self._held) >= _HELD_BYTES and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    # -- requests for aiohttp

    def _ordinary(self) -> OrdinaryHandler:
        if self._inner is None:
            assert self._transport is not None
            self._inner = self._connections.ordinary_handler()
            self._inner.answered = self._ordinary_answered
            self._inner.is_answering = self._inner.has_begun = False
            self._inner.connection_made(self._transport)
            if self._is_full:
                self._inner.pause_writing()
        return self._inner

    def _hand_over(self, data: bytes) -> None:
        self._phase = _Phase.HANDED
        self._ordinary()
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()
        self._feed(data)

    def _is_too_much(self, data: bytes) -> bool:
        """Count further bytes behind an answer; close when they are too many."""
        assert self._inner is not None
        if self._inner.is_answering:
            self._unread = None  # the body came to its end, and another request began
            return False
        assert self._unread is not None
        self._unread -= len(data)
        if self._unread >= 0:
            return False
        self._close()
        return True

    def _feed(self, data: bytes) -> None:
        """Give bytes of a connection that was handed over to aiohttp, a piece in each turn of the loop."""
        is_first = not self._held
        self._hold(data)
        if is_first:
            self._feed_piece()

    def _feed_piece(self) -> None:
        inner = self._inner
        if self._phase is not _Phase.HANDED or inner is None or not self._held:
            return
        if inner.waiting_count > _MOST_WAITING:
            return
        end = self._held_at + _FED_BYTES
        piece = self._held[self._held_at : end]
        if end < len(self._held):
            self._held_at = end
            self._loop.call_soon(self._feed_piece)
        else:
            self._held, self._held_at = b"", 0
        inner.data_received(piece)
        # aiohttp before 3.14 reads requests without end.
        if inner.waiting_count > _MOST_WAITING and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()
        else:
            self._read_on()

    def _read_on(self) -> None:
        """Take bytes from the socket again where little is held and aiohttp wants more."""
        inner = self._inner
        is_wanted = inner is not None and inner.waiting_count <= _MOST_WAITING and not inner.is_reading_paused
        if self._is_reading_paused and is_wanted and len(self._held) - self._held_at < _HELD_BYTES:
            self._is_reading_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def _begin_ordinary(self, head: Head, data: bytes, start: int, end: int) -> None:
        self._phase = _Phase.ORDINARY
        self._answered = False
        self._left = head.body_size + end - start
        self._ordinary()
        self._pass_on(data, start)

    def _pass_on(self, data: bytes, start: int) -> None:
        end = min(len(data), start + self._left)
        self._left -= end - start
        assert self._inner is not None
        if end < len(data):
            self._hold(data[end:])
        self._inner.data_received(data[start:end])
        self._end_ordinary()

    def _ordinary_answered(self, will_stay: bool, is_whole: bool) -> None:
        most = _UNREAD_BYTES if self._phase is _Phase.ORDINARY else _UNREAD_CHUNKED_BYTES
        self._unread = None if is_whole else most
        if self._phase is _Phase.ORDINARY:
            self._answered = True
            self._will_stay = will_stay
            self._end_ordinary()
        elif self._held:
            self._loop.call_soon(self._feed_piece)
        else:
            self._read_on()

    def _end_ordinary(self) -> None:
        # Answered before the body was there: aiohttp reads and forgets the rest, or gives up and closes.
        if self._phase is not _Phase.ORDINARY or not self._answered or self._left:
            return
        if self._will_stay:
            self._end_request(True)
        else:
            self._phase = _Phase.CLOSED  # by aiohttp, in a moment

    # -- life

    @property
    def is_under_way(self) -> bool:
        """Whether an inference is being received, computed or sent here, rather than by aiohttp."""
        return self._phase in (_Phase.BODY, _Phase.BUSY)

    def begin_closing(self) -> None:
        """Take no new request; close when the one under way is answered."""
        self._is_closing = True
        if self._phase is _Phase.HEAD:
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
        if phase is _Phase.BODY:
            self._tick_body(stall_s)
        elif phase is _Phase.HEAD:
            self._tick_head(idle_limit, stall_s)
        elif phase is _Phase.HANDED:
            self._tick_handed(idle_limit, stall_s)
        elif phase is _Phase.CLOSED:
            self._tick_closed()
        else:
            self._idle_ticks = 0
        self.has_moved = False

    def _tick_body(self, stall_s: float) -> None:
        collector = self._collector
        assert collector is not None
        filled, size = collector.filled, collector.size
        if self._idle_ticks >= TICKS:
            self._refuse_stalled(stalled_text(filled, size, stall_s))
            return
        collector.ticks += 1
        if collector.ticks <= TICKS:
            return
        if filled - collector.filled_before < LEAST_BYTES_PER_S * stall_s:
            self._refuse_stalled(slow_text(filled, size, stall_s))
        collector.ticks, collector.filled_before = 1, filled

    def _tick_head(self, idle_limit: int, stall_s: float) -> None:
        if self._is_full:
            return  # what is held waits for the client to read, not to send
        if self._held:
            self._head_ticks += 1
            if self._head_ticks > TICKS:
                self._refuse_stalled(_head_text(stall_s))
        elif self._idle_ticks >= idle_limit:
            self._close()

    def _tick_handed(self, idle_limit: int, stall_s: float) -> None:
        inner = self._inner
        if inner is None or inner.is_answering or inner.has_begun:
            self._idle_ticks = self._head_ticks = 0
            if inner is not None:
                inner.has_begun = False
        elif self._head_ticks or self.has_moved:
            # aiohttp does not tell whether it is within a head; what came since the last request can be nothing else.
            self._head_ticks += 1
            if self._head_ticks > TICKS:
                self._refuse_stalled(_head_text(stall_s))
        elif self._idle_ticks >= idle_limit:
            self._close()

    def _tick_closed(self) -> None:
        """Cut what has nothing to send and does not end: before Python 3.11, TLS waits for the client without limit."""
        self._head_ticks += 1
        if self._head_ticks > TICKS and self._transport is not None and not self._transport.get_write_buffer_size():
            self._transport.abort()

    def _refuse_stalled(self, message: str) -> None:
        assert self._transport is not None
        if self._collector is None or not self._collector.is_refused:
            self._transport.write(wire_reply(error_reply(StalledBody(message)), will_stay=False))
        self._close()

    def _close(self) -> None:
        self._phase = _Phase.CLOSED
        self._head_ticks = 0
        self._held = b""
        self._drop_body()
        if self._transport is not None:
            self._transport.close()

    def _drop_body(self) -> None:
        if self._collector is not None:
            self._collector.drop()


def _head_text(stall_s: float) -> str:
    return f"the request's head is not complete after {stall_s:g} s"
