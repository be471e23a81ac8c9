"""The node of the ROS 2 package with the real server, on a fake rclpy: no ROS 2 here, so rclpy itself was not run."""

from __future__ import annotations

import array
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edge_server

pytestmark = pytest.mark.full

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

PACKAGE = Path(edge_server.__file__).parent / "ros" / "ros2_package" / "edge_server_ros"
FAKE = Path(__file__).parents[1] / "ros" / "fake_ros2"
DETECTOR = "face_detection_yunet"
FACE = (224, 116)
"""A point between the eyes of the astronaut, x and y."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.syspath_prepend(str(PACKAGE))
    # Until the node has handlers of its own, and after a failure of it, the camera's SIGTERM must not end pytest.
    handlers = [(number, signal.signal(number, lambda *_: None)) for number in (signal.SIGINT, signal.SIGTERM)]
    log = logging.getLogger("edge_server")
    kept, level = list(log.handlers), log.level
    import edge_server_ros.node

    yield edge_server_ros.node
    log.handlers[:], log.level = kept, level
    for number, handler in handlers:
        signal.signal(number, handler)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith((str(FAKE), str(PACKAGE))):
            del sys.modules[name]


class Camera(threading.Thread):
    """Lets pictures come to the node until something was published, then ends the process as launch does."""

    def __init__(self, rclpy: Any, limit_s: float = 30.0) -> None:
        super().__init__()
        self.rclpy, self.limit_s, self.published, self.lines = rclpy, limit_s, [], []

    def run(self) -> None:
        end = time.monotonic() + self.limit_s
        while time.monotonic() < end and len(self.published) < 3:
            time.sleep(0.05)
            for node in self.rclpy.nodes:
                self.lines = node.logger.lines
                for subscription in node.subscriptions:
                    subscription.receive(self.picture(subscription.msg_type))
                self.published = [message for publisher in node.publishers for message in publisher.published]
        os.kill(os.getpid(), signal.SIGTERM)

    def picture(self, image_type: type) -> Any:
        pixels = pictures.astronaut()
        made = image_type()
        made.header.stamp.sec, made.header.stamp.nanosec, made.header.frame_id = 12, 34, "camera_optical"
        made.height, made.width, made.step, made.encoding = 512, 512, 1536, "rgb8"
        made.data = array.array("B", np.ascontiguousarray(pixels).tobytes())
        return made


def test_a_camera_topic_becomes_detections_until_the_node_is_told_to_end(
    node: ModuleType, serve: Any, repository: Any, bundled_repository: Path
) -> None:
    import rclpy

    shutil.copytree(bundled_repository / DETECTOR, repository.path / DETECTOR)
    with serve(repository.path) as server:
        rclpy.parameter_overrides.update(server_address=server.grpc, model_name=DETECTOR)
        camera = Camera(rclpy)
        camera.start()
        try:
            code = node.main([])
        finally:
            camera.join()
    assert code == 0, camera.lines
    assert rclpy.nodes == []
    for message in camera.published[:3]:
        stamp = message.header.stamp
        assert (stamp.sec, stamp.nanosec, message.header.frame_id) == (12, 34, "camera_optical")
        box = message.detections[0].bbox
        assert abs(box.center.position.x - FACE[0]) < box.size_x / 2 < 100
        assert abs(box.center.position.y - FACE[1]) < box.size_y / 2 < 100
        assert message.detections[0].results[0].hypothesis.class_id == "face"
    # What Python logs, ROS logs.
    assert any(level == "info" and f"{DETECTOR} version 1" in text for level, text in camera.lines)


def test_a_mistake_in_the_parameters_is_told_in_the_log_of_ros(node: ModuleType) -> None:
    import rclpy

    rclpy.parameter_overrides.update(detections_topic="")
    made = []
    create = rclpy.create_node
    rclpy.create_node = lambda name: made.append(create(name)) or made[0]
    assert node.main([]) == 1
    (level, text) = made[0].logger.lines[-1]
    assert level == "fatal"
    assert "at least one topic" in text
