"""Recorder and reader of messages on a real ROS 2, run by the Python of fetch_rclpy.sh, without this package.

usage: rclpy_recorder.py record TOPIC COUNT FOLDER: writes the bytes of COUNT sensor_msgs/Image messages, as rclpy
receives them, to FOLDER/0000.cdr and so on. Exit code 1 when they do not come within a minute.
usage: rclpy_recorder.py read FOLDER: prints a JSON list of [stamp in ns, content] of the vision_msgs/Detection2DArray
messages in such files, as rclpy decodes them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rclpy
from rclpy.qos import qos_profile_sensor_data
from rclpy.serialization import deserialize_message
from rclpy_camera import content_of
from sensor_msgs.msg import Image
from vision_msgs.msg import Detection2DArray

LIMIT_S = 60.0


def record(topic: str, count: int, folder: Path) -> int:
    rclpy.init()
    node = rclpy.create_node("recorder")
    received: list[bytes] = []
    node.create_subscription(Image, topic, received.append, qos_profile_sensor_data, raw=True)
    end_s = time.monotonic() + LIMIT_S
    while len(received) < count and time.monotonic() < end_s:
        rclpy.spin_once(node, timeout_sec=0.1)
    for number, data in enumerate(received):
        (folder / f"{number:04}.cdr").write_bytes(data)
    rclpy.shutdown()
    return 0 if len(received) >= count else 1


def read(folder: Path) -> int:
    found = []
    for path in sorted(folder.glob("*.cdr")):
        message = deserialize_message(path.read_bytes(), Detection2DArray)
        found.append([message.header.stamp.sec * 10**9 + message.header.stamp.nanosec, content_of(message)])
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "record":
        sys.exit(record(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
    sys.exit(read(Path(sys.argv[2])))
