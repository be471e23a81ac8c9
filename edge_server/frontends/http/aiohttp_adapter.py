"""Adapter that lets the library aiohttp parse a request and write its response, for the control routes.

The connection finds the end of a request. aiohttp's protocol then gets the head and the body as bytes, parses them,
and makes a request, of which the handler gets an AiohttpRequest. aiohttp writes the response to an AiohttpTransport,
which passes it to the connection. `_handle` sends the complete response itself, and therefore knows when it is sent.
aiohttp is imported on another thread for the first such request, which takes 50 ms and 9 MB. Neither the start nor a
probe nor an inference waits for it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from edge_server.frontends.http.body_reader import Body, BodyReader
from edge_server.frontends.http.client_timeouts import ClosingRefusal
from edge_server.frontends.http.connection import HttpConnection
from edge_server.frontends.http.request import Handler, HeadSent, HttpRequest, RequestContext
from edge_server.frontends.http.request_head import MAX_LINE_BYTES, RequestHead
from edge_server.frontends.http.response import SERVER, HttpResponse, error_response, failure_response
from edge_server.record import record

if TYPE_CHECKING:
    from aiohttp import web

_LOG = logging.getLogger(__name__)
# aiohttp logs a traceback, with code 400, for each invalid head: a port scan would fill the log.
_LOG.addFilter(lambda record: not record.exc_info or getattr(record.exc_info[1], "code", None) != 400)

_PIECE_BYTES = 256 * 1024
"""Maximum bytes of a body passed to aiohttp at a time."""

_NEVER_S = 10.0 * 365 * 86400
"""Keep-alive limit for aiohttp, practically none: aiohttp does not see inferences, so the listener closes idle
connections."""

_CONNECTION_HEADERS = frozenset(
    ("connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
"""Header fields about the connection or the transfer: the connection has handled them."""


class AiohttpServer:
    """aiohttp's server for the connections of one listener. Lives on one event loop.

    `workers` import aiohttp; None means the default executor of the loop.
    """

    def __init__(self, workers: Executor | None = None) -> None:
        self._workers = workers
        self._server: web.Server | None = None

    def begin(
        self, target: AiohttpTarget, connection: HttpConnection, body: Body, reader: BodyReader | None
    ) -> AiohttpTransport:
        """Start a request. Import aiohttp first if necessary."""
        transport = connection.side_protocol
        if not isinstance(transport, AiohttpTransport):
            transport = connection.side_protocol = AiohttpTransport(connection)
        transport.begin(target, body, reader)
        if self._server is None:
            task = asyncio.get_running_loop().create_task(self._start(transport))
            connection.track_task(task)
        else:
            transport.feed(self._server)
        return transport

    async def _start(self, transport: AiohttpTransport) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._workers, importlib.import_module, "aiohttp.web")
        except ImportError as error:
            transport.connection.send_response(failure_response(error, "the import of aiohttp"))
            return
        if self._server is None:
            from aiohttp import web

            self._server = web.Server(
                self._handle,
                handler_cancellation=True,
                access_log=None,
                auto_decompress=False,  # aiohttp's decompression has no limit
                keepalive_timeout=_NEVER_S,
                logger=_LOG,
                max_field_size=MAX_LINE_BYTES,
                max_line_size=MAX_LINE_BYTES,
                tcp_keepalive=False,
            )
        transport.feed(self._server)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        transport = request.transport
        if not isinstance(transport, AiohttpTransport):
            return web.Response()  # the client has disconnected
        try:
            response = await transport.call_handler(request)
            if isinstance(response, HttpResponse):
                closes = response.closes
                headers = {**response.headers, **_own_headers(transport.connection)}
                response = web.Response(body=response.body, status=response.status, headers=headers)
                if closes:
                    response.force_close()
            await response.prepare(request)
            await response.write_eof()
            await request.release()
        except ConnectionError:
            # The client has disconnected, does not read, or already has a part of the response: abort.
            transport.abort()
            return web.Response()
        transport.end_request(may_stay_open=bool(response.keep_alive))
        return response


@record(slots=True)
class AiohttpTarget:
    """Target of a request whose handler runs in aiohttp's server."""

    server: AiohttpServer
    handler: Handler
    names: Mapping[str, str]
    head: RequestHead
    context: RequestContext
    aligned_at: int = 0
    is_cacheable: bool = False

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> AiohttpTransport:
        return self.server.begin(self, connection, body, reader)


