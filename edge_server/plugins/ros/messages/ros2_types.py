"""ROS 2 message types without a ROS installation: the fields of outgoing messages, and by the library rosbags layouts,
CDR encoding and type hashes.

rosbags has the common interfaces (std_msgs, sensor_msgs, geometry_msgs); vision_msgs 4.x is defined here. Messages are
rosbags' plain classes; image data in them is a numpy view of the received bytes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from edge_server.errors import InvalidRequest, Unsupported, install_hint
from edge_server.plugins.ros.messages.message_conversion import (
    ClassificationMessage,
    Detection3DMessage,
    DetectionMessage,
    Detections3DMessage,
    DetectionsMessage,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    LabelInfoMessage,
    MessageKind,
    OutgoingMessage,
)
from edge_server.protocol.frame_messages import Buffer

VISION_MSGS = {
    "vision_msgs/msg/ObjectHypothesis": "string class_id\nfloat64 score\n",
    "vision_msgs/msg/ObjectHypothesisWithPose": (
        "vision_msgs/ObjectHypothesis hypothesis\ngeometry_msgs/PoseWithCovariance pose\n"
    ),
    "vision_msgs/msg/Classification": "std_msgs/Header header\nvision_msgs/ObjectHypothesis[] results\n",
    "vision_msgs/msg/Point2D": "float64 x\nfloat64 y\n",
    "vision_msgs/msg/Pose2D": "vision_msgs/Point2D position\nfloat64 theta\n",
    "vision_msgs/msg/BoundingBox2D": "vision_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "vision_msgs/msg/Detection2D": (
        "std_msgs/Header header\nvision_msgs/ObjectHypothesisWithPose[] results\nvision_msgs/BoundingBox2D bbox\n"
        "string id\n"
    ),
    "vision_msgs/msg/Detection2DArray": "std_msgs/Header header\nvision_msgs/Detection2D[] detections\n",
    "vision_msgs/msg/BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size\n",
    "vision_msgs/msg/Detection3D": (
        "std_msgs/Header header\nvision_msgs/ObjectHypothesisWithPose[] results\nvision_msgs/BoundingBox3D bbox\n"
        "string id\n"
    ),
    "vision_msgs/msg/Detection3DArray": "std_msgs/Header header\nvision_msgs/Detection3D[] detections\n",
    "vision_msgs/msg/VisionInfo": (
        "std_msgs/Header header\nstring method\nstring database_location\nint32 database_version\n"
    ),
    "vision_msgs/msg/VisionClass": "uint16 class_id\nstring class_name\n",
    "vision_msgs/msg/LabelInfo": ("std_msgs/Header header\nvision_msgs/VisionClass[] class_map\nfloat32 threshold\n"),
}
"""Fields of vision_msgs 4.x, in order; the package is published by the ROS perception project under Apache-2.0."""

_HYPOTHESIS_WITH_POSE = "vision_msgs/msg/ObjectHypothesisWithPose"
_PLAIN_FIELDS = {
    MessageKind.IMAGE: ("height", "width", "encoding", "is_bigendian", "step", "data"),
    MessageKind.COMPRESSED_IMAGE: ("format", "data"),
    MessageKind.VISION_INFO: ("method", "database_location", "database_version"),
}

NO_CYCLONEDDS = (
    "Its wheels for Linux are for x86-64 alone. Elsewhere use --transport=zenoh where ROS runs with rmw_zenoh_cpp, "
    "--transport=rclpy inside a sourced ROS 2, or build it "
    "against the C library of its release (github.com/eclipse-cyclonedds/cyclonedds): CYCLONEDDS_HOME=/where/that/is "
    "pip install cyclonedds"
)


def import_library(name: str, extra: str = "ros") -> ModuleType:
    """Import a module of an extra. Raises Unsupported, with the install command, when it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"{package} is needed and cannot be imported ({error}); {install_hint(extra)}."
        if package == "cyclonedds":
            message += f" {NO_CYCLONEDDS}"
        raise Unsupported(message) from error


