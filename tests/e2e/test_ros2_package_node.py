"""The node of the ROS 2 package with the real server, on a fake rclpy: no ROS 2 here, so rclpy itself was not run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

pytest.importorskip("skimage", reason="needs scikit-image, of the extra test-all")

PROGRAM = Path(__file__).parents[1] / "plugins" / "ros" / "node_with_camera.py"
DETECTOR = "face_detection_yunet"
FACE = (224, 116)
"""A point between the eyes of the astronaut, x and y."""


def run_node(**parameters: Any) -> subprocess.CompletedProcess[str]:
    # In a process of its own, because the node sets signal handlers, and ends at SIGTERM.
    command = [sys.executable, str(PROGRAM), json.dumps(parameters)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_camera_topic_gets_detections_until_the_node_is_stopped(
    serve: Any, repository: Any, bundled_repository: Path
) -> None:
    shutil.copytree(bundled_repository / DETECTOR, repository.path / DETECTOR)
    with serve(repository.path) as server:
        done = run_node(server_address=server.grpc, model_name=DETECTOR)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["nodes_left"] == 0
    assert len(said["published"]) == 3
    for message in said["published"]:
        assert (message["stamp"], message["frame_id"]) == ([12, 34], "camera_optical")
        box = message["boxes"][0]
        assert abs(box["x"] - FACE[0]) < box["width"] / 2 < 100
        assert abs(box["y"] - FACE[1]) < box["height"] / 2 < 100
        assert box["class"] == "face"
    # What Python logs, ROS logs.
    assert any(level == "info" and f"{DETECTOR} version 1" in text for level, text in said["log"])


def test_an_invalid_parameter_is_reported_in_the_log_of_ros() -> None:
    done = run_node(detections_topic="")
    assert done.returncode == 1, done.stderr
    level, text = json.loads(done.stdout)["log"][-1]
    assert level == "fatal"
    assert "at least one topic" in text
