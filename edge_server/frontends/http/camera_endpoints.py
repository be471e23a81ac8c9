"""Camera endpoints: frame streams, the cameras that the server opens itself, and the receivers of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from edge_server.core.status_reports import CamerasReport, FrameStreamReport
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.frontends.v2 import control_responses


class CameraEndpoints:
    """The handlers. `cameras` is None if the server opens none itself."""

    def __init__(
        self, streams: Callable[[], Sequence[FrameStreamReport]], cameras: Callable[[], CamerasReport] | None
    ) -> None:
        self._streams = streams
        self._cameras = cameras

    def routes(self) -> Sequence[Route]:
        get = partial(Route, "GET", category="statistics", uses_aiohttp=True)
        cameras = "Cameras that the server opens, and receivers of their results"
        return (
            get("/edge/v1/streams", summary="Frame streams: rates, drops, ages", handler=self.frame_streams),
            get("/edge/v1/cameras", summary=cameras, handler=self.cameras),
        )

    async def frame_streams(self, request: HttpRequest) -> HttpResponse:
        return json_response({"streams": control_responses.frame_streams(self._streams())})

    async def cameras(self, request: HttpRequest) -> HttpResponse:
        if self._cameras is None:
            return json_response({"enabled": False, "sources": [], "sinks": []})
        return json_response(control_responses.cameras(self._cameras()))
