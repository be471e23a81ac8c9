"""rclpy transport where there is no rclpy. live/ runs it on the real one."""

from __future__ import annotations

import pytest

from edge_server.errors import Unsupported
from edge_server.plugins.ros.transports.rclpy_transport import open_transport


def test_without_ros2_the_error_names_what_to_source() -> None:
    with pytest.raises(Unsupported, match=r"source the setup\.bash of ROS 2"):
        open_transport("eyes", {})
