"""Variables of ROS 2: domain, discovery range, static peers and middleware, as ROS 2's own library reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.transports.ros2_environment import (
    DiscoverySettings,
    choose_transport,
    read_discovery_settings,
)

DOMAIN, RANGE, PEERS, LOCAL = (
    f"ROS_{name}" for name in ("DOMAIN_ID", "AUTOMATIC_DISCOVERY_RANGE", "STATIC_PEERS", "LOCALHOST_ONLY")
)
READ: list[tuple[dict[str, str], DiscoverySettings]] = [
    ({}, DiscoverySettings(0, "SUBNET")),
    ({DOMAIN: ""}, DiscoverySettings(0, "SUBNET")),
    ({DOMAIN: "0"}, DiscoverySettings(0, "SUBNET")),
    ({DOMAIN: "42"}, DiscoverySettings(42, "SUBNET")),
    ({DOMAIN: "0x10"}, DiscoverySettings(16, "SUBNET")),
    ({DOMAIN: "010"}, DiscoverySettings(8, "SUBNET")),
    ({DOMAIN: "0189"}, DiscoverySettings(1, "SUBNET")),
    ({DOMAIN: " +7 "}, DiscoverySettings(7, "SUBNET")),
    ({DOMAIN: "5th"}, DiscoverySettings(5, "SUBNET")),
    ({RANGE: "LOCALHOST", PEERS: ""}, DiscoverySettings(0, "LOCALHOST")),
    ({RANGE: "localhost"}, DiscoverySettings(0, "LOCALHOST")),
    ({RANGE: "subnet", PEERS: "a"}, DiscoverySettings(0, "LOCALHOST", ("a",))),
    ({LOCAL: "1", RANGE: "SUBNET", PEERS: "a"}, DiscoverySettings(0, "LOCALHOST")),
    ({LOCAL: "1 ", PEERS: "a"}, DiscoverySettings(0, "LOCALHOST")),
    ({LOCAL: "true"}, DiscoverySettings(0, "SUBNET")),
    ({LOCAL: "1", RANGE: "OFF"}, DiscoverySettings(0, "LOCALHOST")),
    ({LOCAL: "0", PEERS: ";10.0.0.5;;robot.local;"}, DiscoverySettings(0, "SUBNET", ("10.0.0.5", "robot.local"))),
    ({PEERS: ";".join(f"h{n}" for n in range(40))}, DiscoverySettings(0, "SUBNET", tuple(f"h{n}" for n in range(40)))),
    ({PEERS: "x" * 255}, DiscoverySettings(0, "SUBNET", ("x" * 255,))),
    ({PEERS: f"{'x' * 256};y"}, DiscoverySettings(0, "SUBNET", ("y",))),
]
"""Environment -> what ROS 2 reads in it."""

REFUSED = [{DOMAIN: value} for value in ("abc", "09", "0x", "0 ", "0abc", "9" * 25)]
"""Environments with which no node of ROS 2 starts."""

RCLPY = """
import json, os, sys
import rclpy
from rclpy.context import Context
arguments = ["--ros-args", "--log-level", "rcl:=debug"]
rclpy.init(args=arguments, context=Context())  # the level holds from the next one on
for index, environment in enumerate(json.loads(sys.argv[1])):
    for name in [name for name in os.environ if name.startswith("ROS_")]:
        del os.environ[name]
    os.environ.update(environment)
    sys.stderr.write(f"== {index}\\n")
    context = Context()
    try:
        rclpy.init(args=arguments, context=context)
    except Exception as error:
        sys.stderr.write(f"refused: {error}\\n")
        continue
    sys.stderr.write(f"domain {context.get_domain_id()}\\n")
    rclpy.shutdown(context=context)
"""


@pytest.mark.parametrize(("environment", "expected"), READ)
def test_the_variables_are_read(environment: dict[str, str], expected: DiscoverySettings) -> None:
    assert read_discovery_settings(environment) == expected


@pytest.mark.parametrize("environment", [*REFUSED, {DOMAIN: "-1"}, {DOMAIN: "233"}, {RANGE: "OFF"}])
def test_invalid_variables_are_named_with_their_value(environment: dict[str, str]) -> None:
    (name, value), *_ = environment.items()
    with pytest.raises(InvalidRequest, match=f"{name}: .*got '?{value}"):
        read_discovery_settings(environment)


def test_with_system_default_static_peers_are_logged_as_unused(caplog: pytest.LogCaptureFixture) -> None:
    given = {RANGE: "SYSTEM_DEFAULT", PEERS: "a"}
    assert read_discovery_settings(given) == DiscoverySettings(0, "SYSTEM_DEFAULT")
    assert caplog.messages == ["ROS_STATIC_PEERS is not used: ROS_AUTOMATIC_DISCOVERY_RANGE is SYSTEM_DEFAULT"]


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh")
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_ros2_itself_reads_them_the_same(distribution: str) -> None:
    # Kilted does not read ROS_LOCALHOST_ONLY any more.
    read = [one for one in READ if LOCAL not in one[0] or distribution == "jazzy"]
    environments = [environment for environment, _ in read] + REFUSED
    done = subprocess.run(
        [str(Path(os.environ["EDGE_TEST_RCLPY"]) / distribution / "bin/python"), "-c", RCLPY, json.dumps(environments)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    texts = re.split(r"^== \d+\n", done.stderr, flags=re.MULTILINE)[1:]
    for text, (environment, expected) in zip(texts[: len(read)], read, strict=True):
        assert re.search(rf"^domain {expected.domain_id}$", text, re.MULTILINE), environment
        assert f"RMW_AUTOMATIC_DISCOVERY_RANGE_{expected.discovery_range} " in text, environment
        # rcl keeps an empty place for a peer that is too long.
        assert tuple(peer for peer in re.findall(r"\[rcl\]: \t(.*)", text) if peer) == expected.static_peers, (
            environment
        )
    assert all("refused: " in text for text in texts[len(read) :])
    assert len(texts) == len(environments)


@pytest.mark.parametrize(
    ("requested", "rmw", "chosen", "message"),
    [
        ("", "", "dds", ""),
        ("", "rmw_cyclonedds_cpp", "dds", ""),
        ("", "rmw_fastrtps_cpp", "dds", ""),
        ("dds", "rmw_fastrtps_cpp", "dds", ""),
        ("dds", "rmw_zenoh_cpp", "dds", "nodes of that middleware are not seen, expected --transport=zenoh"),
        ("", "rmw_zenoh_cpp", "zenoh", ""),
        ("zenoh", "rmw_fastrtps_cpp", "zenoh", "nodes of that middleware are not seen, expected --transport=dds"),
        ("", "rmw_own", "dds", "expected one of rmw_cyclonedds_cpp, "),
        ("rclpy", "rmw_own", "rclpy", ""),
    ],
)
def test_the_transport_fits_the_middleware(
    caplog: pytest.LogCaptureFixture, requested: str, rmw: str, chosen: str, message: str
) -> None:
    assert choose_transport(requested, {"RMW_IMPLEMENTATION": rmw}) == chosen
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)
