"""Configuration of Cyclone DDS for the networks that ROS 2's environment variables name."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.ros2_environment import DiscoverySettings

COMPARE_NAMES_OF_FAST_DDS = (
    "<CycloneDDS><Domain><Compatibility><IgnoreTypeInformation>1.15</IgnoreTypeInformation></Compatibility></Domain>"
    "</CycloneDDS>"
)
"""Configuration of Cyclone DDS for nodes with Fast DDS (vendor 1.15): of a type, only the name is compared. Cyclone DDS
refuses the description of a type that Fast DDS 3 sends, and nodes of ROS 2 Kilted would never match."""

LARGE_RECEIVE_BUFFER = (
    "<CycloneDDS><Domain><Internal><SocketReceiveBufferSize max='16MiB'/></Internal></Domain></CycloneDDS>"
)
"""Configuration of Cyclone DDS for images: a best-effort publisher sends all packets of an image at once, and those for
which the buffer has no room are lost. Linux gives at most net.core.rmem_max; by itself Cyclone DDS asks for 1 MiB."""

_OF_FAST_DDS = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")

log = logging.getLogger(__name__)


def network_configuration(settings: DiscoverySettings, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the configuration of Cyclone DDS, and in words where nodes are looked for.

    It begins as that of rmw_cyclonedds_cpp: CYCLONEDDS_URI comes last, so that its elements override others, and
    SYSTEM_DEFAULT leaves the network to it. This machine and static peers are asked again and again, for nodes of Fast
    DDS that start later. Variables of Fast DDS have no effect, which is logged.
    """
    _log_variables_of_fast_dds(environment)
    own_uri = environment.get("CYCLONEDDS_URI", "")
    parts = [COMPARE_NAMES_OF_FAST_DDS, LARGE_RECEIVE_BUFFER]
    if settings.discovery_range != "SYSTEM_DEFAULT":
        parts.append(_discovery(settings))
    if own_uri:
        parts.append(own_uri)
    is_local = settings.discovery_range == "LOCALHOST"
    reach = "this machine only (ROS_AUTOMATIC_DISCOVERY_RANGE)" if is_local else "the default network interface"
    if settings.static_peers:
        reach = f"{'this machine' if is_local else reach} and {', '.join(settings.static_peers)}"
    if own_uri:
        reach += ", unless CYCLONEDDS_URI says otherwise"
    return ",".join(parts), reach


def _discovery(settings: DiscoverySettings) -> str:
    is_local = settings.discovery_range == "LOCALHOST"
    listed = "".join(
        f"<Peer address='{peer}' PruneDelay='inf'/>" for peer in ("127.0.0.1", *map(_address, settings.static_peers))
    )
    return (
        "<CycloneDDS><Domain>"
        + ("<General><AllowMulticast>false</AllowMulticast></General>" if is_local else "")
        # Other nodes may start later, and do not ask this one if their range is SUBNET: peers are asked for ever, as
        # often as Fast DDS does. Not by a second interface, loopback: Fast DDS sends an image to the addresses of all.
        # The index gives ports that other nodes know, as this machine may be their static peer.
        + "<Discovery><SPDPInterval>3 s</SPDPInterval>"
        + "<ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>99</MaxAutoParticipantIndex>"
        + f"<Peers>{listed}</Peers></Discovery></Domain></CycloneDDS>"
    )


def _address(peer: str) -> str:
    """Return the IPv4 address of a peer. Cyclone DDS would abort the process for an unknown name."""
    try:
        found = socket.getaddrinfo(peer, None, socket.AF_INET, socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"ROS_STATIC_PEERS: expected IPv4 addresses or known names with ';' between them, got '{peer}': {error}"
        ) from None
    return str(found[0][4][0])


def _log_variables_of_fast_dds(environment: Mapping[str, str]) -> None:
    if environment.get("ROS_DISCOVERY_SERVER"):
        log.warning(
            "ROS_DISCOVERY_SERVER is set, and the transport dds cannot ask a discovery server of Fast DDS: nodes that "
            "only it knows are not seen, expected --transport=rclpy"
        )
    for name in _OF_FAST_DDS:
        if environment.get(name):
            log.info("%s has no effect on the transport dds, expected CYCLONEDDS_URI", name)
