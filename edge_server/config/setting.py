"""One row of the table of settings, and how its names are spelled as flag, variable and TOML key."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.kinds import Kind

VARIABLE_PREFIX = "EDGE_SERVER_"
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = VARIABLE_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Setting:
    """`name` is slice.field. A non-empty `separator` makes it repeatable, and splits its environment variable."""

    name: str
    flag: str
    kind: Kind
    help: str
    separator: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.flag.removeprefix("--").upper().replace("-", "_")

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        return self.name.partition(".")[2]
