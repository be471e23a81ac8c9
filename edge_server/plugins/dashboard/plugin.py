"""Entry of the page at `/` of the HTTP port, and of the reference of the API at `/docs/api`."""

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

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.dashboard.page_endpoints import PageEndpoints

        return PageEndpoints(self._core).routes()


PLUGIN = DashboardPlugin()
