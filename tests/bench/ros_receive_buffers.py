"""Images that come over DDS from a node of rclpy, by size, rate, reliability and receive buffer.

usage: python tests/bench/ros_receive_buffers.py PYTHON, the Python of an environment that fetch_rclpy.sh made. Prints a
row for each case: images that came of those sent, and their median age. 3 s of images each, four minutes in all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.transports.dds_transport import open_transport
from edge_server.plugins.ros.transports.transport import Qos

DOMAIN = "83"
SIZES = {"786 kB": (512, 512), "6.2 MB": (1920, 1080)}
RATES = (5, 15, 30)
SECONDS = 3
CASES = [
    ("212992B", "SENSOR_DATA"), ("1MiB", "SENSOR_DATA"), ("16MiB", "SENSOR_DATA"), ("16MiB", "DEFAULT"),
    ("rclpy", "SENSOR_DATA"), ("rclpy", "DEFAULT"),
]  # fmt: skip
"""Receive buffer that the transport dds asks for, or a reader with rclpy; QoS of both sides."""

NODE = f"""
import array, select, sys, time
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
width, height, rate, is_reliable, listens = map(int, sys.argv[1:])
rclpy.init()
node = rclpy.create_node("node")
qos = QoSProfile(depth=5, reliability=ReliabilityPolicy.RELIABLE if is_reliable else ReliabilityPolicy.BEST_EFFORT)
if listens:
    ages_ms = []
    def take(image):
        ages_ms.append((time.time_ns() - image.header.stamp.sec * 10**9 - image.header.stamp.nanosec) / 1e6)
    node.create_subscription(Image, "/images", take, qos)
    while not select.select([sys.stdin], [], [], 0)[0]:
        rclpy.spin_once(node, timeout_sec=0.1)
    print(*ages_ms)
else:
    publisher = node.create_publisher(Image, "/images", qos)
    image = Image(width=width, height=height, step=3 * width, encoding="bgr8")
    image.data = array.array("B", bytes(3 * width * height))
    while not publisher.get_subscription_count():
        time.sleep(0.05)
    time.sleep(1)
    next_s = time.monotonic()
    for _ in range({SECONDS} * rate):
        image.header.stamp.sec, image.header.stamp.nanosec = divmod(time.time_ns(), 10**9)
        publisher.publish(image)
        next_s += 1 / rate
        time.sleep(max(0.0, next_s - time.monotonic()))
    time.sleep(1)
"""


def receive(python: str, buffer: str, qos: str, size: tuple[int, int], rate: int) -> list[float]:
    """Return the ages of the images that came, in milliseconds."""
    environment = {**os.environ, "ROS_DOMAIN_ID": DOMAIN, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    command = [python, "-c", NODE, *map(str, (*size, rate, int(qos == "DEFAULT")))]
    if buffer == "rclpy":
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, "1"], env=environment, **pipes) as listener:
            subprocess.run([*command, "0"], env=environment, check=True)
            return [float(age) for age in listener.communicate()[0].split()]
    own = f"<Internal><SocketReceiveBufferSize max='{buffer}'/></Internal>"
    transport = open_transport("listener", {**environment, "CYCLONEDDS_URI": own})
    ages_ms: list[float] = []

    def take(image: Any) -> None:
        ages_ms.append((time.time_ns() - image.header.stamp.sec * 10**9 - image.header.stamp.nanosec) / 1e6)

    transport.subscribe("/images", MessageKind.IMAGE, Qos(qos, 10), take)
    with subprocess.Popen([*command, "0"], env=environment) as publisher:
        while publisher.poll() is None:
            transport.spin(0.05)
    transport.close()
    return ages_ms


def main(python: str) -> None:
    for buffer, qos in CASES:
        for name, size in SIZES.items():
            for rate in RATES:
                ages_ms = sorted(receive(python, buffer, qos, size, rate))
                age = f"{ages_ms[len(ages_ms) // 2]:.1f} ms" if ages_ms else "-"
                print(f"{buffer:8} {qos:12} {name} {rate:2}/s: {len(ages_ms)} of {SECONDS * rate}, {age}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