class AiohttpRequest(HttpRequest):
    """A request whose body and stream pass through aiohttp."""

    __slots__ = ("_request", "stream")

    def __init__(
        self, target: AiohttpTarget, connection: HttpConnection, reader: BodyReader | None, request: web.BaseRequest
    ) -> None:
        super().__init__(target.head, target.names, target.context, connection, b"", reader)
        self._request = request
        self.stream: web.StreamResponse | None = None

    async def read_body(self) -> Body:
        data = bytearray()
        async for piece in self._request.content.iter_any():
            data += piece
        self._body = memoryview(data).toreadonly()
        return await super().read_body()

    async def begin_stream(self, status: int, headers: Mapping[str, str]) -> None:
        from aiohttp import web

        self.is_streaming = True
        self.stream = web.StreamResponse(status=status, headers={**headers, **_own_headers(self.connection)})
        await self.stream.prepare(self._request)
        if self.head.method == "HEAD":
            raise HeadSent

    def write(self, data: bytes) -> Awaitable[None]:
        assert self.stream is not None
        return self.stream.write(data)


class AiohttpTransport(asyncio.Transport):
    """Transport of a connection for aiohttp: passes it one request after the other, and sends its responses."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__()
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._protocol: web.RequestHandler | None = None
        self._target: AiohttpTarget | None = None
        """Target of the current request."""
        self._reader: BodyReader | None = None
        self._unread = memoryview(b"")
        """Rest of the body that aiohttp has not received yet."""
        self._is_paused = False
        self._is_closed = False
        self._is_handled = False
        """Whether the handler was called. Before that, aiohttp writes only its own refusal of a head."""
        self._has_written = False

    # -- requests

    def begin(self, target: AiohttpTarget, body: Body, reader: BodyReader | None) -> None:
        """Store the next request."""
        self._target, self._reader, self._unread = target, reader, memoryview(body)
        self._is_handled = self._has_written = False

    def feed(self, server: web.Server) -> None:
        """Pass the stored request to aiohttp."""
        target = self._target
        if self._is_closed or target is None:
            return
        if self._protocol is None:
            self._protocol = server()
            self._protocol.connection_made(self)
        head, size = target.head, len(self._unread)
        lines = [f"{head.method} {head.target} HTTP/1.{0 if head.is_http_1_0 else 1}"]
        lines += [f"{name}: {value}" for name, value in head.headers.items() if name.lower() not in _CONNECTION_HEADERS]
        lines.append("Connection: " + ("keep-alive" if self.connection.keeps_alive else "close"))
        if size:
            lines.append(f"Content-Length: {size}")
        self._protocol.data_received("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n")
        self._feed_body()

    def _feed_body(self) -> None:
        while self._unread and not self._is_paused and not self._is_closed and self._protocol is not None:
            piece, self._unread = self._unread[:_PIECE_BYTES], self._unread[_PIECE_BYTES:]
            self._protocol.data_received(bytes(piece))

    async def call_handler(self, request: web.BaseRequest) -> HttpResponse | web.StreamResponse:
        """Return the response to the current request, or the stream that its handler has sent.

        Raises ConnectionError when none can be sent.
        """
        target, task = self._target, asyncio.current_task()
        if target is None:
            raise ConnectionResetError("the request is cancelled")
        self._is_handled = True
        if task is not None:
            self.connection.track_task(task)
        own = AiohttpRequest(target, self.connection, self._reader, request)
        try:
            response = await target.handler(own)
        except HeadSent:
            response = None
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            response = failure_response(error, f"request {target.head.method} {target.head.target}")
            if self._has_written:
                raise ConnectionAbortedError("the response is incomplete") from None
        if response is not None:
            return response
        assert own.stream is not None
        return own.stream

    def end_request(self, *, may_stay_open: bool) -> None:
        """End a request whose response is sent and whose body is read. `may_stay_open` is about the connection."""
        if self._target is not None:
            self._target = self._reader = None
            self.connection.end_response(may_stay_open=may_stay_open)

    # -- for the connection

    def cancel(self) -> None:
        """Nothing to do: `lost` cancels the request."""

    def lost(self) -> None:
        """Cancel the current request, if any: the client has disconnected."""
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
        return self._is_closed or not self.connection.can_send()

    def close(self) -> None:
        """End the request. aiohttp calls this after the last response, or if it cannot parse the request."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._target is not None and not self._is_handled:
            self._target = self._reader = None
            self.connection.send_response(error_response(ClosingRefusal("the request's head cannot be read")))
        else:
            self.end_request(may_stay_open=False)

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
        # In another turn of the loop: aiohttp calls this while it processes its buffer.
        self._is_paused = False
        self._loop.call_soon(self._feed_body)


def _own_headers(connection: HttpConnection) -> Mapping[str, str]:
    """Return the headers of each response that do not depend on its endpoint."""
    return {**connection.cors_headers(), "Server": SERVER}
