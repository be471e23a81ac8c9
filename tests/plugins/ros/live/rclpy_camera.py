"""Camera and listener on a real ROS 2: rclpy from PyPI, run by the Python of fetch_rclpy.sh, without this package.

usage: rclpy_camera.py JSON, an object with

- image_topic, image_qos ("SENSOR_DATA" or "DEFAULT"), width, height, period_s: what it publishes, bgr8. Without
  image_topic it only listens. The first byte of a picture is its number, modulo 200.
- answers: {topic: [type, qos]}, what it subscribes to; qos may also be "TRANSIENT_LOCAL".
- count: it ends once that many messages have come on each of these topics; 0: after limit_s.
- limit_s: seconds after which it ends in any case, 60 unless given.
- settles: it sends nothing until a second after its pictures have a subscriber and each answer a publisher, prints an
  empty line then, and listens for another half second after the last picture.

Prints a JSON object: sent, the number of pictures; answers, by topic a list of [number of the picture or -1, age in ms
from its stamp, frame_id, content]. Exit code 1 when `count` has not come in time.
"""

from __future__ import annotations

import array
import json
import sys
import time
from typing import Any

import rclpy
import sensor_msgs.msg
import vision_msgs.msg
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy


def make_qos(name: str, depth: int) -> QoSProfile:
    is_best_effort, is_kept = name == "SENSOR_DATA", name == "TRANSIENT_LOCAL"
    return QoSProfile(
        depth=depth,
        reliability=ReliabilityPolicy.BEST_EFFORT if is_best_effort else ReliabilityPolicy.RELIABLE,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if is_kept else DurabilityPolicy.VOLATILE,
    )


def content_of(message: Any) -> Any:
    if isinstance(message, vision_msgs.msg.Detection2DArray):
        return [
            [
                box.results[0].hypothesis.class_id, box.results[0].hypothesis.score, box.bbox.center.position.x,
                box.bbox.center.position.y, box.bbox.size_x, box.bbox.size_y,
            ]
            for box in message.detections
        ]  # fmt: skip
    if isinstance(message, vision_msgs.msg.Classification):
        return [[one.class_id, one.score] for one in message.results]
    if isinstance(message, sensor_msgs.msg.CompressedImage):
        return [message.format, len(message.data)]
    return [getattr(message, "encoding", ""), message.height, message.width]


def main(spec: dict[str, Any]) -> int:
    rclpy.init()
    node = rclpy.create_node("camera")
    numbers: dict[int, int] = {}
    answers: dict[str, list[Any]] = {topic: [] for topic in spec["answers"]}

    def subscribe(topic: str, type_name: str, qos: str) -> None:
        def take(message: Any) -> None:
            stamp_ns = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
            age_ms = (time.time_ns() - stamp_ns) / 1e6
            answers[topic].append([numbers.get(stamp_ns, -1), age_ms, message.header.frame_id, content_of(message)])

        kind = getattr(sensor_msgs.msg, type_name, None) or getattr(vision_msgs.msg, type_name)
        node.create_subscription(kind, topic, take, make_qos(qos, 10))

    for topic, (type_name, qos) in spec["answers"].items():
        subscribe(topic, type_name, qos)
    publisher = None
    if spec.get("image_topic"):
        publisher = node.create_publisher(sensor_msgs.msg.Image, spec["image_topic"], make_qos(spec["image_qos"], 5))
        picture = sensor_msgs.msg.Image()
        picture.header.frame_id = "camera_optical"
        picture.height, picture.width, picture.encoding = spec["height"], spec["width"], "bgr8"
        picture.step = 3 * picture.width
        picture.data = array.array("B", bytes(picture.step * picture.height))

    def is_done() -> bool:
        return spec["count"] > 0 and all(len(found) >= spec["count"] for found in answers.values())

    def is_matched() -> bool:
        has_publishers = all(node.count_publishers(topic) for topic in answers)
        return has_publishers and (publisher is None or publisher.get_subscription_count() > 0)

    def listen(seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            rclpy.spin_once(node, timeout_sec=left_s)

    if spec.get("settles"):
        until_s = time.monotonic() + 30.0
        while not is_matched() and time.monotonic() < until_s:
            listen(0.05)
        # The other side sees this node's topics a little later.
        listen(1.0)
        print(flush=True)
    period_s = spec.get("period_s", 0.1)
    next_s = time.monotonic()
    end_s = next_s + spec.get("limit_s", 60.0)
    while not is_done() and next_s < end_s:
        if publisher is not None:
            stamp_ns = time.time_ns()
            numbers[stamp_ns] = len(numbers) + 1
            picture.data[0] = numbers[stamp_ns] % 200
            picture.header.stamp.sec, picture.header.stamp.nanosec = divmod(stamp_ns, 10**9)
            publisher.publish(picture)
        next_s += period_s
        while (left_s := next_s - time.monotonic()) > 0 and not is_done():
            rclpy.spin_once(node, timeout_sec=left_s)
    if spec.get("settles"):
        listen(0.5)
    print(json.dumps({"sent": len(numbers), "answers": answers}), flush=True)
    rclpy.shutdown()
    return 0 if spec["count"] == 0 or is_done() else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
