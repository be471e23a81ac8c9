"""Entry module of the plugin `dashboard`: adds the web page at `/` and the API reference at `/docs/api` to the HTTP
port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin, ServingCore

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.frontends.http.routes import Route


class DashboardPlugin(Plugin):
    name = "dashboard"

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Dashboard()


class _Dashboard(RunningPlugin):
    def build(self, core: ServingCore) -> None:
        self._core = core

    def start(self) -> None:
        from edge_server.plugins.dashboard.server_gauges import ServerGauges

        self._gauges = ServerGauges(self._core)
        self._core.service.checks.call_each_second(self._gauges.sample)

    def routes(self) -> Sequence[Route]:
        from edge_server.frontends.http.routes import DeferredEndpoints, Route

        handler = DeferredEndpoints(self._core, self._gauges).handler
        page = "edge_server.plugins.dashboard.page_endpoints:PageEndpoints"
        schemas = "edge_server.plugins.dashboard.schemas"
        # Open to everyone: a browser cannot send a key for the page itself.
        return (
            Route("GET", "/", "", "The page of the server", handler(f"{page}.index"), schema=f"{schemas}:PAGE"),
            Route("GET", "/page/{file}", "", "Files of the page", handler(f"{page}.file"), schema=f"{schemas}:FILE"),
            Route(
                "GET",
                "/page/{plugin}/{file}",
                "",
                "Sections that plugins add to the page",
                handler(f"{page}.panel"),
                schema=f"{schemas}:FILE",
            ),
            Route(
                "GET",
                "/edge/v1/page",
                "",
                "What the page may show and change for this caller",
                handler(f"{page}.access"),
            ),
            Route("GET", "/edge/v1/history", "statistics", "Gauges of the last half hour", handler(f"{page}.history")),
            Route(
                "GET",
                "/docs",
                "",
                "Documents of the project as a page",
                handler(f"{page}.documents"),
                schema=f"{schemas}:PAGE",
            ),
            Route(
                "GET",
                "/docs/text/{file}",
                "",
                "A document as Markdown",
                handler(f"{page}.document"),
                schema=f"{schemas}:FILE",
            ),
            Route(
                "GET",
                "/docs/api",
                "",
                "Reference of this API as a page",
                handler(f"{page}.reference"),
                schema=f"{schemas}:PAGE",
            ),
        )


PLUGIN = DashboardPlugin()
