"""Entry module of the plugin `remote`: lets a server use model repositories in object stores and OCI registries, by
copies on the local disk. Its command `pull` downloads one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.plugin import Command, Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class RemotePlugin(Plugin):
    name = "remote"
    commands = (
        Command(
            "pull",
            "download a model into a repository and verify its SHA-256",
            "edge_server.plugins.remote.pull.command",
            "Models",
        ),
    )
    address_schemes = ("s3", "gs", "as", "file", "oci")
    is_required = True  # without copies a server has no models, or old ones

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        if all("://" not in path for path in config.repository.paths):
            return None
        from edge_server.plugins.remote.repositories import RemoteRepositories

        return RemoteRepositories(config.repository)


PLUGIN = RemotePlugin()
