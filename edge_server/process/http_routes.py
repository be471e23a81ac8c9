"""Routes of the HTTP port: the lines of the parts that this server has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from edge_server.config import HttpConfig
from edge_server.errors import NotFound
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.frontend import HttpFrontend
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints
from edge_server.frontends.http.operator_endpoints import OperatorEndpoints
from edge_server.frontends.http.routes import Route
from edge_server.plugins.cameras.endpoints.camera_endpoints import CameraEndpoints
from edge_server.plugins.cameras.endpoints.deepstack_endpoints import DeepStackEndpoints
from edge_server.plugins.cameras.endpoints.view_endpoints import ViewEndpoints
from edge_server.plugins.cameras.reports import CamerasReport, FrameStreamReport
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from edge_server.plugins.cameras.streams.stream_view import StreamView


def _no_view(stream: str) -> AbstractContextManager[StreamView]:
    raise NotFound(f"no frame stream '{stream[:80]}' is open")


def http_routes(
    front: HttpFrontend,
    service: InferenceService,
    config: HttpConfig,
    events: EventEndpoints,
    *,
    streams: Callable[[], Sequence[FrameStreamReport]] = tuple,
    view: Callable[[str], AbstractContextManager[StreamView]] = _no_view,
    cameras: Callable[[], CamerasReport] | None = None,
    plugin_routes: Sequence[Route] = (),
    health_headers: Callable[[], Mapping[str, str]] = dict,
    allows_code_upload: bool = False,
) -> Sequence[Route]:
    """Return the routes, in the order of the OpenAPI document.

    `view` returns the view of a frame stream.
    """
    access = front.access_check
    # In the document, these stand between the lines of other parts.
    versions, activity, *pins = OperatorEndpoints(service, access).routes()
    return (
        *GenerationEndpoints(service, config.header_pattern).routes(),
        *DeepStackEndpoints(service).routes(),
        *ControlEndpoints(service, health_headers, allows_code_upload=allows_code_upload).routes(),
        *events.routes(),
        versions,
        *CameraEndpoints(streams, cameras).routes(),
        activity,
        *pins,
        *ViewEndpoints(access, view).routes(),
        *plugin_routes,
    )
