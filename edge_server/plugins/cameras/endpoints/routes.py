"""List of the HTTP routes of cameras: reports of frame streams and cameras, pictures of streams, and DeepStack's object
detection.

Pictures and DeepStack's API are imported for their first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from edge_server.errors import InvalidRequest
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.frontends.http.routes import DeferredEndpoints, Route
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.cameras.server_cameras import ServerCameras
    from edge_server.plugins.cameras.streams.stream_view import StreamView

_SCHEMAS = "edge_server.plugins.cameras.endpoints.schemas"


def report_routes(
    streams: Callable[[], Sequence[Mapping[str, object]]], cameras: Callable[[], Mapping[str, object]]
) -> Sequence[Route]:
    """Return the routes of reports; `streams` and `cameras` return their reports."""

    async def show_streams(request: HttpRequest) -> HttpResponse:
        return json_response({"streams": streams()})

    async def show_cameras(request: HttpRequest) -> HttpResponse:
        return json_response(cameras())

    get = partial(Route, "GET", category="statistics", uses_aiohttp=True)
    rates = "Frame streams: rates, drops, ages"
    opened = "Cameras that the server opens, receivers of their results, questions about their pictures"
    return (
        get("/edge/v1/streams", summary=rates, handler=show_streams, schema=f"{_SCHEMAS}:STREAMS"),
        get("/edge/v1/cameras", summary=opened, handler=show_cameras),
    )


def source_routes(access: AccessCheck, find: Callable[[], ServerCameras]) -> Sequence[Route]:
    """Return the routes of one camera of the server: its zones and lines, and the answers to questions about its
    pictures. `find` returns the cameras, or raises NotFound."""

    async def show_answers(request: HttpRequest) -> HttpResponse:
        # The answers describe the pictures, so they need the same rights.
        access.check_pictures(request.head, request.peer)
        return json_response(find().answers_as_json(request.names["source"]))

    async def show(request: HttpRequest) -> HttpResponse:
        return json_response(find().zones_as_json(request.names["source"]))

    async def change(request: HttpRequest) -> HttpResponse:
        access.check_change(request.peer)
        cameras, members = find(), await request.read_members(("zones", "lines"))
        from edge_server.plugins.cameras.zones.zone_settings import parse_lines, parse_zones

        try:
            zones, lines = parse_zones(members.get("zones", [])), parse_lines(members.get("lines", []))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        set_zones = partial(cameras.set_zones, request.names["source"], zones, lines)
        return json_response(await request.run_blocking(set_zones))

    line = partial(Route, path="/edge/v1/cameras/{source}/zones", uses_aiohttp=True)
    return (
        Route(
            "GET", "/edge/v1/cameras/{source}/answers", "view", "Last answers to questions about a camera's pictures",
            show_answers, uses_aiohttp=True,
        ),
        line("GET", category="statistics", summary="Zones and lines of a camera", handler=show),
        line(
            "PUT", category="model-repository", summary="Change the zones and lines of a camera", handler=change,
            changes_server=True, schema=f"{_SCHEMAS}:ZONES",
        ),
    )  # fmt: skip


def view_routes(access: AccessCheck, view: Callable[[str], AbstractContextManager[StreamView]]) -> Sequence[Route]:
    """Return the routes of pictures; `view` returns the view of a frame stream, see StreamRegistry.view."""

    handler = DeferredEndpoints(access, view).handler
    endpoints = "edge_server.plugins.cameras.endpoints.view_endpoints:ViewEndpoints"
    get = partial(Route, "GET", category="view")
    stream, motion = "/edge/v1/streams/{stream}", f"{_SCHEMAS}:MOTION_JPEG"
    return (
        get(
            f"{stream}/view",
            summary="Live pictures of a frame stream with its results drawn in, as MJPEG",
            handler=handler(f"{endpoints}.pictures"),
            schema=motion,
        ),
        get(
            f"{stream}/frames",
            summary="Live pictures of a frame stream, and before each a part of JSON with its results",
            handler=handler(f"{endpoints}.frames"),
            schema=motion,
        ),
        get(
            f"{stream}/picture",
            summary="The next picture of a frame stream with its results drawn in, as JPEG",
            handler=handler(f"{endpoints}.picture"),
            schema=f"{_SCHEMAS}:PICTURE",
        ),
    )


def deepstack_routes(service: InferenceService) -> Sequence[Route]:
    handler = DeferredEndpoints(service).handler
    detect, models = (
        handler(f"edge_server.plugins.cameras.endpoints.deepstack_endpoints:DeepStackEndpoints.{name}")
        for name in ("detect", "models")
    )
    summary = "Detect objects in the image of a form, as in DeepStack's API"
    # Clients whose base URL ends in a slash send two.
    return [
        Route("POST", f"{slash}/v1/vision/{path}", category, text, own)
        for slash in ("", "/")
        for path, category, text, own in (
            ("detection", "inference", summary, detect),
            ("custom/{model}", "inference", summary, detect),
            ("custom/list", "metadata", "Names of the models for /v1/vision/custom/NAME", models),
        )
    ]
