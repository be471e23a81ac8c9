"""Requests that are no inferences, answered by aiohttp, which is given one at a time as bytes.

The connection finds where a request ends, whoever answers it. aiohttp's protocol then gets its head and body, parses
them, calls the handler, and writes the answer to a transport of ours, which passes it on to the connection. The handler
itself sends the whole answer, and so knows when it is out. aiohttp is imported on another thread, for the first such
request or once the server is ready: neither the start nor inferences wait for that.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from edge_server.frontends.http.body_reader import Body, BodyReader
from edge_server.frontends.http.client_timeouts import ClosingRefusal
from edge_server.frontends.http.compression import request_encoding
from edge_server.frontends.http.connection import HttpConnection
from edge_server.frontends.http.request_head import MAX_LINE_BYTES, RequestHead
from edge_server.frontends.http.response import SERVER, HttpResponse, error_reply, failure_reply
from edge_server.frontends.v2.json_parser import parse_object

if TYPE_CHECKING:
    from aiohttp import web

_LOG = logging.getLogger(__name__)
# aiohttp logs a traceback for each head that it cannot read, with this code: any port scan would fill the log.
_LOG.addFilter(lambda record: not record.exc_info or getattr(record.exc_info[1], "code", None) != 400)

_PIECE_BYTES = 256 * 1024
"""How much of a body aiohttp is given at a time."""

_NEVER_S = 10.0 * 365 * 86400
"""The listener closes connections that idle: aiohttp knows nothing of the inferences on them."""

_OF_THE_CONNECTION = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Fields of a head that are about the way of the bytes: the connection has seen to them."""

Answer: TypeAlias = Union[HttpResponse, "web.StreamResponse"]
Handler: TypeAlias = Callable[["web.BaseRequest", Mapping[str, str]], Awaitable[Answer]]
"""Returns the answer, or a stream that it began."""


class AiohttpServer:
    """aiohttp's server for the connections of one listener. Lives on one event loop.

    `workers` import aiohttp and inflate bodies; None: the loop's own.
    """

    def __init__(self, workers: Executor | None = None) -> None:
        self.workers = workers
        self._server: web.Server | None = None

    def prepare(self) -> asyncio.Future[ModuleType]:
        """Have aiohttp imported, on another thread, before a request needs it. The result may raise ImportError."""
        return asyncio.get_running_loop().run_in_executor(self.workers, importlib.import_module, "aiohttp.web")

    def begin(
        self, target: AiohttpTarget, connection: HttpConnection, body: Body, reader: BodyReader | None
    ) -> AiohttpTransport:
        exchange = connection.side_protocol
        if not isinstance(exchange, AiohttpTransport):
            exchange = connection.side_protocol = AiohttpTransport(connection)
        exchange.begin(target, body, reader)
        if self._server is None:
            task = asyncio.get_running_loop().create_task(self._start(exchange))
            connection.note_task(task)
        else:
            exchange.feed(self._server)
        return exchange

    async def _start(self, exchange: AiohttpTransport) -> None:
        try:
            await self.prepare()
        except ImportError as error:
            exchange.connection.reply(failure_reply(error, "the import of aiohttp"))
            return
        if self._server is None:
            from aiohttp import web

            self._server = web.Server(
                self._handle,
                handler_cancellation=True,
                access_log=None,
                auto_decompress=False,  # its own inflating knows no bound
                keepalive_timeout=_NEVER_S,
                logger=_LOG,
                max_field_size=MAX_LINE_BYTES,
                max_line_size=MAX_LINE_BYTES,
                tcp_keepalive=False,
            )
        exchange.feed(self._server)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        exchange = request.transport
        if not isinstance(exchange, AiohttpTransport):
            return web.Response()  # the client left
        try:
            reply = await exchange.answer(request)
            if isinstance(reply, HttpResponse):
                response = web.Response(
                    body=reply.body, status=reply.status, headers={**reply.headers, "Server": SERVER}
                )  # fmt: skip
                if reply.closes:
                    response.force_close()
                reply = response
            await reply.prepare(request)
            await reply.write_eof()
            await request.release()
        except ConnectionError:
            # The client left, does not read, or has a broken answer. What is returned finds nobody to be sent to.
            exchange.abort()
            return web.Response()
        exchange.end(stays=bool(reply.keep_alive))
        return reply


@dataclass(slots=True)
class AiohttpTarget:
    """Target of a request that a handler answers through aiohttp."""

    server: AiohttpServer
    handler: Handler
    names: Mapping[str, str]
    head: RequestHead
    aligned_at: int = 0
    is_kept: bool = False

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> AiohttpTransport:
        return self.server.begin(self, connection, body, reader)


