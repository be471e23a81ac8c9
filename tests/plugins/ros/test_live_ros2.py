"""The bridge against live ROS 2: rclpy of Jazzy and Kilted, with their own middleware, in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CAMERA = Path(__file__).parent / "rclpy_camera.py"
LIMIT_S = 90.0
COUNT = 10

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")),
        reason="needs cyclonedds and rosbags: pip install '.[ros]'",
    ),
]


def python_of(distribution: str) -> str:
    return str(Path(os.environ["EDGE_TEST_RCLPY"]) / distribution / "bin/python")


@contextlib.contextmanager
def bridging(python: str, address: str, environment: dict[str, str], log: Path, *flags: str) -> Iterator[None]:
    """Run `edge-server ros bridge` meanwhile; end it by SIGTERM and expect exit code 0."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [
                python, "-m", "edge_server", "ros", "bridge", "--model=finder", f"--address={address}",
                "--image-topic=/camera/image_raw", "--annotated-topic=/drawn", *flags,
            ],
            env=environment, stderr=file,
        )  # fmt: skip
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def play_camera(distribution: str, environment: dict[str, str]) -> list[int]:
    """Return the stamps of the answers to a camera's pictures."""
    done = subprocess.run(
        [python_of(distribution), str(CAMERA), "/camera/image_raw", "/drawn", str(COUNT)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(stamp) for stamp in done.stdout.split()]


@pytest.fixture
def environment(ros_domain: dict[str, str]) -> dict[str, str]:
    """A domain of this test's own on this machine alone, as users of Jazzy and newer set it."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONEDDS_"))}
    return {**without, "ROS_DOMAIN_ID": ros_domain["ROS_DOMAIN_ID"], "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}


@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_images_of_a_live_ros2_node_are_answered_over_dds(
    scripted: Callable[..., Any], environment: dict[str, str], tmp_path: Path, distribution: str
) -> None:
    server = scripted()
    with bridging(sys.executable, server.address, environment, tmp_path / "log"):
        assert len(play_camera(distribution, environment)) >= COUNT
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, len(frame.data)) == (480, 640, "bgr8", 480 * 640 * 3)
    assert frame.header.frame_id == "camera_optical"


def test_a_users_cyclonedds_uri_is_kept_and_works_with_kilted(
    scripted: Callable[..., Any], environment: dict[str, str], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    own = f"<Tracing><Verbosity>config</Verbosity><OutputFile>{trace}</OutputFile></Tracing>"
    uri = f"{ros_domain['CYCLONEDDS_URI']},{own}"
    with bridging(sys.executable, scripted().address, {**environment, "CYCLONEDDS_URI": uri}, tmp_path / "log"):
        assert len(play_camera("kilted", environment)) >= COUNT
    assert "config" in trace.read_text()


@pytest.mark.long
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_the_bridge_runs_with_rclpy_from_a_package_index(
    scripted: Callable[..., Any], environment: dict[str, str], tmp_path: Path, distribution: str
) -> None:
    python = python_of(distribution)
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    if version.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"the environment of {distribution} has another Python, {version.stdout.strip()}")
    with_package = {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with bridging(python, scripted().address, with_package, tmp_path / "log", "--transport=rclpy"):
        assert len(play_camera(distribution, environment)) >= COUNT
    assert "ROS_DISTRO" not in (tmp_path / "log").read_text()
