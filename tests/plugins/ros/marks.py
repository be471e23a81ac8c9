"""What tests with nodes of a real ROS 2 need."""

from __future__ import annotations

import importlib.util
import os

import pytest

LIVE_ROS = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")),
        reason="needs cyclonedds and rosbags: pip install '.[ros]'",
    ),
]
