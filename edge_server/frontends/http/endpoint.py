"""Endpoints: functions that answer a request at their own pace, each as a task of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import TypeAlias

from edge_server.frontends.http.body_reader import Body, BodyReader
from edge_server.frontends.http.compression import request_encoding
from edge_server.frontends.http.connection import Connection
from edge_server.frontends.http.request_head import Headers, RequestHead
from edge_server.frontends.http.response import Reply, failure_reply
from edge_server.frontends.v2.json_text import parse_object
from edge_server.records import dataclass


class HttpRequest:
    """A request as an endpoint sees it, and the way to its client."""

    __slots__ = ("_body", "_reader", "_workers", "connection", "head")

    def __init__(
        self, head: RequestHead, connection: Connection, body: Body, reader: BodyReader | None, workers: Executor | None
    ) -> None:
        self.head = head
        self.connection = connection
        self._body = body
        self._reader = reader
        self._workers = workers

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def target(self) -> str:
        """The path and query of the request line, percent-encoded."""
        return self.head.target

    @property
    def headers(self) -> Headers:
        return self.head.headers

    @property
    def remote(self) -> str:
        return self.connection.remote

    async def read(self) -> Body:
        """Return the body, inflated. Raises InvalidRequest, Unsupported (encoding) and Refusal (no room)."""
        encoding = request_encoding(self.headers.get("Content-Encoding"))
        if encoding is None:
            return self._body
        reader = self._reader = self._reader or self.connection.body_share()
        return await reader.inflate(self._body, encoding, self._workers)

    async def members(self) -> dict[str, object]:
        """Return the JSON object that the body is. Raises what `read` does."""
        try:
            return parse_object(await self.read())
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the body. May be called again."""
        self._body = b""
        if self._reader is not None:
            self._reader.release()


Handler: TypeAlias = Callable[[HttpRequest, Mapping[str, str]], Awaitable[Reply | None]]
"""Returns the answer, or None when it sent a stream."""


@dataclass(slots=True)
class EndpointTarget:
    """Target of a request that an endpoint answers."""

    handler: Handler
    names: Mapping[str, str]
    head: RequestHead
    workers: Executor | None
    """Inflates bodies; None: the loop's own."""
    aligned_at: int = 0
    is_kept: bool = False

    def begin(self, connection: Connection, body: Body, reader: BodyReader | None) -> EndpointCall:
        request = HttpRequest(self.head, connection, body, reader, self.workers)
        task = asyncio.get_running_loop().create_task(self._answer(request))
        connection.note_task(task)
        return EndpointCall(task)

    async def _answer(self, request: HttpRequest) -> None:
        connection = request.connection
        try:
            reply = await self.handler(request, self.names)
        except ConnectionError:
            connection.abort()  # the client left, or does not read
            return
        except Exception as error:  # noqa: BLE001 - the boundary: whatever went wrong, the client gets an answer
            reply = failure_reply(error, f"request {request.method} {request.target}")
            if connection.is_streaming:
                connection.abort()  # once a part of an answer is out, only this is honest
                return
        finally:
            request.release()
        if reply is None:
            connection.end_stream()
        else:
            connection.reply(reply)


class EndpointCall:
    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()
