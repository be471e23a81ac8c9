"""The Zenoh bridge beside zenoh-ros2-sdk, which writes rmw_zenoh's keys, tokens, hashes and attachments by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CAMERA = Path(__file__).parent / "zenoh_sdk_camera.py"
COUNT = 5

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.skipif("EDGE_TEST_ZENOH_SDK" not in os.environ, reason="needs tests/plugins/ros/fetch_zenoh_sdk.sh"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("zenoh", "rosbags", "xxhash")),
        reason="needs eclipse-zenoh, rosbags and xxhash: pip install '.[zenoh]'",
    ),
]


def test_a_camera_of_the_sdk_gets_annotated_images_and_sees_the_bridge(
    scripted: Callable[..., Any], zenoh: Any, zenoh_router: Any, tmp_path: Path
) -> None:
    server = scripted()
    port = zenoh_router.address.rpartition(":")[2]
    with zenoh.bridging(server.address, tmp_path / "log", "--annotated-topic=/drawn"):
        done = subprocess.run(
            [os.environ["EDGE_TEST_ZENOH_SDK"], CAMERA, zenoh.environment["ROS_DOMAIN_ID"], port, tmp_path, str(COUNT)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["topics"] == {"/camera/image_raw": [1, 1], "/drawn": [1, 1]}
    assert found["stamps"] == sorted(set(found["stamps"]))
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, frame.header.nanosec) == (48, 64, "rgb8", 7)
    assert bytes(frame.data) == bytes([frame.header.sec % 256]) * (48 * 64 * 3)
    assert "WARN" not in (tmp_path / "log").read_text()
