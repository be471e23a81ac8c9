"""Topics about a bridge, and its service, on live ROS 2: what the model is, and how the bridge and its server are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.plugins.ros.marks import LIVE_ROS

FLAGS = (
    "--detections-topic=/found", "--vision-info-topic=/vision_info", "--label-info-topic=/label_info",
    "--diagnostics-topic=/diagnostics", "--node-name=eyes",
)  # fmt: skip

pytestmark = LIVE_ROS


@pytest.mark.parametrize(
    ("transport", "distribution"),
    [
        ("dds", "kilted"),
        pytest.param("dds", "jazzy", marks=pytest.mark.long),
        pytest.param("rclpy", "jazzy", marks=pytest.mark.long),
        pytest.param("rclpy", "kilted", marks=pytest.mark.long),
    ],
)
def test_late_subscribers_get_the_model_and_all_get_diagnostics(
    scripted: Callable[..., Any], live: Any, client: Any, governor: str, transport: str, distribution: str
) -> None:
    server = scripted()
    server.labels = ("cup", "bowl", "ø")
    client("listen", "/diagnostics", "diagnostic_msgs/msg/DiagnosticArray", "DEFAULT")
    client("listen", "/found", "vision_msgs/msg/Detection2DArray", "DEFAULT")
    client("camera", "/camera/image_raw", 64, 48, 20)
    flags = (*FLAGS, f"--http-url={governor}")
    with live.bridging(server.address, *flags, transport=transport, distribution=distribution):
        client("wait", "/found", 3, 30)
        client("listen", "/vision_info", "vision_msgs/msg/VisionInfo", "TRANSIENT_LOCAL")
        client("listen", "/label_info", "vision_msgs/msg/LabelInfo", "TRANSIENT_LOCAL")
        (info,), (labels,) = client("wait", "/vision_info", 1, 20), client("wait", "/label_info", 1, 20)
        assert (info["method"], info["database_location"]) == ("finder version 1 on script", "/label_info")
        assert [one["class_name"] for one in labels["class_map"]] == ["cup", "bowl", "ø"]
        frames, server_status, hot = client("wait", "/diagnostics", 2, 30)[-1]["status"]
        assert (frames["name"], server_status["name"], hot["name"]) == (
            "eyes: frames", "eyes: server", "eyes: governor",
        )  # fmt: skip
        assert (server_status["level"], server_status["message"]) == ([0], "finder version 1 on script")
        assert hot["level"] == [1]
        server.stop()
        while client("wait", "/diagnostics", 1, 30)[-1]["status"][1]["level"] != [2]:
            pass
        server.start()
        client("camera", "", 0, 0, 0)
        while not client("wait", "/diagnostics", 1, 30)[-1]["status"][0]["message"].startswith("no images"):
            pass
        if transport == "rclpy":
            fields = {"model_name": "better"}
            changed = client("call", "/eyes/set_model", "edge_server_interfaces/srv/SetModel", fields)
            assert changed["success"], changed["message"]