class AiohttpTransport(asyncio.Transport):
    """What aiohttp takes for a client's transport: one request after the other, and where their answers go."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__()
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._protocol: web.RequestHandler | None = None
        self._target: AiohttpTarget | None = None
        """That of the request under way."""
        self._reader: BodyReader | None = None
        self._unread = memoryview(b"")
        """What aiohttp has not been given yet of the body."""
        self._is_paused = False
        self._is_closed = False
        self._is_handled = False
        """Whether the handler has been called: what is written before is aiohttp's own refusal of a head."""
        self._has_written = False

    # -- requests

    def begin(self, target: AiohttpTarget, body: Body, reader: BodyReader | None) -> None:
        self._target, self._reader, self._unread = target, reader, memoryview(body)
        self._is_handled = self._has_written = False

    def feed(self, server: web.Server) -> None:
        """Give aiohttp the request that began."""
        target = self._target
        if self._is_closed or target is None:
            return
        if self._protocol is None:
            self._protocol = server()
            self._protocol.connection_made(self)
        head, size = target.head, len(self._unread)
        lines = [f"{head.method} {head.target} HTTP/1.{0 if head.is_http_1_0 else 1}"]
        lines += [f"{name}: {value}" for name, value in head.headers.items() if name.lower() not in _OF_THE_CONNECTION]
        lines.append("Connection: " + ("keep-alive" if self.connection.will_stay else "close"))
        if size:
            lines.append(f"Content-Length: {size}")
        self._protocol.data_received("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n")
        self._feed_body()

    def _feed_body(self) -> None:
        while self._unread and not self._is_paused and not self._is_closed and self._protocol is not None:
            piece, self._unread = self._unread[:_PIECE_BYTES], self._unread[_PIECE_BYTES:]
            self._protocol.data_received(bytes(piece))

    async def answer(self, request: web.BaseRequest) -> Answer:
        """Return the answer to the request under way. Raises ConnectionError when no answer can be sent any more."""
        target, task = self._target, asyncio.current_task()
        if target is None:
            raise ConnectionResetError("the request was taken back")
        self._is_handled = True
        if task is not None:
            self.connection.note_task(task)
        try:
            return await target.handler(request, target.names)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: whatever went wrong, the client gets an answer
            reply = failure_reply(error, f"request {request.method} {request.raw_path}")
            if self._has_written:
                raise ConnectionAbortedError("the answer broke off") from None
            return reply

    async def read(self, request: web.BaseRequest) -> Body:
        """Return the body of the request under way, inflated. Raises InvalidRequest, Unsupported and Refusal."""
        encoding = request_encoding(request.headers.get("Content-Encoding"))
        data = bytearray()
        async for piece in request.content.iter_any():
            data += piece
        if encoding is None:
            return memoryview(data).toreadonly()
        assert self._target is not None
        self._reader = self._reader or self.connection.body_share()
        return await self._reader.inflate(memoryview(data), encoding, self._target.server.workers)

    def release_body(self) -> None:
        """Count the body no more: it was used."""
        if self._reader is not None:
            self._reader.release()

    def end(self, *, stays: bool) -> None:
        """The answer is out, and the body was read. `stays`: whether the connection goes on."""
        if self._target is not None:
            self._target = self._reader = None
            self.connection.end_answer(stays=stays)

    # -- for the connection

    def cancel(self) -> None:
        """See Call: `lost` does it."""

    def lost(self) -> None:
        """The client is gone: the request under way, if any, is taken back."""
        self._is_closed = True
        self._target = self._reader = None
        self._unread = memoryview(b"")
        if self._protocol is not None:
            self._protocol.connection_lost(None)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # -- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        transport = self.connection.transport
        if self._is_handled and self._target is not None and transport is not None and not self.is_closing():
            self._has_written = True
            transport.write(data)

    def is_closing(self) -> bool:
        transport = self.connection.transport
        return self._is_closed or transport is None or transport.is_closing()

    def close(self) -> None:
        """aiohttp is done with the connection: at the end of its last answer, or as it could not read the request."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._target is not None and not self._is_handled:
            self._target = self._reader = None
            self.connection.reply(error_reply(ClosingRefusal("the request's head cannot be read")))
        else:
            self.end(stays=False)

    def abort(self) -> None:
        self._is_closed = True
        if self._target is not None:
            self.connection.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        transport = self.connection.transport
        return default if transport is None else transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        transport = self.connection.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self.connection.transport is not None:
            self.connection.transport.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        # In another turn: aiohttp asks for more while it takes from what it has.
        self._is_paused = False
        self._loop.call_soon(self._feed_body)


async def read_members(request: web.BaseRequest) -> dict[str, object]:
    """Return the JSON object that a request's body is. Raises InvalidRequest, Unsupported and Refusal."""
    exchange = request.transport
    if not isinstance(exchange, AiohttpTransport):
        raise ConnectionResetError("the client is gone")
    try:
        return parse_object(await exchange.read(request))
    finally:
        exchange.release_body()
