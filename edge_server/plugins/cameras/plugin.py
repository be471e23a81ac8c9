"""Entry of cameras: their commands."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


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


PLUGIN = CamerasPlugin()
