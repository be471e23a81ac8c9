"""HTTP request as a handler gets it: head, body and stream of the answer; runs each handler as an asyncio task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor
from typing import TypeAlias, TypeVar

from edge_server.errors import InvalidRequest
from edge_server.frontends.http.body_reader import Body, BodyReader
from edge_server.frontends.http.compression import request_encoding
from edge_server.frontends.http.connection import HttpConnection
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, failure_response
from edge_server.frontends.json_text import parse_object
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.record import record

_Result = TypeVar("_Result")


class RequestContext:
    """Shared objects of all requests of a listener: its event loop and its threads.

    `workers` decode and compute; `blocking` runs calls that may take as long as a model load. None means the default
    executor of the loop. Must be made on the loop's thread.
    """

    __slots__ = ("blocking", "dispatch", "loop", "workers")

    def __init__(self, workers: Executor | None = None, blocking: Executor | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.dispatch = LoopDispatch(self.loop)
        self.workers = workers
        self.blocking = blocking


class HttpRequest:
    """A request, its body, and the stream that may answer it. Lives on one event loop.

    `names` are the values of the names in the route's path.
    """

    __slots__ = ("_body", "_reader", "connection", "context", "head", "is_streaming", "names")

    def __init__(
        self,
        head: RequestHead,
        names: Mapping[str, str],
        context: RequestContext,
        connection: HttpConnection,
        body: Body,
        reader: BodyReader | None,
    ) -> None:
        self.head = head
        self.names = names
        self.context = context
        self.connection = connection
        self.is_streaming = False
        self._body = body
        self._reader = reader

    @property
    def peer(self) -> str | None:
        """The client's address, None if the client has disconnected."""
        transport = self.connection.transport
        name = None if transport is None else transport.get_extra_info("peername")
        return name[0] if name else None

    async def read_body(self) -> Body:
        """Return the decompressed body. Raises InvalidRequest, Unsupported (encoding) and Refusal (budget)."""
        encoding = request_encoding(self.head.headers.get("Content-Encoding"))
        if encoding is None:
            return self._body
        self._reader = self._reader or self.connection.register_body()
        return await self._reader.decompress(self._body, encoding, self.context.workers)

    def release_body(self) -> None:
        """Release the body, also from the memory budget. May be called again."""
        self._body = b""
        if self._reader is not None:
            self._reader.release()

    async def read_members(self, known: Collection[str] | None = None) -> dict[str, object]:
        """Return the JSON object in the body, and release the body.

        Raises the errors of `read_body`, and InvalidRequest for a member that is not in `known`.
        """
        try:
            members = parse_object(await self.read_body())
        finally:
            self.release_body()
        for key in members:
            if known is not None and key not in known:
                raise InvalidRequest(f"unexpected member '{key[:80]}', expected {', '.join(known) or 'none'}")
        return members

    async def begin_stream(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of a response of unknown length. The handler then calls `write`, and returns None.

        Raises HeadSent if the client asks for no more.
        """
        self.is_streaming = True
        self.connection.begin_stream(status, headers)
        if self.head.method == "HEAD":
            raise HeadSent

    def write(self, data: bytes) -> Awaitable[None]:
        """Send a piece of the stream, not an empty one, and wait while the client does not read.

        Raises ConnectionError.
        """
        return self.connection.write(data)

    def run_on_worker(self, call: Callable[[], _Result]) -> Awaitable[_Result]:
        """Run a call that decodes or computes on a worker thread."""
        return self.context.loop.run_in_executor(self.context.workers, call)

    def run_blocking(self, call: Callable[[], _Result]) -> Awaitable[_Result]:
        """Run a call that may take as long as a model load on a thread for such calls."""
        return self.context.loop.run_in_executor(self.context.blocking, call)


class HeadSent(Exception):
    """The response to a HEAD request is complete with its head. It ends the handler."""


Handler: TypeAlias = Callable[[HttpRequest], Awaitable["HttpResponse | None"]]
"""Returns the response, or None after a stream. Any error that it raises is answered."""


@record(slots=True)
class TaskTarget:
    """Target of a request whose handler runs in a task of its own."""

    handler: Handler
    names: Mapping[str, str]
    head: RequestHead
    context: RequestContext
    aligned_at: int = 0
    is_cacheable: bool = False

    def begin(self, connection: HttpConnection, body: Body, reader: BodyReader | None) -> asyncio.Task[None]:
        request = HttpRequest(self.head, self.names, self.context, connection, body, reader)
        task = self.context.loop.create_task(_answer(self.handler, request))
        connection.track_task(task)
        return task


async def _answer(handler: Handler, request: HttpRequest) -> None:
    """Run the handler, and send its response."""
    connection, head = request.connection, request.head
    try:
        response = await handler(request)
    except HeadSent:
        response = None
    except ConnectionError:
        connection.abort()  # the client has disconnected, or does not read
        return
    except Exception as error:  # noqa: BLE001 - the client gets a response for any error
        response = failure_response(error, f"request {head.method} {head.target}")
        if request.is_streaming:
            connection.abort()  # a part of the response is already sent
            return
    if response is None:
        connection.end_stream()
    else:
        connection.send_response(response)
