"""Entry module of the plugin `cameras`: declares the settings of cameras and the commands `stream`, `view` and
`cameras`, and checks the settings before a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_server.config.setting import SettingTable
from edge_server.plugin import Command, Plugin, RunningPlugin
from edge_server.plugins.cameras.settings import FramesConfig, SourcesConfig

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class CamerasPlugin(Plugin):
    name = "cameras"
    tables = (
        SettingTable("frames", "Frame streams", FramesConfig),
        SettingTable("sources", "Cameras of the server", SourcesConfig),
    )
    commands = (
        Command(
            "stream",
            "send a video, pictures, a camera or a test pattern through a model, and show rates and latencies",
            "edge_server.plugins.cameras.commands.stream",
            "Cameras, robots and chats",
        ),
        Command(
            "view",
            "show the frame streams of a running server in the Foxglove viewer",
            "edge_server.plugins.cameras.commands.view",
            "Cameras, robots and chats",
        ),
        Command(
            "cameras",
            "find the network cameras of the local network, with the URLs of their streams (ONVIF)",
            "edge_server.plugins.cameras.commands.find_onvif_cameras",
            "Cameras, robots and chats",
        ),
    )

    def check(self, config: ServerConfig) -> Sequence[str]:
        sources = config.table(SourcesConfig)
        # The file is checked while the server runs: a mistake in it must not keep the models from serving.
        if sources.is_used and not sources.file:
            from edge_server.plugins.cameras.source_and_sink_settings import read_entries

            read_entries("", sources.sources, sources.sinks)
        return ()

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        from edge_server.plugins.cameras.running_plugin import Cameras

        return Cameras(config)


PLUGIN = CamerasPlugin()
