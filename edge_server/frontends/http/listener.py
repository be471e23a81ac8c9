"""One listening socket with aiohttp's low-level server behind it: no application, no middlewares, no access log."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_writer import HttpVersion10

from edge_server.errors import ServingFault
from edge_server.frontends.http.accept import MOST_BY_DEFAULT, Acceptor
from edge_server.frontends.http.budget import LEAST_BY_DEFAULT, BodyBudget
from edge_server.frontends.http.connection import TICKS, Connection
from edge_server.frontends.http.head import MAX_LINE_BYTES, HeadReader
from edge_server.frontends.http.lanes import FastInference, NoFastInference, OrdinaryHandler
from edge_server.frontends.http.pace import STALL_S
from edge_server.frontends.http.reply import plain_error
from edge_server.frontends.http.wire import wire_reply
from edge_server.records import dataclass

# Larger than aiohttp's 64 KiB: a camera image then comes in fewer turns of the loop.
_READ_BUFFER_BYTES = 1 << 20
# An idle connection lives longer than any proxy in front keeps its own; aiohttp's default, stated.
_KEEP_ALIVE_S = 3630.0
# aiohttp knows nothing of the inferences that pass it by: its own clock for idle connections must not end them.
_NEVER_S = 10.0 * 365 * 86400
_LEAST_S = 0.01


class _WithoutClientErrors(logging.Filter):
    """Passes over what is not HTTP: aiohttp logs it with a traceback, and any port scan would fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_WithoutClientErrors())


@dataclass(frozen=True, slots=True)
class FastLane:
    """What answers plain inferences without aiohttp, and how they are told from the rest."""

    heads: HeadReader
    fast: FastInference


Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _noting(handler: Handler) -> Handler:
    """Return the handler, whose connection knows while it is at work."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        protocol = request.protocol
        if isinstance(protocol, OrdinaryHandler):
            protocol.is_answering = protocol.has_begun = True
        if request.version < HttpVersion10 and request.transport is not None:
            # aiohttp would answer in the version of a request line that names none, HTTP/0.9.
            refusal = plain_error("the request line names no HTTP version, expected HTTP/1.1", 400)
            request.transport.write(wire_reply(refusal, will_stay=False))
            request.transport.close()
            return web.Response()
        try:
            return await handler(request)
        except ConnectionError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            # The client left, or was cut off, and the handler was resumed before it was cancelled for that. aiohttp
            # would log it with a traceback; what is returned here finds nobody to be sent to.
            return web.Response()

    return handle


class Connections(web.Server):
    """The connections of one listener; makes those that asyncio asks for. Lives on one event loop."""

    def __init__(self, handler: Handler, lane: FastLane, budget: BodyBudget) -> None:
        # aiohttp's own inflating knows no bound, and a handler has to learn that its client left.
        self._options: dict[str, Any] = {
            "auto_decompress": False,
            "access_log": None,
            "logger": _LOG,
            "read_bufsize": _READ_BUFFER_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "max_line_size": MAX_LINE_BYTES,
            "keepalive_timeout": _NEVER_S,
        }
        super().__init__(_noting(handler), handler_cancellation=True, **self._options)
        self._serving_loop = asyncio.get_running_loop()
        self._lane = lane
        self.budget = budget
        self.drops_any_idle = False
        self._expected: set[Connection] = set()
        self._open: dict[Connection, asyncio.Transport] = {}
        self._leaving: set[Connection] = set()
        """Their places were given to others, but they are not closed yet."""
        self._idle: list[Connection] | None = None
        self._moved = asyncio.Event()
        self._stall_s = STALL_S
        self._tick_s = self._stall_s / TICKS
        self._ticker: asyncio.TimerHandle | None = None

    def expect(self) -> Connection:
        connection = Connection(self, self._lane.heads, self._lane.fast)
        self._expected.add(connection)
        return connection

    def expect_no_more(self, connection: Connection) -> None:
        self._expected.discard(connection)

    def ordinary_handler(self) -> OrdinaryHandler:
        return OrdinaryHandler(self, loop=self._serving_loop, **self._options)

    def opened(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._expected.discard(connection)
        self._open[connection] = transport
        if self._ticker is None:
            self._ticker = self._serving_loop.call_later(self._tick_s, self._tick)

    def lost(self, connection: Connection) -> None:
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

    def _give_up(self, connection: Connection) -> None:
        """Close an idle connection, and free its place at once: it is for one new connection only."""
        del self._open[connection]
        self._leaving.add(connection)
        connection.close_idle()

    def _tick(self) -> None:
        self._ticker = None
        if not self._open and not self._leaving:
            return
        # First, so that nothing that one connection does ends it for all.
        self._ticker = self._serving_loop.call_later(self._tick_s, self._tick)
        self._idle = None
        for connection in (*self._open, *self._leaving):
            connection.tick(int(_KEEP_ALIVE_S / self._tick_s), self._stall_s)

    async def finish(self, grace_s: float) -> None:
        """Take no new request, wait `grace_s` for those under way, then cut what is left."""
        limit_s = time.monotonic() + grace_s
        self.pre_shutdown()
        for connection in list(self._open):
            connection.begin_closing()
        while any(connection.is_under_way for connection in self._open):
            self._moved.clear()
            left_s = limit_s - time.monotonic()
            try:
                await asyncio.wait_for(self._moved.wait(), max(left_s, _LEAST_S))
            except asyncio.TimeoutError:
                break
        # aiohttp takes 0 for no limit.
        await self.shutdown(max(limit_s - time.monotonic(), _LEAST_S))
        for connection in (*self._open, *self._leaving):
            connection.abort()
        if self._ticker is not None:
            self._ticker.cancel()


def _no_fast_lane() -> FastLane:
    return FastLane(HeadReader(asyncio.get_running_loop(), lambda message, size: None), NoFastInference())


class Listener:
    """Serves `handler` on one address from `open` to `close`, on the event loop that called `open`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._acceptor: Acceptor | None = None
        self._server: Connections | None = None

    async def open(
        self,
        address: str,
        port: int,
        *,
        reuses_port: bool = False,
        tls: ssl.SSLContext | None = None,
        fast: FastLane | None = None,
        budget: BodyBudget | None = None,
        max_connections: int = MOST_BY_DEFAULT,
        drops_any_idle: bool = False,
    ) -> int:
        """Listen and return the bound port.

        `fast` None: aiohttp answers everything. `budget` bounds the bodies of plain inferences together.
        `drops_any_idle`: at the bound, a connection that became idle just now is closed for a new one too. Each new
        one then costs a look at all, so this is for few connections.

        Raises ServingFault when the address cannot be had.
        """
        self._server = server = Connections(
            self._handler, fast or _no_fast_lane(), budget or BodyBudget(LEAST_BY_DEFAULT, LEAST_BY_DEFAULT)
        )
        server.drops_any_idle = drops_any_idle
        self._acceptor = Acceptor(server)
        try:
            return await self._acceptor.open(address, port, reuses_port=reuses_port, tls=tls, limit=max_connections)
        except OSError as error:
            # asyncio's own text names address and port once more; a host that is not found has none of the system's.
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error
            raise ServingFault(f"cannot listen on {address}, port {port}: {reason}") from None

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
