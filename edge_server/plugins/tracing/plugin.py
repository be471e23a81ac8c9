"""Entry module of the plugin `tracing`: exports the traces of requests when `--trace-config=mode=opentelemetry` is
set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class TracingPlugin(Plugin):
    name = "tracing"

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        if config.trace.mode != "opentelemetry":
            return None
        from edge_server.plugins.tracing.opentelemetry_export import Tracing

        return Tracing(config.trace)


PLUGIN = TracingPlugin()
