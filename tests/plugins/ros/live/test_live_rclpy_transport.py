"""The rclpy transport on the real rclpy, with the Python of rclpy: what all transports promise, and its own cases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

CASES = [Path(__file__).parents[1] / "test_transports.py", Path(__file__).parent / "rclpy_transport_cases.py"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
]


@pytest.mark.parametrize("distribution", ["jazzy", pytest.param("kilted", marks=pytest.mark.long)])
def test_the_transport_on_rclpy(live: Any, distribution: str) -> None:
    # Not the settings of this repository: they choose tests by marks.
    settings = ["-c", os.devnull, "--rootdir", str(live.folder), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [live.python_of(distribution), "-m", "pytest", "-q", *settings, *map(str, CASES)],
        env={
            **live.environment, "PYTHONPATH": live.own_path(distribution), "EDGE_TEST_ROS_TRANSPORTS": "rclpy",
        },
        cwd=live.folder,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
