"""Entry module of the plugin `ros`: declares the command `edge-server ros`."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


class RosPlugin(Plugin):
    name = "ros"
    commands = (
        Command(
            "ros",
            "bridge camera topics of ROS 2, or recordings of them, to the models of a running server",
            "edge_server.plugins.ros.command",
            "Cameras, robots and chats",
        ),
    )


PLUGIN = RosPlugin()
