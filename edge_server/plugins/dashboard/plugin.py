"""Entry module of the plugin `dashboard`: adds the web page at `/` and the API reference at `/docs/api` to the HTTP
port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin, ServingCore

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.frontends.http.routes import Route
    from edge_server.plugins.dashboard.page_endpoints import PageEndpoints


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
        self._core.manager.call_each_second(self._gauges.sample)

    def routes(self) -> Sequence[Route]:
        from edge_server.frontends.http.routes import DeferredEndpoints, Route

        def make() -> PageEndpoints:
            from edge_server.plugins.dashboard.page_endpoints import PageEndpoints

            return PageEndpoints(self._core, self._gauges)

        handler = DeferredEndpoints(make).handler
        index, file = handler(lambda page: page.index), handler(lambda page: page.file)
        panel = handler(lambda page: page.panel)
        access, reference = handler(lambda page: page.access), handler(lambda page: page.reference)
        history = handler(lambda page: page.history)
        documents, document = handler(lambda page: page.documents), handler(lambda page: page.document)
        schemas = "edge_server.plugins.dashboard.schemas"
        # Open to everyone: a browser cannot send a key for the page itself.
        return (
            Route("GET", "/", "", "The page of the server", index, schema=f"{schemas}:PAGE"),
            Route("GET", "/page/{file}", "", "Files of the page", file, schema=f"{schemas}:FILE"),
            Route(
                "GET",
                "/page/{plugin}/{file}",
                "",
                "Sections that plugins add to the page",
                panel,
                schema=f"{schemas}:FILE",
            ),
            Route("GET", "/edge/v1/page", "", "What the page may show and change for this caller", access),
            Route("GET", "/edge/v1/history", "statistics", "Gauges of the last half hour", history),
            Route("GET", "/docs", "", "Documents of the project as a page", documents, schema=f"{schemas}:PAGE"),
            Route("GET", "/docs/text/{file}", "", "A document as Markdown", document, schema=f"{schemas}:FILE"),
            Route("GET", "/docs/api", "", "Reference of this API as a page", reference, schema=f"{schemas}:PAGE"),
        )


PLUGIN = DashboardPlugin()
