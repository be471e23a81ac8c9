"""Depth camera on a real ROS 2: rclpy from PyPI, run by the Python of fetch_rclpy.sh, without this package.

usage: rclpy_depth_camera.py NAMESPACE POSITIONS_TOPIC COUNT. Publishes NAMESPACE/color/image_raw (640 x 480, bgr8),
NAMESPACE/depth (320 x 240, 32FC1: 1.25 m on the left, NaN in the middle, 2.5 m on the right; 5 ms older than the
picture) and NAMESPACE/color/camera_info, reliable, with a lens of the model rational_polynomial, until COUNT
Detection3DArray messages have come. Prints each as JSON: [stamp in ns, frame_id, [[class_id, position, size], ...]].
Exit code 1 when they do not come within a minute.
"""

from __future__ import annotations

import array
import json
import math
import sys
import time

import rclpy
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CameraInfo, Image
from vision_msgs.msg import Detection3DArray

LIMIT_S = 60.0


def make_image(width: int, height: int, encoding: str, pixel: int, data: bytes) -> Image:
    made = Image(width=width, height=height, encoding=encoding, step=width * pixel)
    made.header.frame_id = "camera_optical"
    made.data = array.array("B", data)
    return made


def make_camera_info() -> CameraInfo:
    made = CameraInfo(width=640, height=480, distortion_model="rational_polynomial")
    made.d = [0.1, -0.05, 0.001, -0.001, 0.0, 0.0, 0.0, 0.0]
    made.k = [500.0, 0.0, 319.5, 0.0, 500.0, 239.5, 0.0, 0.0, 1.0]
    return made


def main(namespace: str, positions_topic: str, count: int) -> int:
    rclpy.init()
    node = rclpy.create_node("depth_camera")
    found: list[Detection3DArray] = []
    node.create_subscription(Detection3DArray, positions_topic, found.append, 10)
    colour = make_image(640, 480, "bgr8", 3, bytes(640 * 480 * 3))
    row = array.array("f", [1.25] * 150 + [math.nan] * 20 + [2.5] * 150).tobytes()
    depth = make_image(320, 240, "32FC1", 4, row * 240)
    publishers = [
        (node.create_publisher(Image, f"{namespace}/color/image_raw", qos_profile_sensor_data), colour, 0),
        (node.create_publisher(CameraInfo, f"{namespace}/color/camera_info", 10), make_camera_info(), 0),
        (node.create_publisher(Image, f"{namespace}/depth", qos_profile_sensor_data), depth, -5_000_000),
    ]
    end_s = time.monotonic() + LIMIT_S
    number = 0
    while len(found) < count and time.monotonic() < end_s:
        number += 1
        colour.data[0] = number % 200
        stamp_ns = time.time_ns()
        for publisher, message, offset_ns in publishers:
            message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp_ns + offset_ns, 10**9)
            publisher.publish(message)
        next_s = time.monotonic() + 0.1
        while (left_s := next_s - time.monotonic()) > 0:
            rclpy.spin_once(node, timeout_sec=left_s)
    for message in found[:count]:
        boxes = []
        for one in message.detections:
            position, size = one.bbox.center.position, one.bbox.size
            assert one.results[0].pose.pose == one.bbox.center
            class_id = one.results[0].hypothesis.class_id
            boxes.append([class_id, [position.x, position.y, position.z], [size.x, size.y, size.z]])
        stamp = message.header.stamp
        print(json.dumps([stamp.sec * 10**9 + stamp.nanosec, message.header.frame_id, boxes]))
    rclpy.shutdown()
    return 0 if len(found) >= count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
