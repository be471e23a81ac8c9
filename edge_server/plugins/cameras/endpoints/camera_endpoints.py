"""Camera routes: frame streams, the cameras that the server opens itself, and the receivers of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route

_SCHEMAS = "edge_server.plugins.cameras.endpoints.schemas"


def camera_routes(
    streams: Callable[[], Sequence[Mapping[str, object]]], cameras: Callable[[], Mapping[str, object]]
) -> Sequence[Route]:
    """Return the routes; `streams` and `cameras` return their reports."""

    async def show_streams(request: HttpRequest) -> HttpResponse:
        return json_response({"streams": streams()})

    async def show_cameras(request: HttpRequest) -> HttpResponse:
        return json_response(cameras())

    get = partial(Route, "GET", category="statistics", uses_aiohttp=True)
    rates = "Frame streams: rates, drops, ages"
    opened = "Cameras that the server opens, and receivers of their results"
    return (
        get("/edge/v1/streams", summary=rates, handler=show_streams, schema=f"{_SCHEMAS}:STREAMS"),
        get("/edge/v1/cameras", summary=opened, handler=show_cameras),
    )
