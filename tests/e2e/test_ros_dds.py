"""Real ROS 2 over DDS: a camera with its own codec, the bridge, and the server, each in its own process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

COMMAND = Path(sys.executable).parent / "edge-server"
CAMERA = Path(__file__).parents[1] / "plugins" / "ros" / "dds_camera.py"
DETECTOR = "face_detection_yunet"
FACE = (112, 58)
"""A point between the eyes of the astronaut at half its size, x and y."""
LIMIT_S = 90.0
COUNT = 8


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")),
        reason="needs cyclonedds and rosbags: pip install '.[ros]'",
    ),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], bundled_repository: Path) -> Iterator[Any]:
    with serve(
        bundled_repository, "--model-control-mode=explicit", f"--load-model={DETECTOR}"
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def environment(ros_domain: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **ros_domain}


def seen_by_camera(environment: dict[str, str], picture: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(CAMERA), environment["ROS_DOMAIN_ID"], "/camera/image_raw", "/detections", str(COUNT),
         str(picture)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_two_dds_processes_with_ros_topic_names_send_frames_and_get_detections(
    server: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    np.save(tmp_path / "astronaut.npy", pictures.astronaut()[::2, ::2])
    with open(tmp_path / "bridge.log", "wb") as log:
        bridge = subprocess.Popen(
            [COMMAND, "ros", "bridge", f"--model={DETECTOR}", f"--address={server.grpc}",
             "--image-topic=/camera/image_raw", "--detections-topic=/detections", "--stream-id=front"],
            env=environment, stderr=log,
        )  # fmt: skip
    try:
        found = seen_by_camera(environment, tmp_path / "astronaut.npy")
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(30) == 0, (tmp_path / "bridge.log").read_text()
    finally:
        bridge.kill()
        bridge.wait()
    assert len(found) == COUNT
    for message in found:
        number = message["header"]["stamp"]["sec"]
        assert message["header"] == {"stamp": {"sec": number, "nanosec": 500 + number}, "frame_id": "camera_optical"}
        (face,) = message["detections"]
        center, box = face["bbox"]["center"]["position"], face["bbox"]
        assert abs(center["x"] - FACE[0]) < box["size_x"] / 2 < 40
        assert abs(center["y"] - FACE[1]) < box["size_y"] / 2 < 50
        assert face["results"][0]["hypothesis"]["class_id"] == "face"
        assert face["results"][0]["hypothesis"]["score"] > 0.6
    assert "face_detection_yunet version 1 on " in (tmp_path / "bridge.log").read_text()
