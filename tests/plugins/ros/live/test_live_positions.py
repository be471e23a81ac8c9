"""Positions in space with live ROS 2: a depth camera on rclpy, and the bridge with both of its transports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.protocol.frame_messages import Detection, FrameResult
from tests.plugins.ros.marks import LIVE_ROS

CAMERA = Path(__file__).parent / "rclpy_depth_camera.py"
COUNT = 8
LIMIT_S = 90.0

pytestmark = LIVE_ROS

MATRIX = np.array([[500.0, 0.0, 319.5], [0.0, 500.0, 239.5], [0.0, 0.0, 1.0]])
DISTORTION = np.array([0.1, -0.05, 0.001, -0.001, 0.0, 0.0, 0.0, 0.0])
"""Of rclpy_depth_camera.py."""


def pixel_of(position: list[float]) -> list[float]:
    """Return where OpenCV draws a point in space, counted from the corner of the image."""
    found, _ = cv2.projectPoints(np.array([[position]]), np.zeros(3), np.zeros(3), MATRIX, DISTORTION)
    x, y = found.reshape(2)
    return [x + 0.5, y + 0.5]


@pytest.mark.parametrize(("distribution", "transport"), [("kilted", "dds"), ("jazzy", "rclpy")])
def test_a_live_depth_camera_gets_positions(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = Detection(100, 100, 200, 160, 0.75, 3, "cup"), Detection(420, 300, 520, 420, 0.5, 3, "cup")
    hole = Detection(305, 200, 335, 230, 0.5, 3, "cup")
    server = scripted()
    monkeypatch.setattr(
        server, "_answer",
        lambda request, frame: FrameResult(frame.header, height=480, width=640, detections=(left, hole, right)),
    )  # fmt: skip
    flags = ("--detections3d-topic=/found", "--depth-topic=/camera/depth")
    where = {"images": ["/camera/color/image_raw"], "transport": transport, "distribution": distribution}
    with live.bridging(server.address, *flags, **where) as bridge:
        done = subprocess.run(
            [live.python_of(distribution), str(CAMERA), "/camera", "/found", str(COUNT)],
            env=live.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr + bridge.log.read_text()
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    sent = {frame.header.sec * 10**9 + frame.header.nanosec for frame in server.frames}
    assert len({stamp for stamp, _, _ in messages}) == COUNT
    for stamp, frame_id, boxes in messages:
        assert stamp in sent
        assert frame_id == "camera_optical"
        assert [class_id for class_id, _, _ in boxes] == ["cup", "cup"]
        (_, near, near_size), (_, far, far_size) = boxes
        assert (near[2], far[2]) == (1.25, 2.5)
        assert (*pixel_of(near), *pixel_of(far)) == pytest.approx((150, 130, 470, 360), abs=1e-4)
        # The lens changes sizes by a few per cent.
        assert near_size == pytest.approx([100 / 500 * 1.25, 60 / 500 * 1.25, 0], rel=0.05)
        assert far_size == pytest.approx([100 / 500 * 2.5, 120 / 500 * 2.5, 0], rel=0.05)
