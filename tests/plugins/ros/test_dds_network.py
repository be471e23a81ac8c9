"""Networks of the DDS transport: the variables of ROS 2 and Cyclone DDS become one configuration."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.dds_network import (
    COMPARE_NAMES_OF_FAST_DDS,
    LARGE_RECEIVE_BUFFER,
    network_configuration,
)
from edge_server.plugins.ros.transports.ros2_environment import read_discovery_settings
from edge_server.plugins.ros.transports.udp_sockets import explain_no_nodes


def configure(**environment: str) -> tuple[str, str]:
    return network_configuration(read_discovery_settings(environment), environment)


def test_without_variables_discovery_uses_the_default_interface() -> None:
    configuration, reach = configure()
    assert configuration.startswith(f"{COMPARE_NAMES_OF_FAST_DDS},")
    assert "AllowMulticast" not in configuration
    assert "<Peers><Peer address='127.0.0.1' PruneDelay='inf'/></Peers>" in configuration
    assert reach == "the default network interface"


def test_the_range_localhost_asks_this_machine_alone() -> None:
    configuration, reach = configure(ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    assert "<AllowMulticast>false</AllowMulticast>" in configuration
    assert "<Peers><Peer address='127.0.0.1' PruneDelay='inf'/></Peers>" in configuration
    assert reach.startswith("this machine only")


@pytest.mark.parametrize(("given", "has_multicast"), [("SUBNET", True), ("LOCALHOST", False)])
def test_static_peers_are_used_too(given: str, has_multicast: bool) -> None:
    configuration, reach = configure(ROS_AUTOMATIC_DISCOVERY_RANGE=given, ROS_STATIC_PEERS="192.168.1.5; localhost;")
    peers = ("127.0.0.1", "192.168.1.5", "127.0.0.1")
    assert "".join(f"<Peer address='{peer}' PruneDelay='inf'/>" for peer in peers) in configuration
    assert ("<AllowMulticast>false<" not in configuration) == has_multicast
    assert "192.168.1.5, localhost" in reach


def test_a_users_configuration_comes_last_and_overrides() -> None:
    own = "file:///etc/cyclone.xml"
    configuration, reach = configure(CYCLONEDDS_URI=own, ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    assert configuration.endswith(f",{own}")
    assert "CYCLONEDDS_URI" in reach


def test_system_default_leaves_the_network_to_cyclone_dds() -> None:
    own = "file:///etc/cyclone.xml"
    configuration, _ = configure(CYCLONEDDS_URI=own, ROS_AUTOMATIC_DISCOVERY_RANGE="SYSTEM_DEFAULT")
    assert configuration == f"{COMPARE_NAMES_OF_FAST_DDS},{LARGE_RECEIVE_BUFFER},{own}"


@pytest.mark.parametrize("peer", ["<b>", "::1", "robot.invalid", "192.168.0.0/24", "x" * 64])
def test_a_peer_without_an_ipv4_address_is_named(peer: str) -> None:
    with pytest.raises(InvalidRequest, match=f"ROS_STATIC_PEERS: expected IPv4 addresses .*, got '{peer}'"):
        configure(ROS_STATIC_PEERS=f"127.0.0.1;{peer}")


def test_a_discovery_server_and_profiles_of_fast_dds_are_logged_as_without_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    configure(ROS_DISCOVERY_SERVER="10.0.0.1:11811", FASTDDS_DEFAULT_PROFILES_FILE="/etc/fast.xml")
    assert "cannot ask a discovery server" in caplog.messages[0]
    assert "FASTDDS_DEFAULT_PROFILES_FILE has no effect" in caplog.messages[1]


IN_DOMAIN = """
import socket, sys
first = 7400 + 250 * int(sys.argv[1]) + int(sys.argv[2])
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for index, one in enumerate(sockets):
    one.bind(("0.0.0.0", first + index))
print("bound", flush=True)
sys.stdin.read()
"""
"""A program with the two ports that a DDS participant has."""


@pytest.mark.parametrize("offset", [0, 10, 12])
def test_an_unreachable_program_in_the_same_domain_is_on_another_interface(
    ros_domain: dict[str, str], offset: int
) -> None:
    domain = int(ros_domain["ROS_DOMAIN_ID"])
    assert f"program of this machine is in domain {domain}" not in explain_no_nodes(domain)
    with subprocess.Popen(
        [sys.executable, "-c", IN_DOMAIN, str(domain), str(offset)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "bound\n"
        own, other = explain_no_nodes(domain, "this machine only"), explain_no_nodes(domain + 100)
        program.communicate()
    assert own == (
        f"no other node is seen in ROS domain {domain}, on this machine only; another DDS program of this machine is "
        f"in domain {domain} and is not reached, so its network interface is another one: expected the same "
        "ROS_AUTOMATIC_DISCOVERY_RANGE (or ROS_LOCALHOST_ONLY, or interface in CYCLONEDDS_URI) there and here"
    )
    listed = other.partition("programs on this machine use domain ")[2].partition(": expected the same ROS_DOMAIN_ID")
    assert str(domain) in listed[0].split(", ")


def test_ports_of_this_process_are_not_another_program(ros_domain: dict[str, str]) -> None:
    domain = int(ros_domain["ROS_DOMAIN_ID"])
    first = 7400 + 250 * domain + 10
    with contextlib.ExitStack() as stack:
        for port in (first, first + 1):
            one = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            one.bind(("0.0.0.0", port))
        assert f"program of this machine is in domain {domain}" not in explain_no_nodes(domain)
