"""The metrics endpoint: GET /metrics on an address and port of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from aiohttp import web

from edge_server.frontends.http.listener import Listener
from edge_server.frontends.http.reply import plain_error

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
        self._listener = Listener(self._handle)

    async def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault."""
        return await self._listener.open(
            self._address, self._port, tls=self._tls, max_connections=_MOST_CONNECTIONS, drops_any_idle=True
        )

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, wait `grace_s` for answers under way, cut the rest. May be called again."""
        await self._listener.close(grace_s)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path.partition("?")[0] != "/metrics":
            return plain_error("Not Found", 404)
        if request.method != "GET":
            return plain_error("Method Not Allowed", 405)
        body, content_type = await asyncio.get_running_loop().run_in_executor(None, self._render)
        return web.Response(body=body, headers={"Content-Type": content_type})