class MessageBuilder:
    """Builder of outgoing messages as objects of a library's classes. A library has its own `new` and `octets`."""

    def new(self, type_name: str, /, **fields: Any) -> Any:
        """Return an object of a type, such as "std_msgs/msg/Header". The pose of a hypothesis may be left out."""
        raise NotImplementedError

    def octets(self, data: Buffer) -> Any:
        """Return the value of a field uint8[]."""
        raise NotImplementedError

    def byte(self, value: int) -> Any:
        """Return the value of a field of type byte."""
        return value

    def build(self, message: OutgoingMessage) -> Any:
        new, given = self.new, message.header
        # Seconds are unsigned in a frame and signed in ROS 2, with the same 32 bits.
        sec = (given.sec + 2**31) % 2**32 - 2**31
        stamp = new("builtin_interfaces/msg/Time", sec=sec, nanosec=given.nanosec)
        header = new("std_msgs/msg/Header", stamp=stamp, frame_id=given.frame_id)
        fields: dict[str, Any]
        if isinstance(message, DetectionsMessage):
            fields = {"detections": [self._detection(box, header) for box in message.detections]}
        elif isinstance(message, Detections3DMessage):
            fields = {"detections": [self._detection3d(box, header) for box in message.detections]}
        elif isinstance(message, ClassificationMessage):
            fields = {"results": [self._hypothesis(one) for one in message.results]}
        elif isinstance(message, LabelInfoMessage):
            classes = [
                new("vision_msgs/msg/VisionClass", class_id=number, class_name=label)
                for number, label in enumerate(message.labels)
            ]
            fields = {"class_map": classes, "threshold": 0.0}
        elif isinstance(message, DiagnosticsMessage):
            fields = {"status": [self._status(one) for one in message.statuses]}
        else:  # an image or VisionInfo, whose fields have the names of ROS
            fields = {name: getattr(message, name) for name in _PLAIN_FIELDS[message.kind]}
            if "data" in fields:
                fields["data"] = self.octets(fields["data"])
        return new(message.kind.value, header=header, **fields)

    def make_pose(self, x: float, y: float, z: float, turn: tuple[float, float]) -> Any:
        """Return a PoseWithCovariance; `turn` is z and w of its quaternion."""
        pose = self.new(
            "geometry_msgs/msg/Pose",
            position=self.new("geometry_msgs/msg/Point", x=float(x), y=float(y), z=float(z)),
            orientation=self.new("geometry_msgs/msg/Quaternion", x=0.0, y=0.0, z=turn[0], w=turn[1]),
        )
        return self.new("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=np.zeros(36))

    def _detection(self, box: DetectionMessage, header: Any) -> Any:
        new = self.new
        position = new("vision_msgs/msg/Point2D", x=float(box.center_x), y=float(box.center_y))
        center = new("vision_msgs/msg/Pose2D", position=position, theta=float(box.theta))
        size_x, size_y = float(box.size_x), float(box.size_y)
        bbox = new("vision_msgs/msg/BoundingBox2D", center=center, size_x=size_x, size_y=size_y)
        found = new(_HYPOTHESIS_WITH_POSE, hypothesis=self._hypothesis(box.hypothesis))
        return new("vision_msgs/msg/Detection2D", header=header, results=[found], bbox=bbox, id=box.track_id)

    def _detection3d(self, box: Detection3DMessage, header: Any) -> Any:
        new = self.new
        pose = self.make_pose(box.x, box.y, box.z, box.orientation)
        size = new("geometry_msgs/msg/Vector3", x=float(box.size_x), y=float(box.size_y), z=float(box.size_z))
        bbox = new("vision_msgs/msg/BoundingBox3D", center=pose.pose, size=size)
        found = new(_HYPOTHESIS_WITH_POSE, hypothesis=self._hypothesis(box.hypothesis), pose=pose)
        return new("vision_msgs/msg/Detection3D", header=header, results=[found], bbox=bbox, id=box.track_id)

    def _hypothesis(self, one: HypothesisMessage) -> Any:
        return self.new("vision_msgs/msg/ObjectHypothesis", class_id=one.class_id, score=float(one.score))

    def _status(self, one: DiagnosticStatus) -> Any:
        pairs = [self.new("diagnostic_msgs/msg/KeyValue", key=key, value=value) for key, value in one.values.items()]
        return self.new(
            "diagnostic_msgs/msg/DiagnosticStatus", level=self.byte(one.level), name=one.name, message=one.message,
            hardware_id=one.hardware_id, values=pairs,
        )  # fmt: skip


class MessageTypes(MessageBuilder):
    """Encoder and decoder of the known message types."""

    def __init__(self) -> None:
        typesys = import_library("rosbags.typesys")
        self.store: Any = typesys.get_typestore(typesys.Stores.LATEST)
        found: dict[str, Any] = {}
        for name, text in VISION_MSGS.items():
            found.update(typesys.get_types_from_msg(text, name))
        self.store.register(found)
        self._error: type[Exception] = import_library("rosbags.serde").SerdeError
        self._no_pose = self.make_pose(0.0, 0.0, 0.0, (0.0, 1.0))

    def new(self, type_name: str, /, **fields: Any) -> Any:
        if type_name == _HYPOTHESIS_WITH_POSE:
            fields.setdefault("pose", self._no_pose)
        return self.store.types[type_name](**fields)

    def octets(self, data: Buffer) -> Any:
        return np.frombuffer(data, np.uint8)

    def encode(self, message: OutgoingMessage) -> bytes:
        """Return the message in CDR with its four bytes of encapsulation."""
        # The DDS writer pads and keeps bytes; it would copy a view anyway.
        return bytes(self.store.serialize_cdr(self.build(message), message.kind.value))

    def decode(self, data: bytes | memoryview, type_name: str) -> Any:
        """Return the message in CDR bytes; its arrays are views of them. Raises InvalidRequest."""
        try:
            # With bytes instead of a view, rosbags would copy everything behind the encapsulation.
            return self.store.deserialize_cdr(memoryview(data), type_name)
        except self._error as error:
            raise InvalidRequest(f"what came is no {type_name}: {error}") from error

    def type_hash(self, type_name: str) -> str:
        """Return "RIHS01_..." (REP-2016)."""
        return str(self.store.hash_rihs01(type_name))
