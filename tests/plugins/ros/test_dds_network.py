"""Networks of the DDS transport: the variables of ROS 2 and Cyclone DDS become one configuration."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.dds_domains import explain_no_nodes
from edge_server.plugins.ros.transports.dds_transport import (
    COMPARE_NAMES_OF_FAST_DDS,
    LOOPBACK_ONLY,
    network_configuration,
)


def test_without_variables_discovery_uses_the_default_interface() -> None:
    assert network_configuration({}) == (COMPARE_NAMES_OF_FAST_DDS, "the default network interface")
    assert network_configuration({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"}) == network_configuration({})


@pytest.mark.parametrize(
    "environment",
    [
        {"ROS_LOCALHOST_ONLY": "1"},
        {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"},
        {"ROS_LOCALHOST_ONLY": "1", "ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"},
    ],
)
def test_discovery_can_be_limited_to_this_machine(environment: dict[str, str]) -> None:
    configuration, reach = network_configuration(environment)
    assert configuration == f"{COMPARE_NAMES_OF_FAST_DDS},{LOOPBACK_ONLY}"
    assert reach.startswith("this machine only")


@pytest.mark.parametrize(("given", "multicast"), [("SUBNET", "default"), ("LOCALHOST", "false")])
def test_static_peers_are_used_too(given: str, multicast: str) -> None:
    configuration, reach = network_configuration(
        {"ROS_AUTOMATIC_DISCOVERY_RANGE": given, "ROS_STATIC_PEERS": "192.168.1.5; robot.local;"}
    )
    assert "<Peer address='192.168.1.5'/><Peer address='robot.local'/>" in configuration
    assert f"<AllowMulticast>{multicast}</AllowMulticast>" in configuration
    assert "192.168.1.5, robot.local" in reach


def test_a_users_configuration_comes_last_and_overrides() -> None:
    own = "file:///etc/cyclone.xml"
    environment = {"CYCLONEDDS_URI": own, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST", "ROS_STATIC_PEERS": "x"}
    assert network_configuration(environment)[0] == f"{COMPARE_NAMES_OF_FAST_DDS},{own}"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "OFF"}, "got 'OFF': no node would be found"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "local"}, "expected SUBNET, LOCALHOST, SYSTEM_DEFAULT, got 'local'"),
        ({"ROS_STATIC_PEERS": "a;<b>"}, "ROS_STATIC_PEERS: expected addresses with ';' between them, got '<b>'"),
    ],
)
def test_invalid_variables_are_named(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        network_configuration(environment)


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
