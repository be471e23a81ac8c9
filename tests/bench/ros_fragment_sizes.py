"""Images of 1920x1080 over DDS by the size of their fragments: on one machine, and between two of MTU 1500 that lose
packets or not.

usage: python tests/bench/ros_fragment_sizes.py in|out PYTHON [NETWORK ...], PYTHON that of an environment that
fetch_rclpy.sh made.
`in`: a camera with rclpy (Fast DDS), whose profile sets `maxMessageSize`, sends to the transport dds. `out`: the
transport dds, whose CYCLONEDDS_URI sets FragmentSize and MaxMessageSize, sends to a node with rclpy. Prints a row for
each case: images that came of those sent, and their median age. Two and a half minutes. The machines are network
namespaces with a cable (veth) between them; it needs unshare, ip, nft and the permission to use them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ros_receive_buffers import NODE, SECONDS

from edge_server.plugins.ros.messages.message_conversion import ImageMessage, MessageKind
from edge_server.plugins.ros.transports.dds_transport import DdsTransport, open_transport
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import FrameHeader

WIDTH, HEIGHT, RATE = 1920, 1080, 10
SIZES = (1344, 8192, 16384, 61440)
"""Bytes of a fragment; 1344 is the default of Cyclone DDS, which puts ten into one packet, split for the network."""
NETWORKS = ("one machine", "cable", "cable, 0.1 % lost")

NODE_LIMIT_S = 20.0
"""To find the node with rclpy, and for its end: where packets are lost, either was seen to take for ever."""

TWO_MACHINES = """
set -e
ip link set lo up
unshare -n sleep 600 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add cable0 type veth peer name cable1 netns $other
ip addr add 10.9.0.1/24 dev cable0; ip link set cable0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.9.0.2/24 dev cable1; ip link set cable1 up'
until ip link show cable0 | grep -q LOWER_UP; do sleep 0.1; done
OTHER=$other "$@"
"""
LOSS = """table netdev loss {{
chain cable {{ type filter hook ingress device {} priority 0; numgen random mod 1000 < 1 drop; }}
}}"""
"""For nft, which drops packets as they come from the cable; netem of tc is not in every kernel."""

PROFILE = """<profiles xmlns="http://www.eprosima.com"><transport_descriptors><transport_descriptor>
<transport_id>udp</transport_id><type>UDPv4</type><maxMessageSize>{}</maxMessageSize>
<sendBufferSize>4194304</sendBufferSize><receiveBufferSize>4194304</receiveBufferSize>
</transport_descriptor></transport_descriptors>
<participant profile_name="node" is_default_profile="true"><rtps><userTransports><transport_id>udp</transport_id>
</userTransports><useBuiltinTransports>false</useBuiltinTransports></rtps></participant></profiles>"""
"""Fast DDS's own configuration, without its shared memory."""


def open_dds(size: int | None, environment: dict[str, str]) -> DdsTransport:
    uri = ""
    if size is not None:
        message_size = max(size + 160, 14720)
        uri = f"<General><FragmentSize>{size}B</FragmentSize><MaxMessageSize>{message_size}B</MaxMessageSize></General>"
    return open_transport("bench", {**environment, "CYCLONEDDS_URI": uri})


def receive(node: list[str], variables: dict[str, str], qos: str, environment: dict[str, str]) -> list[float]:
    """Return the ages in milliseconds of the images that came from a camera with rclpy."""
    transport = open_dds(None, environment)
    ages_ms: list[float] = []

    def take(image: Any) -> None:
        ages_ms.append((time.time_ns() - image.header.stamp.sec * 10**9 - image.header.stamp.nanosec) / 1e6)

    transport.subscribe("/images", MessageKind.IMAGE, Qos(qos, 10), take)
    with subprocess.Popen([*node, "0"], env={**environment, **variables}) as camera:
        while camera.poll() is None:
            transport.spin(0.05)
    transport.close()
    return ages_ms


def send(node: list[str], variables: dict[str, str], qos: str, size: int, environment: dict[str, str]) -> list[float]:
    """Return the ages in milliseconds of the images that came to a node with rclpy."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    transport = open_dds(size, environment)
    transport.advertise("/images", MessageKind.IMAGE, Qos(qos, 10))
    data = bytes(3 * WIDTH * HEIGHT)
    with subprocess.Popen([*node, "1"], env={**environment, **variables}, **pipes) as listener:
        writer, until_s = transport._writers["/images"][1], time.monotonic() + NODE_LIMIT_S
        while not writer.get_matched_subscriptions() and time.monotonic() < until_s:
            time.sleep(0.05)
        if not writer.get_matched_subscriptions():
            print("the node with rclpy is not found:", end=" ")
        del writer  # it must be closed before the transport
        time.sleep(1)  # the other side sees this one a little later
        next_s = time.monotonic()
        for _ in range(SECONDS * RATE):
            header = FrameHeader(*divmod(time.time_ns(), 10**9), "camera")
            transport.publish("/images", ImageMessage(header, HEIGHT, WIDTH, "bgr8", 3 * WIDTH, data))
            next_s += 1 / RATE
            time.sleep(max(0.0, next_s - time.monotonic()))
        time.sleep(1)
        try:
            answer = listener.communicate("\n", timeout=NODE_LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            listener.kill()
            print("the node with rclpy hangs:", end=" ")
            answer = ""
    transport.close()
    return [float(age) for age in answer.split()]


def measure(direction: str, python: str, networks: Sequence[str], profile: Path) -> None:
    other = ["nsenter", "-t", os.environ["OTHER"], "-n"]
    for network in networks:
        has_cable = network.startswith("cable")
        if "lost" in network:
            for machine, device in (([], "cable0"), (other, "cable1")):
                subprocess.run([*machine, "nft", "-f", "-"], input=LOSS.format(device), text=True, check=True)
        reach = "SUBNET" if has_cable else "LOCALHOST"
        environment = {**os.environ, "ROS_DOMAIN_ID": "83", "ROS_AUTOMATIC_DISCOVERY_RANGE": reach}
        for qos in ("SENSOR_DATA", "DEFAULT"):
            command = [python, "-c", NODE, *map(str, (WIDTH, HEIGHT, RATE, int(qos == "DEFAULT")))]
            node = [*other, *command] if has_cable else command
            for size in SIZES:
                profile.write_text(PROFILE.format(size if direction == "in" else 65500))
                files = dict.fromkeys(("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE"), str(profile))
                if direction == "in":
                    ages_ms = sorted(receive(node, files, qos, environment))
                else:
                    ages_ms = sorted(send(node, files, qos, size, environment))
                age = f"{ages_ms[len(ages_ms) // 2]:.0f} ms" if ages_ms else "-"
                print(f"{network:18} {qos:12} {size:6} B: {len(ages_ms)} of {SECONDS * RATE}; {age}", flush=True)


def main(direction: str, python: str, *networks: str) -> None:
    if "OTHER" not in os.environ:
        again = [sys.executable, *sys.argv]
        sys.exit(subprocess.run(["unshare", "-rn", "bash", "-c", TWO_MACHINES, "bash", *again], check=False).returncode)
    with tempfile.TemporaryDirectory() as home:
        measure(direction, python, networks or NETWORKS, Path(home) / "profile.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])
