"""Who may ask what, over every wire."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence

from edge_server.config import RestrictedGroup, ServerConfig

ORDERING_CATEGORIES = ("model-repository", "shared-memory", "logging", "trace")
"""The categories whose requests can change what the server does."""


def is_this_machine(address: str | None) -> bool:
    """Return whether a peer's address is a loopback one. A proxy on this machine makes every request look so."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def is_shared_key(given: Sequence[str | bytes], word: str) -> bool:
    """Return whether a header was given once, with the value `word`. Compared in constant time."""
    if len(given) != 1:
        return False
    value = given[0].encode("utf-8", "surrogateescape") if isinstance(given[0], str) else given[0]
    return hmac.compare_digest(value, word.encode())


def unprotected_orders(config: ServerConfig) -> str:
    """Return one sentence that names the orders which other machines may give without a key; "" when there are none."""
    orders = {"logging", "trace"}
    if config.repository.control_mode == "explicit":
        orders.add("model-repository")
    if config.memory.allows_client_shm:
        orders.add("shared-memory")
    http, grpc = config.http, config.grpc
    if config.auth.tokens_file:
        return ""
    found: Mapping[str, list[str]] = {
        "HTTP": _open(orders, http.address, http.restricted) if http.is_enabled and not http.client_ca else [],
        "gRPC": _open(orders, grpc.address, grpc.restricted) if grpc.is_enabled and not grpc.is_mutual_tls else [],
    }
    told: dict[str, list[str]] = {}
    for wire, categories in found.items():
        if categories:
            told.setdefault(", ".join(categories), []).append(wire)
    if not told:
        return ""
    what = "; ".join(f"{categories} over {' and '.join(wires)}" for categories, wires in told.items())
    return f"any machine may give orders without a key: {what}"


def _open(orders: set[str], address: str, restricted: tuple[RestrictedGroup, ...]) -> list[str]:
    if address == "localhost" or is_this_machine(address.strip("[]")):
        return []
    return sorted(orders - {category for group in restricted for category in group.categories})
