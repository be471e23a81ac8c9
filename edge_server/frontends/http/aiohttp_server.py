"""Adapter to aiohttp, which serves the requests that are not inference, one at a time.

The connection finds the end of a request. aiohttp's protocol then gets the head and the body as bytes, parses them,
and calls the handler. It writes the response to an AiohttpTransport, which passes it to the connection. `_handle` sends
the complete response itself, and therefore knows when it is sent. aiohttp is imported on another thread, for the first
such request or when the server is ready, so that neither the start nor an inference waits for the import.
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
from edge_server.frontends.http.response import SERVER, HttpResponse, error_response, failure_response
from edge_server.frontends.v2.json_parser import parse_object

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

AiohttpResponse: TypeAlias = Union[HttpResponse, "web.StreamResponse"]
Handler: TypeAlias = Callable[["web.BaseRequest", Mapping[str, str]], Awaitable[AiohttpResponse]]
"""Returns the response, or a stream that it has started."""


class AiohttpServer:
    """aiohttp's server for the connections of one listener. Lives on one event loop.

    `workers` import aiohttp and decompress bodies; None means the default executor of the loop.
    """

    def __init__(self, workers: Executor | None = None) -> None:
        self.workers = workers
        self._server: web.Server | None = None

    def prepare(self) -> asyncio.Future[ModuleType]:
        """Import aiohttp on another thread, before a request needs it. The future may raise ImportError."""
        return asyncio.get_running_loop().run_in_executor(self.workers, importlib.import_module, "aiohttp.web")

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
            await self.prepare()
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
                headers = {**response.headers, **own_headers(request)}
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


@dataclass(slots=True)
class AiohttpTarget:
    """Target of a request that aiohttp serves by a handler."""

    server: AiohttpServer
    handler: Handler
    names: Mapping[str, str]
    head: RequestHead
    aligned_at: int = 0
    is_cacheable: bool = False

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> AiohttpTransport:
        return self.server.begin(self, connection, body, reader)


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

    async def call_handler(self, request: web.BaseRequest) -> AiohttpResponse:
        """Return the response to the current request. Raises ConnectionError when none can be sent."""
        target, task = self._target, asyncio.current_task()
        if target is None:
            raise ConnectionResetError("the request is cancelled")
        self._is_handled = True
        if task is not None:
            self.connection.track_task(task)
        try:
            return await target.handler(request, target.names)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response for any error
            response = failure_response(error, f"request {request.method} {request.raw_path}")
            if self._has_written:
                raise ConnectionAbortedError("the response is incomplete") from None
            return response

    async def read_body(self, request: web.BaseRequest) -> Body:
        """Return the decompressed body of the current request. Raises InvalidRequest, Unsupported and Refusal."""
        encoding = request_encoding(request.headers.get("Content-Encoding"))
        data = bytearray()
        async for piece in request.content.iter_any():
            data += piece
        if encoding is None:
            return memoryview(data).toreadonly()
        assert self._target is not None
        self._reader = self._reader or self.connection.register_body()
        return await self._reader.decompress(memoryview(data), encoding, self._target.server.workers)

    def release_body(self) -> None:
        """Remove the body from the memory budget."""
        if self._reader is not None:
            self._reader.release()

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


def own_headers(request: web.BaseRequest) -> Mapping[str, str]:
    """Return the headers of each response that do not depend on its endpoint."""
    transport = request.transport
    cors = transport.connection.cors_headers() if isinstance(transport, AiohttpTransport) else {}
    return {**cors, "Server": SERVER}


async def read_members(request: web.BaseRequest) -> dict[str, object]:
    """Return the JSON object in a request's body. Raises InvalidRequest, Unsupported and Refusal."""
    transport = request.transport
    if not isinstance(transport, AiohttpTransport):
        raise ConnectionResetError("the client is gone")
    try:
        return parse_object(await transport.read_body(request))
    finally:
        transport.release_body()
