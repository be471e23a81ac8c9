"""Entry module of the plugin `add`: declares the command `edge-server add`."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


class AddPlugin(Plugin):
    name = "add"
    commands = (
        Command(
            "add",
            "put a model file into a repository: say what it is, write its configuration, and try it",
            "edge_server.plugins.add.command",
        ),
    )


PLUGIN = AddPlugin()
