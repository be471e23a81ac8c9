"""Functions for access control over HTTP and gRPC: recognise clients on this machine, compare keys, name for the log
what clients may do without a key, and decide which ports of plugins may open beside them."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence

from edge_server.config import CATEGORIES, RestrictedGroup, ServerConfig
from edge_server.errors import InvalidRequest

log = logging.getLogger(__name__)

ORDERING_CATEGORIES = ("model-repository", "shared-memory", "logging", "trace")
"""The categories whose requests can change the state of the server."""

_WIRES: Mapping[str, tuple[str, ...]] = {
    "view": ("HTTP",),
    "openapi": ("HTTP",),
    "reflection": ("gRPC",),
    "metrics": ("metrics",),
}
"""The listeners that serve a category, for those that HTTP and gRPC do not both serve."""


def is_this_machine(address: str | None) -> bool:
    """Return whether a peer's address is a loopback address. All requests through a local proxy have one."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def is_shared_key(given: Sequence[str | bytes], key: str) -> bool:
    """Return whether a header was sent exactly once, with the value `key`. Compares in constant time."""
    if len(given) != 1:
        return False
    value = given[0].encode("utf-8", "surrogateescape") if isinstance(given[0], str) else given[0]
    return hmac.compare_digest(value, key.encode())


def find_unprotected_categories(config: ServerConfig) -> str:
    """Return a sentence that names the changes that other machines may make without a key; "" when there are none."""
    orders = {"logging", "trace"}
    if config.repository.control_mode == "explicit":
        orders.add("model-repository")
    if config.memory.allows_client_shm:
        orders.add("shared-memory")
    http, grpc = config.http, config.grpc
    if config.auth.tokens_file:
        return ""
    found: Mapping[str, list[str]] = {
        "HTTP": _unprotected(orders, http.address, http.restricted) if http.is_enabled and not http.client_ca else [],
        "gRPC": _unprotected(orders, grpc.address, grpc.restricted)
        if grpc.is_enabled and not grpc.is_mutual_tls
        else [],
    }
    wires_of: dict[str, list[str]] = {}
    for wire, categories in found.items():
        if categories:
            wires_of.setdefault(", ".join(categories), []).append(wire)
    if not wires_of:
        return ""
    commands = "; ".join(f"{categories} over {' and '.join(wires)}" for categories, wires in wires_of.items())
    return f"any machine may give orders without a key: {commands}"


def required_picture_access(config: ServerConfig, *, needs_token: bool) -> str:
    """Return who sees camera pictures, for the start line; "" if other machines cannot reach HTTP.

    `needs_token`: requests of the category view need a token.
    """
    http = config.http
    if not http.is_enabled or _is_local(http.address):
        return ""
    if needs_token or any("view" in group.categories for group in http.restricted):
        return "camera pictures need a key"
    if http.is_view_open:
        return "any machine sees camera pictures without a key: --view-open"
    return "camera pictures: this machine only; --view-open shows them to others"


def open_without_token(config: ServerConfig, requires_token: Callable[[str], bool]) -> str:
    """Return a sentence that names the categories that need neither a token nor a key, for the start.

    Returns "" without a tokens file.
    """
    http, grpc = config.http, config.grpc
    if not config.auth.tokens_file:
        return ""
    groups = {"HTTP": http.restricted, "gRPC": grpc.restricted, "metrics": http.restricted}
    is_on = {"HTTP": http.is_enabled, "gRPC": grpc.is_enabled, "metrics": config.metrics.is_enabled}
    found = []
    for category in CATEGORIES:
        offered = [wire for wire in _WIRES.get(category, ("HTTP", "gRPC")) if is_on[wire]]
        is_open = [wire for wire in offered if not any(category in group.categories for group in groups[wire])]
        if is_open and not requires_token(category):
            found.append(category if is_open == offered else f"{category} over {' and '.join(is_open)}")
    if http.is_enabled:
        found.append("the page's files")
    return f"no token is needed for: {', '.join(found)}"


def check_plugin_port(
    config: ServerConfig, flag: str, address: str, clients: str, *, needs_key: bool, sends_key: bool
) -> None:
    """Check whether a plugin may open a port of its own, without TLS, for inference.

    `flag`=`address` opens it: HOST:PORT[/...]. `clients` names its protocol. `needs_key`:
    requests of the category inference need a key or a token. `sends_key`: so do those of this port. Raises
    InvalidRequest if inference would be open to clients that HTTP or gRPC refuse. Where only programs of this machine
    can reach the port, client certificates and keys of gRPC are replaced by a warning in the log.
    """
    if needs_key:
        if not sends_key:
            raise InvalidRequest(f"{flag}: inference needs a key here, and clients of {clients} send none")
        return
    http, grpc = config.http, config.grpc
    demands = {
        "--https-client-ca": http.is_enabled and http.client_ca,
        "--grpc-use-ssl-mutual": grpc.is_enabled and grpc.is_mutual_tls,
        "--grpc-restricted-protocol": grpc.is_enabled
        and any("inference" in group.categories for group in grpc.restricted),
    }
    proofs = " and ".join(name for name, is_demanded in demands.items() if is_demanded)
    if not proofs:
        return
    problem = f"{flag}={address}: {proofs} asks for a proof that clients of {clients} cannot give"
    if _is_local(address.partition("/")[0].rpartition(":")[0]):
        log.warning("%s; programs of this machine run inference without it", problem)
        return
    remedy = "listen on 127.0.0.1"
    if sends_key:
        remedy += ", or ask for tokens for inference, which they can send (--auth-tokens-file)"
    raise InvalidRequest(f"{problem}; {remedy}")


def _is_local(address: str) -> bool:
    return address == "localhost" or is_this_machine(address.strip("[]"))


def _unprotected(orders: set[str], address: str, restricted: tuple[RestrictedGroup, ...]) -> list[str]:
    if _is_local(address):
        return []
    return sorted(orders - {category for group in restricted for category in group.categories})
