"""Camera and listener on a real ROS 2: rclpy from PyPI, run by the Python of fetch_rclpy.sh, without this package.

usage: rclpy_camera.py IMAGE_TOPIC ANSWER_TOPIC COUNT. Publishes pictures of 640 x 480 until COUNT answers, of type
CompressedImage, have come back, and prints the stamp of each. Exit code 1 when they do not come within a minute.
"""

from __future__ import annotations

import sys
import time

import rclpy
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs import msg

LIMIT_S = 60.0


def main(image_topic: str, answer_topic: str, count: int) -> int:
    rclpy.init()
    node = rclpy.create_node("camera")
    answers: set[int] = set()
    node.create_subscription(msg.CompressedImage, answer_topic, lambda one: answers.add(one.header.stamp.sec), 10)
    publisher = node.create_publisher(msg.Image, image_topic, qos_profile_sensor_data)
    picture = msg.Image()
    picture.header.frame_id = "camera_optical"
    picture.height, picture.width, picture.step, picture.encoding = 480, 640, 640 * 3, "bgr8"
    picture.data = bytes(480 * 640 * 3)
    end_s, number = time.monotonic() + LIMIT_S, 0
    while len(answers) < count and time.monotonic() < end_s:
        number += 1
        picture.header.stamp.sec = number
        publisher.publish(picture)
        next_s = time.monotonic() + 0.1
        while (left_s := next_s - time.monotonic()) > 0:
            rclpy.spin_once(node, timeout_sec=left_s)
    print(*sorted(answers), flush=True)
    rclpy.shutdown()
    return 0 if len(answers) >= count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
