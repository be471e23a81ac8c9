"""ROS 2 on an emulated aarch64 machine without ROS: server and bridge there, a camera over Zenoh on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "skimage", "zenoh")),
        reason="needs cyclonedds, scikit-image and eclipse-zenoh: pip install '.[test-all]'",
    ),
]

SOURCE = Path(__file__).parents[2]
COUNT = 3
DETECTOR = "face_detection_yunet"


@pytest.fixture(scope="module")
def server(installed: Any) -> Iterator[Any]:
    if not any(installed.root.glob("usr/local/lib/python3*/dist-packages/zenoh")):
        pytest.skip("the files of the aarch64 machine are older than the extra zenoh: make them anew")
    shutil.copytree(SOURCE / "edge_server/demo_models" / DETECTOR, installed.project / "faces" / DETECTOR)
    with installed.serve(".venv/bin/edge-server", "serve", "--model-repository=faces") as server:
        yield server


@pytest.mark.parametrize("mode", ["peer", "client"])
def test_a_camera_gets_detections_of_a_server_on_aarch64(
    installed: Any, server: Any, zenoh_router: Any, tmp_path: Path, mode: str
) -> None:
    import skimage.data

    override = f'{zenoh_router.environment["ZENOH_CONFIG_OVERRIDE"]};mode="{mode}"'
    log = tmp_path / "log"
    with open(log, "w") as file:
        bridge = installed.start(
            "env", "ROS_DOMAIN_ID=7", f"ZENOH_CONFIG_OVERRIDE={override}", ".venv/bin/edge-server", "ros", "bridge",
            "--transport=zenoh", f"--model={DETECTOR}", f"--address={server.grpc}", "--image-topic=/camera/image_raw",
            "--detections-topic=/faces",
            stderr=file,
        )  # fmt: skip
    try:
        np.save(tmp_path / "astronaut.npy", skimage.data.astronaut()[::2, ::2])
        camera = [SOURCE / "tests/plugins/ros/zenoh_camera.py", 7, "/camera/image_raw", "/faces", COUNT]
        done = subprocess.run(
            [sys.executable, *map(str, camera), tmp_path / "astronaut.npy"],
            env={**os.environ, **zenoh_router.environment, "EDGE_TEST_CAMERA_LIMIT_S": "600"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, log.read_text() + done.stderr
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(60) == 0, log.read_text()
    finally:
        bridge.kill()
        bridge.wait()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == COUNT
    for message in found:
        (face,) = message["detections"]
        center = face["bbox"]["center"]["position"]
        assert (round(center["x"], -1), round(center["y"], -1)) == (110, 60)
