"""Entry module of the plugin `governor`: declares its settings, and imports the rest when a server uses it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.config.setting import SettingTable
from edge_server.plugin import Plugin, RunningPlugin
from edge_server.plugins.governor.settings import GovernorConfig

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class GovernorPlugin(Plugin):
    name = "governor"
    tables = (SettingTable("governor", "Governor", GovernorConfig),)
    machine_checks = ("edge_server.plugins.governor.machine_check:check_machine",)
    machine_facts = MappingProxyType({"nvml": "edge_server.plugins.governor.machine_check:nvml_facts"})
    is_required = True  # without it nothing keeps the machine within its limits

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        settings = config.table(GovernorConfig)
        if not settings.is_enabled:
            from edge_server.plugins.governor.http_route import NoGovernor

            return NoGovernor(settings)
        from edge_server.plugins.governor.running_plugin import Governor

        return Governor(config)


PLUGIN = GovernorPlugin()
