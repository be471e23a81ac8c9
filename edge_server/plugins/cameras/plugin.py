"""Entry of cameras: their commands, and what they do in a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.plugin import Command, Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class CamerasPlugin(Plugin):
    name = "cameras"
    commands = (
        Command(
            "stream",
            "send a video, pictures, a camera or a test pattern through a model, and show rates and latencies",
            "edge_server.plugins.cameras.commands.stream",
        ),
        Command(
            "view",
            "show the frame streams of a running server in the Foxglove viewer",
            "edge_server.plugins.cameras.commands.view",
        ),
    )

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        from edge_server.plugins.cameras.cameras import Cameras

        return Cameras(config)


PLUGIN = CamerasPlugin()
