"""One listening socket and its connections, with the heads of requests that they keep together."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge_server.errors import ServingFault
from edge_server.frontends.http.accept_loop import MAX_DEFAULT_CONNECTIONS, Acceptor
from edge_server.frontends.http.client_timeouts import STALL_S, ClosingRefusal
from edge_server.frontends.http.connection import READ_BYTES, TICKS, HttpConnection, RequestTarget
from edge_server.frontends.http.request_head import RequestHead, parse_head
from edge_server.frontends.http.response import HttpResponse, error_reply
from edge_server.frontends.memory_budget import MIN_DEFAULT_BYTES, MemoryBudget

# An idle connection lives longer than any proxy in front keeps its own.
_KEEP_ALIVE_S = 3630.0
_LEAST_S = 0.01

_MOST_KNOWN_HEADS = 256
_KNOWN_HEAD_BYTES = 2048
"""How many heads are kept, and how long one may be: a client that never repeats itself costs no more memory."""


class ServerState(Protocol):
    @property
    def is_in_drain_delay(self) -> bool:
        """Whether every answer is the last one of its connection."""


@dataclass(frozen=True, slots=True)
class NoDrainDelay:
    is_in_drain_delay: bool = False


class Connections:
    """The connections of one listener; makes those that asyncio asks for. Lives on one event loop.

    `find` returns what answers the requests with a head, or an answer. `server_state` says whether they stay open.
    """

    def __init__(
        self,
        find: Callable[[RequestHead], RequestTarget | HttpResponse],
        budget: MemoryBudget,
        server_state: ServerState,
    ) -> None:
        self._find = find
        self._loop = asyncio.get_running_loop()
        self.budget = budget
        self.server_state = server_state
        self.known_heads: dict[bytes, tuple[RequestHead, RequestTarget | HttpResponse]] = {}
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """Where all connections read: what came is copied or used before the next one reads."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Those of requests under way."""
        self.drops_any_idle = False
        self._expected: set[HttpConnection] = set()
        self._open: dict[HttpConnection, asyncio.Transport] = {}
        self._leaving: set[HttpConnection] = set()
        """Their places were given to others, but they are not closed yet."""
        self._idle: list[HttpConnection] | None = None
        self._moved = asyncio.Event()
        self._stall_s = STALL_S
        self._tick_s = self._stall_s / TICKS
        self._ticker: asyncio.TimerHandle | None = None

    def read_head(self, raw: bytes) -> tuple[RequestHead, RequestTarget | HttpResponse]:
        """Parse a head that is not known, and find what answers it. Raises ClosingRefusal."""
        head = parse_head(raw)
        target = self._find(head)
        size, limit = head.body_size or 0, self.budget.each
        if isinstance(target, HttpResponse):
            return head, target
        if size > limit:
            text = f"request body of {size} bytes is larger than the limit of {limit} bytes"
            return head, error_reply(ClosingRefusal(text))
        if target.is_kept and len(raw) <= _KNOWN_HEAD_BYTES:
            if len(self.known_heads) >= _MOST_KNOWN_HEADS:
                del self.known_heads[next(iter(self.known_heads))]
            self.known_heads[raw] = head, target
        return head, target

    def forget_heads(self) -> None:
        """Have every head read anew, because `find` decides otherwise now."""
        self.known_heads.clear()

    def expect(self) -> HttpConnection:
        connection = HttpConnection(self)
        self._expected.add(connection)
        return connection

    def expect_no_more(self, connection: HttpConnection) -> None:
        self._expected.discard(connection)

    def opened(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        self._expected.discard(connection)
        self._open[connection] = transport
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)

    def lost(self, connection: HttpConnection) -> None:
        self._open.pop(connection, None)
        self._leaving.discard(connection)
        self._moved.set()

    def count(self) -> int:
        return len(self._open) + len(self._expected)

    def drop_idle(self) -> bool:
        """Close the connection that has been idle for the longest, for some ticks at least. False when none is."""
        if self._idle is None:
            # Once a tick: in a flood of connections, each must not cost a look at all others.
            self._idle = sorted((item for item in self._open if item.idle_ticks), key=lambda item: item.idle_ticks)
        while self._idle:
            longest = self._idle.pop()
            if longest.idle_ticks and longest in self._open:
                self._give_up(longest)
                return True
        oldest = next((item for item in self._open if item.is_idle), None) if self.drops_any_idle else None
        if oldest is not None:
            self._give_up(oldest)
        return oldest is not None

    def _give_up(self, connection: HttpConnection) -> None:
        """Close an idle connection, and free its place at once: it is for one new connection only."""
        del self._open[connection]
        self._leaving.add(connection)
        connection.close_idle()

    def _tick(self) -> None:
        self._ticker = None
        if not self._open and not self._leaving:
            return
        # First, so that nothing that one connection does ends it for all.
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        self._idle = None
        for connection in (*self._open, *self._leaving):
            connection.tick(int(_KEEP_ALIVE_S / self._tick_s), self._stall_s)

    async def finish(self, grace_s: float) -> None:
        """Take no new request, wait `grace_s` for those under way, then cut what is left."""
        limit_s = time.monotonic() + grace_s
        for connection in list(self._open):
            connection.begin_closing()
        while any(connection.is_under_way for connection in self._open):
            self._moved.clear()
            left_s = limit_s - time.monotonic()
            try:
                await asyncio.wait_for(self._moved.wait(), max(left_s, _LEAST_S))
            except asyncio.TimeoutError:
                break
        for connection in (*self._open, *self._leaving):
            connection.abort()
        # Their requests are taken back as they are lost, in a moment.
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._ticker is not None:
            self._ticker.cancel()


