"""Environment variables of ROS 2 that decide which nodes are found, read as its library rcl reads them.

Sources: rcl 9 and 10 (Jazzy, Kilted), domain_id.c, discovery_options.c, localhost.c and init.c.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

from edge_server.errors import InvalidRequest

MAX_DOMAIN_ID = 232
"""Highest domain over DDS: above it, the ports of RTPS (7400 + 250 * domain) exceed 65535."""

DISCOVERY_RANGES = ("SUBNET", "LOCALHOST", "SYSTEM_DEFAULT", "OFF")

TRANSPORT_OF_RMW = {
    "rmw_cyclonedds_cpp": "dds",
    "rmw_fastrtps_cpp": "dds",
    "rmw_fastrtps_dynamic_cpp": "dds",
    "rmw_connextdds": "dds",
    "rmw_zenoh_cpp": "zenoh",
}
"""Value of RMW_IMPLEMENTATION -> transport that sees the nodes of this middleware."""

_NUMBER = re.compile(r"\s*\+?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)(.*)", re.DOTALL | re.ASCII)
_MAX_DIGITS = 20
_MAX_PEER_LENGTH = 255

log = logging.getLogger(__name__)


class DiscoverySettings(NamedTuple):
    """Which nodes are found: of which domain, on this machine or on its network too, and on which other machines."""

    domain_id: int
    discovery_range: str
    static_peers: tuple[str, ...] = ()


def read_discovery_settings(environment: Mapping[str, str]) -> DiscoverySettings:
    """Return the domain, the discovery range and the static peers.

    They come from ROS_DOMAIN_ID, ROS_AUTOMATIC_DISCOVERY_RANGE, ROS_STATIC_PEERS and ROS_LOCALHOST_ONLY.

    Like rcl, it logs a range that does not exist and uses LOCALHOST, and skips peers of more than 255 characters.
    Raises InvalidRequest for a domain that is no number or too high, and for the range OFF, which finds no node.
    """
    domain_id = read_domain_id(environment)
    if environment.get("ROS_LOCALHOST_ONLY", "").startswith("1"):
        return DiscoverySettings(domain_id, "LOCALHOST")
    name = "ROS_AUTOMATIC_DISCOVERY_RANGE"
    discovery_range = environment.get(name, "") or "SUBNET"
    expected = ", ".join(DISCOVERY_RANGES)
    if discovery_range == "OFF":
        raise InvalidRequest(f"{name}: expected one of {expected}, got 'OFF': no node would be found")
    if discovery_range not in DISCOVERY_RANGES:
        log.warning("%s: expected one of %s, got '%s': LOCALHOST is used", name, expected, discovery_range)
        discovery_range = "LOCALHOST"
    peers = [peer.strip() for peer in environment.get("ROS_STATIC_PEERS", "").split(";") if peer.strip()]
    if discovery_range == "SYSTEM_DEFAULT" and peers:
        log.warning("ROS_STATIC_PEERS is not used: %s is SYSTEM_DEFAULT", name)
        peers = []
    for peer in (peer for peer in peers if len(peer) > _MAX_PEER_LENGTH):
        log.warning("ROS_STATIC_PEERS: '%s...' is skipped: more than %d characters", peer[:20], _MAX_PEER_LENGTH)
    return DiscoverySettings(domain_id, discovery_range, tuple(peer for peer in peers if len(peer) <= _MAX_PEER_LENGTH))


def read_domain_id(environment: Mapping[str, str], maximum: int = MAX_DOMAIN_ID) -> int:
    """Return ROS_DOMAIN_ID, 0 if it is not set. Like strtoul of C, it reads "0x10" as 16, "010" as 8 and "5th" as 5.

    Raises InvalidRequest when it is no number, or not 0 to `maximum`.
    """
    given = environment.get("ROS_DOMAIN_ID", "")
    if not given:
        return 0
    found = _NUMBER.fullmatch(given)
    if found is None:
        raise InvalidRequest(f"ROS_DOMAIN_ID: expected a number, got '{given}'")
    digits, rest = found.groups()
    base = 10 if digits[0] != "0" else 16 if digits[1:2] in ("x", "X") else 8
    domain_id = int(digits, base) if len(digits) <= _MAX_DIGITS else maximum + 1
    if domain_id == 0 and rest:
        raise InvalidRequest(f"ROS_DOMAIN_ID: expected a number, got '{given}'")
    if domain_id > maximum:
        raise InvalidRequest(f"ROS_DOMAIN_ID: a ROS domain is 0 to {maximum}, got {given}")
    if rest.strip():
        log.warning("ROS_DOMAIN_ID: '%s' is read as %d, as ROS 2 does", given, domain_id)
    return domain_id


def choose_transport(requested: str, environment: Mapping[str, str]) -> str:
    """Return the transport: the requested one, or if that is "", the one for RMW_IMPLEMENTATION, else dds.

    A transport that does not see the nodes of RMW_IMPLEMENTATION is logged.
    """
    rmw = environment.get("RMW_IMPLEMENTATION", "")
    fitting = TRANSPORT_OF_RMW.get(rmw)
    if requested == "rclpy":  # it reads RMW_IMPLEMENTATION itself
        return requested
    chosen = requested or fitting or "dds"
    if rmw and fitting is None:
        log.warning(
            "RMW_IMPLEMENTATION: expected one of %s, got '%s': nodes of other middlewares may not be seen by the "
            "transport %s; --transport=rclpy uses any that ROS 2 has installed",
            ", ".join(TRANSPORT_OF_RMW), rmw, chosen,
        )  # fmt: skip
    elif fitting not in (None, chosen):
        log.warning(
            "RMW_IMPLEMENTATION is %s, and the transport is %s: nodes of that middleware are not seen, expected "
            "--transport=%s", rmw, chosen, fitting,
        )  # fmt: skip
    return chosen
