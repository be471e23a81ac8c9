"""Camera endpoints: frame streams, the cameras that the server opens itself, and the receivers of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import Route
from edge_server.plugins.cameras.reports import CamerasReport, FrameStreamReport

_SCHEMAS = "edge_server.plugins.cameras.endpoints.schemas"


class CameraEndpoints:
    """The handlers. `cameras` is None if the server opens none itself."""

    def __init__(
        self, streams: Callable[[], Sequence[FrameStreamReport]], cameras: Callable[[], CamerasReport] | None
    ) -> None:
        self._streams = streams
        self._cameras = cameras

    def routes(self) -> Sequence[Route]:
        get = partial(Route, "GET", category="statistics", uses_aiohttp=True)
        streams = "Frame streams: rates, drops, ages"
        cameras = "Cameras that the server opens, and receivers of their results"
        return (
            get("/edge/v1/streams", summary=streams, handler=self.frame_streams, schema=f"{_SCHEMAS}:STREAMS"),
            get("/edge/v1/cameras", summary=cameras, handler=self.cameras),
        )

    async def frame_streams(self, request: HttpRequest) -> HttpResponse:
        return json_response({"streams": frame_streams(self._streams())})

    async def cameras(self, request: HttpRequest) -> HttpResponse:
        if self._cameras is None:
            return json_response({"enabled": False, "sources": [], "sinks": []})
        return json_response(cameras(self._cameras()))


def frame_streams(reports: Iterable[FrameStreamReport]) -> list[dict[str, object]]:
    """Return rates and counts of the open frame streams."""
    return [
        {
            "stream_id": report.stream_id,
            "model": report.model,
            "version": report.version,
            "client": report.client,
            "priority": report.priority,
            "weight": round(report.weight, 6),
            "open_s": round(report.open_s, 3),
            "fps_in": round(report.fps_in, 2),
            "fps_out": round(report.fps_out, 2),
            "received": report.counts.received,
            "answered": report.counts.answered,
            "waiting": report.waiting_count,
            "dropped": {reason.name: count for reason, count in report.counts.dropped.items()},
            "age_p50_ms": round(report.age_p50_ms, 3),
            "age_p99_ms": round(report.age_p99_ms, 3),
        }
        for report in reports
    ]


def cameras(report: CamerasReport) -> dict[str, object]:
    """Return the response of GET /edge/v1/cameras."""
    sources = [{**source._asdict(), "offline_s": round(source.offline_s, 3)} for source in report.sources]
    return {
        "enabled": True,
        "problem": report.problem,
        "sources": sources,
        "sinks": [sink._asdict() for sink in report.sinks],
    }
