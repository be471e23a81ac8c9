"""Declaration of the settings of robot policies."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_server.config.setting import Kind, setting

_ADDRESS = r"([^\s\[\]/:]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})"


def _parse_address(text: str) -> str:
    found = re.fullmatch(_ADDRESS, text)
    if text and (found is None or int(found[2]) > 65535):
        raise ValueError("expected HOST:PORT")
    return text


def _parse_address_and_model(text: str) -> str:
    found = re.fullmatch(rf"{_ADDRESS}(/[^/]+)?", text)
    if text and (found is None or int(found[2]) > 65535):
        raise ValueError("expected HOST:PORT or HOST:PORT/MODEL")
    return text


@dataclass(frozen=True, slots=True)
class PoliciesConfig:
    """Wires of robot policies."""

    openpi: str = setting(
        "",
        "--policy-openpi",
        Kind("host:port", _parse_address),
        "Serve robot policies at this address by openpi's WebSocket protocol: ws://HOST:PORT, or ws://HOST:PORT/MODEL "
        "if there are several.",
    )
    groot: str = setting(
        "",
        "--policy-groot",
        Kind("host:port[/model]", _parse_address_and_model),
        "Serve a robot policy at this address by GR00T's protocol over ZeroMQ; /MODEL if there are several.",
    )
    lerobot: str = setting(
        "",
        "--policy-lerobot",
        Kind("host:port", _parse_address),
        "Serve robot policies at this address by LeRobot's asynchronous inference over gRPC. Its messages are pickles; "
        "only a written list of classes is read.",
    )
