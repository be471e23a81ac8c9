"""ROS 2 over DDS and Zenoh: a camera with its own codec, the bridge, and the server, each in its own process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.models import BUNDLED
from tests.kit.server import COMMAND, serve

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

CAMERAS = Path(__file__).parents[1] / "plugins" / "ros"
DETECTOR = "face_detection_yunet"
FACE = (112, 58)
"""A point between the eyes of the astronaut at half its size, x and y."""
LIMIT_S = 90.0
COUNT = 8
FOCAL_LENGTH = 240.0
"""Of the depth camera, in pixels; its centre is that of the picture."""


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")),
        reason="needs cyclonedds and rosbags: pip install '.[ros]'",
    ),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serve(
        BUNDLED, "--model-control-mode=explicit", f"--load-model={DETECTOR}"
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def environment(ros_domain: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **ros_domain}


def seen_by_camera(environment: dict[str, str], camera: str, *arguments: object) -> list[dict[str, Any]]:
    """Run one of the cameras; return the messages that came back to it."""
    words = [sys.executable, CAMERAS / camera, environment["ROS_DOMAIN_ID"], *arguments]
    done = subprocess.run(
        list(map(str, words)), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def bridging(server: Any, environment: dict[str, str], log: Path, *flags: str) -> Iterator[None]:
    """Run `edge-server ros bridge` meanwhile; end it by SIGTERM and expect exit code 0."""
    with open(log, "wb") as file:
        bridge = subprocess.Popen(
            [COMMAND, "ros", "bridge", f"--model={DETECTOR}", f"--address={server.grpc}",
             "--image-topic=/camera/image_raw", *flags],
            env=environment, stderr=file,
        )  # fmt: skip
    try:
        yield
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(30) == 0, log.read_text()
    finally:
        bridge.kill()
        bridge.wait()


@pytest.mark.parametrize("transport", ["dds", "zenoh"])
def test_two_processes_with_ros_topic_names_send_frames_and_get_detections(
    server: Any, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest, transport: str
) -> None:
    picture, log = tmp_path / "astronaut.npy", tmp_path / "log"
    np.save(picture, pictures.astronaut()[::2, ::2])
    if transport == "zenoh":
        environment.update(request.getfixturevalue("zenoh_router").environment)
    flags = (f"--transport={transport}", "--detections-topic=/detections", "--stream-id=front")
    with bridging(server, environment, log, *flags):
        found = seen_by_camera(
            environment, f"{transport}_camera.py", "/camera/image_raw", "/detections", COUNT, picture
        )
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
    assert "face_detection_yunet version 1 on " in log.read_text()


def test_a_depth_camera_gets_the_position_of_a_face(server: Any, environment: dict[str, str], tmp_path: Path) -> None:
    """The face is a disc 0.8 m before the camera, with holes, before a wall at 2.5 m."""
    picture, depth, log = tmp_path / "astronaut.npy", tmp_path / "depth.npy", tmp_path / "log"
    np.save(picture, pictures.astronaut()[::2, ::2])
    rows, columns = np.mgrid[:128, :128] * 2
    millimetres = np.where(np.hypot(columns - FACE[0], rows - FACE[1]) < 40, 800, 2500).astype(np.uint16)
    millimetres[::3, ::2] = 0
    np.save(depth, millimetres)
    with bridging(server, environment, log, "--detections3d-topic=/faces", "--depth-topic=/camera/depth"):
        found = seen_by_camera(environment, "dds_depth_camera.py", "/camera", "/faces", COUNT, picture, depth)
    assert len(found) == COUNT, log.read_text()
    for message in found:
        stamp = {"sec": message["header"]["stamp"]["sec"], "nanosec": 20_000_000}
        assert message["header"] == {"stamp": stamp, "frame_id": "camera_optical"}
        (face,) = message["detections"]
        center, size, (result,) = face["bbox"]["center"], face["bbox"]["size"], face["results"]
        x, y, z = (center["position"][axis] for axis in "xyz")
        assert (z, size["z"]) == (pytest.approx(0.8), 0)
        assert x == pytest.approx((FACE[0] - 128) / FOCAL_LENGTH * z, abs=0.02)
        assert y == pytest.approx((FACE[1] - 128) / FOCAL_LENGTH * z, abs=0.02)
        # A face is 14 to 18 cm wide; this one's distance was chosen.
        assert 0.08 < size["x"] < size["y"] < 0.3
        assert center["orientation"] == {"x": 0, "y": 0, "z": 0, "w": 1}
        assert result["pose"] == {"pose": center, "covariance": [0] * 36}
        assert (result["hypothesis"]["class_id"], face["header"]) == ("face", message["header"])
    assert "no 3D detections" not in log.read_text()
