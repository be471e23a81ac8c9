"""The metrics endpoint: GET /metrics on an address and port of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from edge_server.frontends.http.aiohttp_server import AiohttpServer, AiohttpTarget
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.listener import Listener
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, plain_error

if TYPE_CHECKING:
    from aiohttp import web

_MOST_CONNECTIONS = 64
"""Who collects metrics needs one or two."""


class MetricsFrontend:
    """Serves what `render` returns, the text and its content type, to anyone who asks for /metrics.

    `render` is called on a thread, since it may read sensors. A new connection takes the place of the oldest idle one.
    """

    def __init__(
        self, render: Callable[[], tuple[bytes, str]], address: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._render = render
        self._address = address
        self._port = port
        self._aiohttp = AiohttpServer()
        self._listener = Listener(self._find)

    async def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault."""
        return await self._listener.open(
            self._address, self._port, tls=self._tls, max_connections=_MOST_CONNECTIONS, drops_any_idle=True
        )

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, wait `grace_s` for answers under way, cut the rest. May be called again."""
        await self._listener.close(grace_s)

    def _find(self, head: RequestHead) -> RequestTarget | HttpResponse:
        if head.target.partition("?")[0] != "/metrics":
            return plain_error("Not Found", 404)
        if head.method != "GET":
            return plain_error("Method Not Allowed", 405)
        return AiohttpTarget(self._aiohttp, self._metrics, {}, head)

    async def _metrics(self, request: web.BaseRequest, names: Mapping[str, str]) -> HttpResponse:
        body, content_type = await asyncio.get_running_loop().run_in_executor(None, self._render)
        return HttpResponse(body, headers={"Content-Type": content_type})
