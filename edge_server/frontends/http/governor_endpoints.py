"""Governor endpoint: heat, power, and what the governor holds back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from edge_server.core.status_reports import GovernorState
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route


class GovernorView(Protocol):
    """The governor's state, as HTTP shows it. Both methods return at once."""

    def state(self) -> GovernorState:
        """Return the state in one word, and its reason."""

    def report(self) -> Mapping[str, object]:
        """Return the complete state as JSON values."""


class GovernorEndpoints:
    """The handler. Without a governor, it says why there is none."""

    def __init__(self, governor: GovernorView | None) -> None:
        self._governor = governor

    def routes(self) -> Sequence[Route]:
        summary = "Heat, power, and what is held back"
        return (Route("GET", "/edge/v1/governor", "statistics", summary, self.governor, uses_aiohttp=True),)

    async def governor(self, request: HttpRequest) -> HttpResponse:
        if self._governor is None:
            return json_response({"enabled": False, "detail": "the server was started with --governor=false"})
        return json_response(self._governor.report())
