"""A front end on a real socket with the routes of the page."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.config import HttpConfig, ServerConfig
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.plugins.dashboard.plugin import PLUGIN


def _front_ends() -> Any:
    """Load the helpers of tests/frontends, which are no package."""
    path = Path(__file__).parents[2] / "frontends" / "conftest.py"
    spec = importlib.util.spec_from_file_location("page_front_ends", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`open_site(tokens=None, **http settings)`. One plugin, named site, has a panel of two files."""
    helpers = _front_ends()
    panel = tmp_path / "site.js"
    panel.write_text("export const id = 'site';")
    (tmp_path / "panel_more.js").write_text("export const more = 1;")
    (tmp_path / "plugin.js").write_text("not for browsers")
    sites = []

    def start(*, tokens: Tokens | None = None, **config: Any) -> Any:
        settings, service = HttpConfig(port=0, **config), helpers.StubService()
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
        sites.append(helpers.Site(service, settings, access, dashboard.routes()))  # type: ignore[arg-type]
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def site(open_site: Callable[..., Any]) -> Any:
    return open_site()