class Listener:
    """Serves on one address from `open` to `close`, on the event loop that called `open`. `find`: see Connections."""

    def __init__(
        self, find: Callable[[RequestHead], RequestTarget | HttpResponse], server_state: ServerState | None = None
    ) -> None:
        self._find = find
        self._server_state = server_state or NoDrainDelay()
        self._acceptor: Acceptor | None = None
        self._server: Connections | None = None

    async def open(
        self,
        address: str,
        port: int,
        *,
        reuses_port: bool = False,
        tls: ssl.SSLContext | None = None,
        budget: MemoryBudget | None = None,
        max_connections: int = MAX_DEFAULT_CONNECTIONS,
        drops_any_idle: bool = False,
    ) -> int:
        """Listen and return the bound port.

        `budget` bounds the bodies of requests together.
        `drops_any_idle`: at the bound, a connection that became idle just now is closed for a new one too. Each new
        one then costs a look at all, so this is for few connections.

        Raises ServingFault when the address cannot be had.
        """
        budget = budget or MemoryBudget(MIN_DEFAULT_BYTES, MIN_DEFAULT_BYTES)
        self._server = server = Connections(self._find, budget, self._server_state)
        server.drops_any_idle = drops_any_idle
        self._acceptor = Acceptor(server)
        try:
            return await self._acceptor.open(address, port, reuses_port=reuses_port, tls=tls, limit=max_connections)
        except OSError as error:
            # asyncio's own text names address and port once more; a host that is not found has none of the system's.
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error
            raise ServingFault(f"cannot listen on {address}, port {port}: {reason}") from None

    def forget_heads(self) -> None:
        """See Connections. May be called before `open` and after `close`."""
        if self._server is not None:
            self._server.forget_heads()

    async def close(self, grace_s: float) -> None:
        """Take no new connections, wait `grace_s` for answers under way, then cut what is left. May be called again."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is None or self._server is None:
            return
        acceptor.close()
        await self._server.finish(grace_s)


def server_tls(cert: str, key: str, client_ca: str = "") -> ssl.SSLContext:
    """Return a context for a certificate chain and its key, both PEM files. Raises ServingFault.

    With `client_ca`, a PEM file too, every client has to show a certificate that it signed.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password of ours, OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ServingFault(f"TLS certificate '{cert}' and key '{key}' cannot be used: {error}") from None
    if client_ca:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ValueError) as error:
            raise ServingFault(f"certificates of client authorities '{client_ca}' cannot be used: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
