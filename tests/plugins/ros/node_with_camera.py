"""Runs the node of the ROS 2 package on the fake rclpy, with a camera: `node_with_camera.py PARAMETERS`, JSON.

Pictures come until three messages are published; then the process gets SIGTERM, as launch sends it. It ends with the
exit code of the node, and prints what it published and logged as JSON.
"""

from __future__ import annotations

import array
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import edge_server

FAKE = Path(__file__).parent / "fake_ros2"
PACKAGE = Path(edge_server.__file__).parent / "plugins" / "ros" / "ros2_package" / "edge_server_ros"
LIMIT_S = 60.0


class Camera(threading.Thread):
    """Sends pictures to all subscriptions of all nodes."""

    def __init__(self, rclpy: Any) -> None:
        super().__init__()
        self.rclpy, self.published = rclpy, []
        self.node_has_ended = threading.Event()

    def run(self) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and len(self.published) < 3:
            if self.node_has_ended.wait(0.05):
                return
            for node in self.rclpy.nodes:
                for subscription in node.subscriptions:
                    subscription.receive(picture(subscription.msg_type))
                self.published = [message for publisher in node.publishers for message in publisher.published]
        os.kill(os.getpid(), signal.SIGTERM)


def picture(image_type: type) -> Any:
    from skimage import data

    made = image_type()
    made.header.stamp.sec, made.header.stamp.nanosec, made.header.frame_id = 12, 34, "camera_optical"
    made.height, made.width, made.step, made.encoding = 512, 512, 1536, "rgb8"
    made.data = array.array("B", data.astronaut().tobytes())
    return made


def as_json(message: Any) -> dict[str, Any]:
    stamp = message.header.stamp
    boxes = [
        {
            "x": found.bbox.center.position.x,
            "y": found.bbox.center.position.y,
            "width": found.bbox.size_x,
            "height": found.bbox.size_y,
            "class": found.results[0].hypothesis.class_id,
        }
        for found in message.detections
    ]
    return {"stamp": [stamp.sec, stamp.nanosec], "frame_id": message.header.frame_id, "boxes": boxes}


def main(parameters: dict[str, Any]) -> int:
    sys.path[:0] = [str(FAKE), str(PACKAGE)]
    import edge_server_ros.node
    import rclpy

    rclpy.parameter_overrides.update(parameters)
    made, create = [], rclpy.create_node
    rclpy.create_node = lambda name: made.append(create(name)) or made[-1]
    camera = Camera(rclpy)
    camera.start()
    code: int = edge_server_ros.node.main([])
    camera.node_has_ended.set()
    camera.join()
    said = {
        "published": [as_json(message) for message in camera.published[:3]],
        "log": made[0].logger.lines,
        "nodes_left": len(rclpy.nodes),
    }
    print(json.dumps(said))
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
