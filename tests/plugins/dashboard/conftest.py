"""A front end on a real socket with the routes of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.config import HttpConfig, ServerConfig
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.plugins.dashboard.plugin import PLUGIN
from tests.frontends.conftest import Site, StubService


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`open_site(tokens=None, **http settings)`. One plugin, named site, has a panel of two files."""
    panel = tmp_path / "site.js"
    panel.write_text("export const id = 'site';")
    (tmp_path / "panel_more.js").write_text("export const more = 1;")
    (tmp_path / "plugin.js").write_text("not for browsers")
    sites = []

    def start(*, tokens: Tokens | None = None, **config: Any) -> Any:
        settings, service = HttpConfig(port=0, **config), StubService()
        service.checks = SimpleNamespace(call_each_second=lambda work: None)
        access = AccessCheck(settings, tokens)
        core = SimpleNamespace(
            config=ServerConfig(),
            service=service,
            access=access,
            ports={},
            panels=lambda: {"site": panel},
            gauges=dict,
            machine_root=Path("/"),
        )
        dashboard = PLUGIN.prepare(ServerConfig())
        dashboard.build(core)  # type: ignore[arg-type]
        dashboard.start()
        sites.append(Site(service, settings, access, dashboard.routes()))  # type: ignore[arg-type]
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def site(open_site: Callable[..., Any]) -> Any:
    return open_site()
