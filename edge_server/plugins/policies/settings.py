"""Declaration of the settings of robot policies."""

from __future__ import annotations

from dataclasses import dataclass

from edge_server.config.setting import OPTIONAL_ADDRESS, Kind, integer, setting


def _parse_address_and_model(text: str) -> str:
    address, slash, model = text.partition("/")
    OPTIONAL_ADDRESS.parse(address)
    if slash and (not address or not model or "/" in model):
        raise ValueError("expected HOST:PORT or HOST:PORT/MODEL")
    return text


@dataclass(frozen=True, slots=True)
class PoliciesConfig:
    """Wires of robot policies."""

    openpi: str = setting(
        "",
        "--policy-openpi",
        OPTIONAL_ADDRESS,
        "Serve robot policies at this address by openpi's WebSocket protocol: ws://HOST:PORT, or ws://HOST:PORT/MODEL "
        "if there are several.",
    )
    groot: str = setting(
        "",
        "--policy-groot",
        Kind("host:port[/model]", _parse_address_and_model),
        "Serve a robot policy at this address by GR00T's protocol over ZeroMQ; /MODEL if there are several.",
    )
    message_memory_mb: int = setting(
        256,
        "--policy-message-memory-mb",
        integer(128, 1 << 20),
        "Most megabytes (MiB) that the observations of all robots hold together, with what is made of them; what needs "
        "more waits or is refused.",
    )
