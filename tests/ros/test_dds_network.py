"""Networks of the DDS transport: the variables of ROS 2 and Cyclone DDS become one configuration."""

from __future__ import annotations

import pytest

from edge_server.errors import InvalidRequest
from edge_server.ros.dds_transport import COMPARE_NAMES_OF_FAST_DDS, LOOPBACK_ONLY, network_configuration


def test_without_variables_nodes_are_looked_for_on_the_default_interface() -> None:
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
def test_this_machine_alone(environment: dict[str, str]) -> None:
    configuration, reach = network_configuration(environment)
    assert configuration == f"{COMPARE_NAMES_OF_FAST_DDS},{LOOPBACK_ONLY}"
    assert reach.startswith("this machine only")


@pytest.mark.parametrize(("given", "multicast"), [("SUBNET", "default"), ("LOCALHOST", "false")])
def test_static_peers_are_asked_too(given: str, multicast: str) -> None:
    configuration, reach = network_configuration(
        {"ROS_AUTOMATIC_DISCOVERY_RANGE": given, "ROS_STATIC_PEERS": "192.168.1.5; robot.local;"}
    )
    assert "<Peer address='192.168.1.5'/><Peer address='robot.local'/>" in configuration
    assert f"<AllowMulticast>{multicast}</AllowMulticast>" in configuration
    assert "192.168.1.5, robot.local" in reach


def test_a_users_configuration_comes_last_so_that_it_decides() -> None:
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
def test_wrong_variables_are_named(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        network_configuration(environment)
