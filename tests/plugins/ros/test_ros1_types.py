"""ROS 1 definitions of vision_msgs and diagnostic_msgs against the checksums of the released packages, without ROS."""

from __future__ import annotations

import hashlib
import sys

import pytest

from edge_server.errors import Unsupported
from edge_server.plugins.ros.messages.message_conversion import MessageKind
from edge_server.plugins.ros.messages.ros1_types import CHECKSUMS, DEFINITIONS, TYPES, full_text
from edge_server.plugins.ros.transports.ros1_transport import message_classes, open_transport

STOCK = {
    "std_msgs/Header": "2176decaecbce78abc3b96ef049fabed",
    "geometry_msgs/Pose2D": "938fa65709584ad8e77d238529be13b8",
    "geometry_msgs/PoseWithCovariance": "c23e848cf1b7533a8d7c259073a97e6f",
    "sensor_msgs/Image": "060021388200f6f0f447d0fcd9c64743",
    "sensor_msgs/PointCloud2": "1158d486dd51d683ce2f1be655c3c181",
}
"""The md5sums of messages that every ROS 1 has."""


def checksum(name: str) -> str:
    """Return ROS 1's md5sum: over the fields, where the type of a message is replaced by its own md5sum."""
    lines = []
    for line in DEFINITIONS[name].splitlines():
        kind, field = line.split()
        part = "std_msgs/Header" if kind == "Header" else kind.removesuffix("[]")
        lines.append(f"{checksum(part)} {field}" if part in DEFINITIONS else line)
    return hashlib.md5("\n".join(lines).encode()).hexdigest()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "expected"), [*CHECKSUMS.items(), *STOCK.items()])
def test_a_definition_has_the_checksum_of_the_released_package(name: str, expected: str) -> None:
    assert checksum(name) == expected


def test_a_full_definition_contains_each_needed_type_once() -> None:
    first, *others = full_text("vision_msgs/Detection3D").split("\n" + "=" * 80 + "\n")
    assert first == DEFINITIONS["vision_msgs/Detection3D"]
    names = [text.partition("\n")[0].removeprefix("MSG: ") for text in others]
    assert sorted(names) == [
        "geometry_msgs/Point", "geometry_msgs/Pose", "geometry_msgs/PoseWithCovariance", "geometry_msgs/Quaternion",
        "geometry_msgs/Vector3", "sensor_msgs/PointCloud2", "sensor_msgs/PointField", "std_msgs/Header",
        "vision_msgs/BoundingBox3D", "vision_msgs/ObjectHypothesisWithPose",
    ]  # fmt: skip


def test_every_message_type_but_label_info_has_a_name_in_ros1() -> None:
    assert set(TYPES) == set(MessageKind) - {MessageKind.LABEL_INFO}


@pytest.mark.parametrize("make", [message_classes, lambda: open_transport("eyes", {})])
def test_without_ros1_the_error_names_what_to_install(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rospy", "sensor_msgs", "sensor_msgs.msg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match="apt install python3-rospy python3-sensor-msgs"):
        make()  # type: ignore[operator]
