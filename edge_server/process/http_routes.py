"""List of all routes of the HTTP port, from the core and from the plugins of this server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge_server.config import HttpConfig
from edge_server.frontends.http.control_endpoints import ControlEndpoints
from edge_server.frontends.http.event_endpoints import EventEndpoints
from edge_server.frontends.http.frontend import HttpFrontend
from edge_server.frontends.http.generate_endpoints import GenerationEndpoints
from edge_server.frontends.http.routes import Route
from edge_server.frontends.http.version_endpoints import VersionEndpoints
from edge_server.service import InferenceService


def http_routes(
    front: HttpFrontend,
    service: InferenceService,
    config: HttpConfig,
    events: EventEndpoints,
    *,
    plugin_routes: Sequence[Route] = (),
    health_headers: Callable[[], Mapping[str, str]] = dict,
    allows_code_upload: bool = False,
) -> Sequence[Route]:
    """Return the routes, in the order of the OpenAPI document."""
    return (
        *GenerationEndpoints(service, config.header_pattern).routes(),
        *ControlEndpoints(service, health_headers, allows_code_upload=allows_code_upload).routes(),
        *events.routes(),
        *VersionEndpoints(service, front.access_check).routes(),
        *plugin_routes,
    )
