"""HTTP route /edge/v1/governor, and the governor's section of the web page. Both are there when the governor is off,
too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.plugin import RunningPlugin, StatusPart, StatusRow
from edge_server.plugins.governor.settings import GovernorConfig

PANEL = Path(__file__).with_name("panel.js")
_NO_GOVERNOR = {"enabled": False, "detail": "the server was started with --governor=false"}


def governor_route(report: Callable[[], Mapping[str, object]]) -> Route:
    """Return the route; `report` returns its response."""

    async def governor(request: HttpRequest) -> HttpResponse:
        return json_response(report())

    summary = "Heat, power, and what is held back"
    return Route("GET", "/edge/v1/governor", "statistics", summary, governor, uses_aiohttp=True)


class NoGovernor(RunningPlugin):
    """The plugin in a server without governor: its route says why there is none."""

    panel = PANEL

    def __init__(self, settings: GovernorConfig) -> None:
        self.machine_root = Path(settings.sysfs_root)

    def routes(self) -> Sequence[Route]:
        return (governor_route(lambda: _NO_GOVERNOR),)

    def status(self) -> Sequence[StatusPart]:
        return (StatusRow("governor", "ok", f"off; {_NO_GOVERNOR['detail']}"),)

    def reports(self) -> Mapping[str, object]:
        return {"governor": _NO_GOVERNOR}
