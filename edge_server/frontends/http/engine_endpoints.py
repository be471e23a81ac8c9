"""Engine endpoints: TensorRT engines, and their builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from edge_server.core.status_reports import EngineBuildsReport
from edge_server.errors import Unsupported
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.frontends.v2 import control_responses

_NO_ENGINES = (
    "no engines are built here: there is no TensorRT, no driver or no GPU, or the server was started with "
    "--engine-builder=false"
)


class EngineView(Protocol):
    """Engine builds, as these endpoints show and change them. All methods return within milliseconds."""

    def report(self) -> EngineBuildsReport: ...

    def cancel(self, model: str, version: int | None = None) -> int:
        """Cancel the builds for a model; return their number. Raises UnknownModel."""

    def order_again(self, model: str, version: int | None = None) -> int:
        """Repeat failed or cancelled builds; return their number. Raises UnknownModel."""


class EngineEndpoints:
    """The handlers. Without engine builds, they say why there are none."""

    def __init__(self, engines: EngineView | None, access: AccessCheck) -> None:
        self._engines = engines
        self._access = access

    def routes(self) -> Sequence[Route]:
        line = partial(Route, uses_aiohttp=True)
        change = partial(line, path="/edge/v1/engines/{model}", category="model-repository", changes_server=True)
        build, cancel = "Repeat the engine builds for a model", "Cancel the engine builds for a model"
        return (
            line("GET", "/edge/v1/engines", "statistics", "TensorRT engines and their builds", self.engines),
            change("POST", summary=build, handler=self.build_engine),
            change("DELETE", summary=cancel, handler=self.cancel_engine),
        )

    async def engines(self, request: HttpRequest) -> HttpResponse:
        if self._engines is None:
            return json_response({"enabled": False, "detail": _NO_ENGINES, "engines": []})
        return json_response(control_responses.engine_builds(await request.run_blocking(self._engines.report)))

    async def build_engine(self, request: HttpRequest) -> HttpResponse:
        engines = self._changeable(request)
        return await _change(request, engines.order_again, "ordered")

    async def cancel_engine(self, request: HttpRequest) -> HttpResponse:
        engines = self._changeable(request)
        return await _change(request, engines.cancel, "cancelled")

    def _changeable(self, request: HttpRequest) -> EngineView:
        """Return the engine builds. Raises Forbidden if the client may not change them, Unsupported without any."""
        self._access.check_change(request.peer)
        if self._engines is None:
            raise Unsupported(_NO_ENGINES)
        return self._engines


async def _change(request: HttpRequest, change: Callable[[str], int], result: str) -> HttpResponse:
    await request.read_members(())
    model = request.names["model"]
    return json_response({"model": model, result: await request.run_blocking(partial(change, model))})
