"""Declaration of the settings of speech."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import BOOLEAN, OPTIONAL_ADDRESS, setting


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Speech for home assistants."""

    wyoming: str = setting(
        "",
        "--wyoming",
        OPTIONAL_ADDRESS,
        "Serve speech to Home Assistant's Assist at this address, by the Wyoming protocol. It asks for no key.",
    )
    announces_wyoming: bool = setting(
        False,
        "--wyoming-announce",
        BOOLEAN,
        "Announce that address by multicast DNS, by which Home Assistant finds it. Needs the extra zeroconf.",
    )
