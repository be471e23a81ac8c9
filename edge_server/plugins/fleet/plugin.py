"""Entry module of the plugin `fleet`: declares the commands `edge-server fleet status` (state of many servers) and
`edge-server pull` (download of a model)."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


class FleetPlugin(Plugin):
    name = "fleet"
    commands = (
        Command(
            "fleet",
            "show the models of many running servers in one table, and which servers differ",
            "edge_server.plugins.fleet.fleet",
            "A running server",
        ),
        Command(
            "pull",
            "download a model into a repository and verify its SHA-256",
            "edge_server.plugins.fleet.pull",
            "Models",
        ),
    )


PLUGIN = FleetPlugin()
