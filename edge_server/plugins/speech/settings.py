"""Declaration of the settings of speech."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_server.config.setting import BOOLEAN, Kind, setting


def _parse_address(text: str) -> str:
    found = re.fullmatch(r"([^\s\[\]/:]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", text)
    if text and (found is None or int(found[2]) > 65535):
        raise ValueError("expected HOST:PORT")
    return text


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Speech for home assistants."""

    wyoming: str = setting(
        "",
        "--wyoming",
        Kind("host:port", _parse_address),
        "Serve speech to Home Assistant's Assist at this address, by the Wyoming protocol. It asks for no key.",
    )
    announces_wyoming: bool = setting(
        False,
        "--wyoming-announce",
        BOOLEAN,
        "Announce that address by multicast DNS, by which Home Assistant finds it. Needs the extra zeroconf.",
    )
