"""Nodes of ROS 2 and the DDS transport on one machine and on two, for all discovery ranges and static peers.

The machines are network namespaces of Linux with a cable between them. Expected is what the tables of ROS 2's tutorial
"Improved Dynamic Discovery" promise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.ros.marks import LIVE_ROS

DISCOVERY_S, SILENCE_S = 90, 5
"""At most for the nodes that must find each other, and then for those that must not."""
ADDRESSES = "10.9.0.1", "10.9.0.2"
KINDS = [(name, has_peer) for name in ("LOCALHOST", "SUBNET") for has_peer in (False, True)]


def has_namespaces() -> bool:
    try:
        return subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [
    *LIVE_ROS,
    pytest.mark.skipif("not has_namespaces()", reason="needs unshare, ip, and permission to make network namespaces"),
]

TWO_MACHINES = """
set -eu
ip link set lo up
unshare -n sleep 120 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add cable0 type veth peer name cable1
ip link set cable1 netns $other
ip addr add 10.9.0.1/24 dev cable0; ip link set cable0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.9.0.2/24 dev cable1; ip link set cable1 up'
ip route add default via 10.9.0.2
nsenter -t $other -n ip route add default via 10.9.0.1
"$ROS_PYTHON" -c "$TALK" "$CASES_OF_ROS" & talker=$!
nsenter -t $other -n "$OWN_PYTHON" -c "$LISTEN" "$CASES_OF_OTHER" "$EXPECTED_OF_OTHER" > "$OUT/other" & far=$!
"$OWN_PYTHON" -c "$LISTEN" "$CASES_OF_SAME" "$EXPECTED_OF_SAME" > "$OUT/same"
wait $far
kill $talker
"""

TALK = """
import json, os, sys, time
import rclpy
from rclpy.context import Context
from sensor_msgs.msg import CompressedImage
publishers = []
for domain, environment in json.loads(sys.argv[1]):
    os.environ.pop("ROS_STATIC_PEERS", None)
    os.environ.update(environment)
    context = Context()
    rclpy.init(context=context, domain_id=domain)
    publishers.append(rclpy.create_node("talker", context=context).create_publisher(CompressedImage, "/topic", 10))
while True:
    for publisher in publishers:
        publisher.publish(CompressedImage(format="jpeg"))
    time.sleep(0.1)
"""

LISTEN = f"""
import json, sys, time
from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.transports.dds_transport import open_transport
from edge_server.plugins.ros.transports.transport import Qos
expected, heard, transports = set(json.loads(sys.argv[2])), set(), []
for domain, environment in json.loads(sys.argv[1]):
    transport = open_transport("listener", {{**environment, "ROS_DOMAIN_ID": str(domain)}})
    hear = lambda _, domain=domain: heard.add(domain)
    transport.subscribe("/topic", MessageKind.COMPRESSED_IMAGE, Qos("DEFAULT", 10), hear)
    transports.append(transport)
def spin(seconds, is_over):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not is_over():
        for transport in transports:
            transport.spin(0.01)
spin({DISCOVERY_S}, lambda: expected <= heard)
spin({SILENCE_S}, lambda: False)
print(json.dumps(sorted(heard)))
"""


def variables(discovery_range: str, has_peer: bool, peer: str) -> dict[str, str]:
    return {"ROS_AUTOMATIC_DISCOVERY_RANGE": discovery_range, **({"ROS_STATIC_PEERS": peer} if has_peer else {})}


@pytest.mark.parametrize("distribution", ["jazzy", pytest.param("kilted", marks=pytest.mark.long)])
def test_nodes_are_found_as_far_as_ros2_documents(distribution: str, tmp_path: Path) -> None:
    ros, same, other, expected = [], [], [], set()
    for domain, (talker, listener, is_same) in enumerate(
        ((talker, listener, is_same) for talker in KINDS for listener in KINDS for is_same in (True, False)), start=1
    ):
        ros.append((domain, variables(*talker, ADDRESSES[1])))
        (same if is_same else other).append((domain, variables(*listener, ADDRESSES[0])))
        is_subnet = talker[0] == listener[0] == "SUBNET"
        if is_same or talker[1] or listener[1] or is_subnet:
            expected.add(domain)
    without = {name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONEDDS_"))}
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", TWO_MACHINES], check=False, capture_output=True, text=True, timeout=120,
        env={
            **without, "TALK": TALK, "LISTEN": LISTEN, "OUT": str(tmp_path), "OWN_PYTHON": sys.executable,
            "ROS_PYTHON": str(Path(os.environ["EDGE_TEST_RCLPY"]) / distribution / "bin/python"),
            "CASES_OF_ROS": json.dumps(ros), "CASES_OF_SAME": json.dumps(same), "CASES_OF_OTHER": json.dumps(other),
            "EXPECTED_OF_SAME": json.dumps([domain for domain, _ in same if domain in expected]),
            "EXPECTED_OF_OTHER": json.dumps([domain for domain, _ in other if domain in expected]),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    heard = {*json.loads((tmp_path / "same").read_text()), *json.loads((tmp_path / "other").read_text())}
    cases = {
        domain: (ros[domain - 1][1], *(env for number, env in same + other if number == domain)) for domain, _ in ros
    }
    assert {domain: cases[domain] for domain in heard ^ expected} == {}
