"""A front end on a real socket with the routes of cameras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from edge_server.config import HttpConfig
from edge_server.errors import NotFound
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.plugins.cameras.endpoints.routes import deepstack_routes, report_routes, view_routes
from edge_server.plugins.cameras.reports import NO_CAMERAS
from tests.frontends.conftest import Site, StubService


def no_view(stream: str) -> AbstractContextManager[Any]:
    raise NotFound(f"no frame stream '{stream}' is open")


@pytest.fixture
def open_site() -> Iterator[Callable[..., Site]]:
    """`open_site(view=..., **http settings)`: `view(stream)` returns the view of a stream."""
    sites: list[Site] = []

    def start(*, view: Callable[[str], AbstractContextManager[Any]] = no_view, **config: Any) -> Site:
        settings, service = HttpConfig(port=0, **config), StubService()
        access = AccessCheck(settings)
        routes = [
            *deepstack_routes(service),  # type: ignore[arg-type]
            *report_routes(list, lambda: NO_CAMERAS),
            *view_routes(access, view),
        ]
        sites.append(Site(service, settings, access, routes))
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def site(open_site: Callable[..., Site]) -> Site:
    return open_site()
