"""Metrics port: serves GET /metrics on an address and port of its own."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable

from edge_server.errors import EdgeServerError
from edge_server.frontends.connection_limit import ConnectionLimit
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.connection import RequestTarget
from edge_server.frontends.http.host_check import HostNames
from edge_server.frontends.http.request import HttpRequest, RequestContext, TaskTarget
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse, error_response, plain_error
from edge_server.frontends.http.server import HttpServer

_MAX_CONNECTIONS = 64
"""Maximum number of connections; a metrics collector needs one or two."""


class MetricsFrontend:
    """Serves the metrics page to clients that `access` admits; without it, to any client.

    `render` returns the page and its content type. It is called on a worker thread, because it may read sensors.
    `allowed_hosts`: see HostNames. `limit` is that of all listeners' connections.
    """

    def __init__(
        self,
        render: Callable[[], tuple[bytes, str]],
        address: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        access: AccessCheck | None = None,
        allowed_hosts: Iterable[str] = (),
        limit: ConnectionLimit | None = None,
    ) -> None:
        self._access = access or AccessCheck()
        self._tls = tls
        self._limit = limit
        self._render = render
        self._address = address
        self._port = port
        self._context: RequestContext | None = None
        self._server = HttpServer("metrics", self._route, HostNames(allowed_hosts))

    async def start(self) -> int:
        """Listen and return the bound port. Raises ServingFault."""
        self._context = RequestContext()
        return await self._server.open(
            self._address, self._port, tls=self._tls, limit=self._limit, max_connections=_MAX_CONNECTIONS
        )

    async def stop(self, grace_s: float) -> None:
        """Accept no new connections, wait `grace_s` for open requests, abort the rest. May be called again."""
        await self._server.close(grace_s)

    def _route(self, head: RequestHead) -> RequestTarget | HttpResponse:
        if head.target.partition("?")[0] != "/metrics":
            return plain_error("Not Found", 404)
        if head.method != "GET":
            return plain_error("Method Not Allowed", 405)
        try:
            self._access.admit(head.headers, "metrics")
        except EdgeServerError as error:
            return error_response(error)
        assert self._context is not None
        return TaskTarget(self._serve_page, {}, head, self._context)

    async def _serve_page(self, request: HttpRequest) -> HttpResponse:
        body, content_type = await request.run_on_worker(self._render)
        return HttpResponse(body, headers={"Content-Type": content_type})
