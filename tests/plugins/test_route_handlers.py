"""Handlers in the tables of routes of plugins, which are imported for the first request to one of them."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from pkgutil import resolve_name

from edge_server.config.merge_settings import parse_serve
from edge_server.plugin import own_plugins
from edge_server.process.composition_root import build
from edge_server.telemetry.log import LogSettings


def test_each_handler_that_a_table_of_routes_names_exists(tmp_path: Path) -> None:
    plugins = own_plugins()
    flags = [f"--model-repository={tmp_path}", "--model-control-mode=explicit", "--governor=false"]
    config = parse_serve(flags, {}, plugins).config
    core = build(config, LogSettings(config.log), plugins)
    try:
        core.plugins.start()
        handlers = [route.handler for route in core.plugins.routes()]
    finally:
        core.close(5.0)
    named = [handler.args for handler in handlers if isinstance(handler, functools.partial)]
    assert len(named) > 40
    for class_name, method in named:
        assert inspect.iscoroutinefunction(getattr(resolve_name(class_name), method)), (class_name, method)
