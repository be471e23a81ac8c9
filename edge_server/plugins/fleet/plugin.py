"""Declaration of the plugin `fleet`: its settings, its part inside a server (the follower of a signed repository), and
its commands: `fleet` (many servers), `publish` and `follow` (signed releases)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.config.setting import ConfigError, SettingTable
from edge_server.plugin import Command, Plugin, RunningPlugin
from edge_server.plugins.fleet.settings import UPDATE_HOME_VARIABLE, FollowConfig, check_broker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.config import ServerConfig


class FleetPlugin(Plugin):
    name = "fleet"
    tables = (SettingTable("follow", "Signed releases", FollowConfig),)
    commands = (
        Command(
            "fleet",
            "show the models of many running servers in one table, and which servers differ",
            "edge_server.plugins.fleet.command",
            "A running server",
        ),
        Command(
            "publish",
            "sign the models of a folder as releases for many boxes",
            "edge_server.plugins.fleet.publish.command",
            "Models",
        ),
        Command(
            "follow",
            "keep a model repository as a signed repository says; `serve --follow` does the same in a server",
            "edge_server.plugins.fleet.follow.command",
            "Models",
        ),
    )

    def check(self, config: ServerConfig) -> Sequence[str]:
        if not config.table(FollowConfig).url:
            return ("--follow-mqtt has no effect without --follow",) if config.table(FollowConfig).mqtt else ()
        if config.repository.control_mode != "poll":
            raise ConfigError(
                "--follow needs --model-control-mode=poll: the server serves what the follower puts there"
            )
        if not config.repository.paths or "://" in config.repository.paths[0]:
            raise ConfigError("--follow needs a folder as the first --model-repository")
        check_broker(config.table(FollowConfig))
        return ()

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        if not config.table(FollowConfig).url:
            from edge_server.config import process_environment

            if not process_environment().get(UPDATE_HOME_VARIABLE):
                return None
            from edge_server.plugins.fleet.program_update import ProgramUpdatePlugin

            return ProgramUpdatePlugin()
        from edge_server.plugins.fleet.follow.running import FollowPlugin

        return FollowPlugin(config)


PLUGIN = FleetPlugin()
