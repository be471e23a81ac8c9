"""ROS 2 message types without a ROS installation: layouts, CDR encoding and type hashes, by the library rosbags.

rosbags has the common interfaces (std_msgs, sensor_msgs, geometry_msgs); vision_msgs 4.x is defined here. Messages are
rosbags' plain classes; image data in them is a numpy view of the received bytes.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import numpy as np

from edge_server.errors import InvalidRequest, Unsupported, install_hint
from edge_server.plugins.ros.messages.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    Detections3DMessage,
    DetectionsMessage,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    LabelInfoMessage,
    OutgoingMessage,
    VisionInfoMessage,
)
from edge_server.protocol.frame_messages import FrameHeader

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


class MessageTypes:
    """Encoder and decoder of the known message types."""

    def __init__(self) -> None:
        typesys = import_library("rosbags.typesys")
        self.store: Any = typesys.get_typestore(typesys.Stores.LATEST)
        found: dict[str, Any] = {}
        for name, text in VISION_MSGS.items():
            found.update(typesys.get_types_from_msg(text, name))
        self.store.register(found)
        self._error: type[Exception] = import_library("rosbags.serde").SerdeError

    def encode(self, message: OutgoingMessage) -> bytes:
        """Return the message in CDR with its four bytes of encapsulation."""
        name = message.kind.value
        # The DDS writer pads and keeps bytes; it would copy a view anyway.
        return bytes(self.store.serialize_cdr(self.to_rosbags(message), name))

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

    def to_rosbags(self, message: OutgoingMessage) -> Any:
        """Return the message as rosbags' object of `message.kind`."""
        if isinstance(message, DetectionsMessage):
            return self._detections(message)
        if isinstance(message, Detections3DMessage):
            return self._detections3d(message)
        header = self._header(message.header)
        if isinstance(message, ClassificationMessage):
            results = [self._hypothesis(one) for one in message.results]
            return self._new("vision_msgs/msg/Classification", header=header, results=results)
        if isinstance(message, VisionInfoMessage):
            return self._new(
                message.kind.value,
                header=header,
                method=message.method,
                database_location=message.database_location,
                database_version=message.database_version,
            )
        if isinstance(message, LabelInfoMessage):
            classes = [
                self._new("vision_msgs/msg/VisionClass", class_id=number, class_name=label)
                for number, label in enumerate(message.labels)
            ]
            return self._new(message.kind.value, header=header, class_map=classes, threshold=0.0)
        if isinstance(message, DiagnosticsMessage):
            return self._new(message.kind.value, header=header, status=[self._status(one) for one in message.statuses])
        data = np.frombuffer(message.data, np.uint8)
        if isinstance(message, CompressedImageMessage):
            return self._new("sensor_msgs/msg/CompressedImage", header=header, format=message.format, data=data)
        return self._new(
            "sensor_msgs/msg/Image",
            header=header,
            height=message.height,
            width=message.width,
            encoding=message.encoding,
            is_bigendian=int(message.is_bigendian),
            step=message.step,
            data=data,
        )

    def _detections(self, message: DetectionsMessage) -> Any:
        header = self._header(message.header)
        found = []
        for box in message.detections:
            position = self._new("vision_msgs/msg/Point2D", x=box.center_x, y=box.center_y)
            center = self._new("vision_msgs/msg/Pose2D", position=position, theta=float(box.theta))
            found.append(
                self._new(
                    "vision_msgs/msg/Detection2D",
                    header=header,
                    results=[
                        self._new(
                            "vision_msgs/msg/ObjectHypothesisWithPose",
                            hypothesis=self._hypothesis(box.hypothesis),
                            pose=self._no_pose,
                        )
                    ],
                    bbox=self._new(
                        "vision_msgs/msg/BoundingBox2D", center=center, size_x=box.size_x, size_y=box.size_y
                    ),
                    id=box.track_id,
                )
            )
        return self._new("vision_msgs/msg/Detection2DArray", header=header, detections=found)

    def _detections3d(self, message: Detections3DMessage) -> Any:
        header = self._header(message.header)
        found = []
        for box in message.detections:
            center = self._pose((box.x, box.y, box.z), box.orientation)
            pose = self._new("geometry_msgs/msg/PoseWithCovariance", pose=center, covariance=np.zeros(36))
            size = self._new("geometry_msgs/msg/Vector3", x=box.size_x, y=box.size_y, z=box.size_z)
            hypothesis = self._hypothesis(box.hypothesis)
            found.append(
                self._new(
                    "vision_msgs/msg/Detection3D",
                    header=header,
                    results=[self._new("vision_msgs/msg/ObjectHypothesisWithPose", hypothesis=hypothesis, pose=pose)],
                    bbox=self._new("vision_msgs/msg/BoundingBox3D", center=center, size=size),
                    id=box.track_id,
                )
            )
        return self._new("vision_msgs/msg/Detection3DArray", header=header, detections=found)

    @functools.cached_property
    def _no_pose(self) -> Any:
        pose = self._pose((0.0, 0.0, 0.0), (0.0, 1.0))
        return self._new("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=np.zeros(36))

    def _pose(self, position: tuple[float, float, float], turn: tuple[float, float]) -> Any:
        """Return a pose; `turn` is z and w of its quaternion."""
        x, y, z = position
        return self._new(
            "geometry_msgs/msg/Pose",
            position=self._new("geometry_msgs/msg/Point", x=x, y=y, z=z),
            orientation=self._new("geometry_msgs/msg/Quaternion", x=0.0, y=0.0, z=turn[0], w=turn[1]),
        )

    def _hypothesis(self, one: HypothesisMessage) -> Any:
        return self._new("vision_msgs/msg/ObjectHypothesis", class_id=one.class_id, score=float(one.score))

    def _status(self, one: DiagnosticStatus) -> Any:
        pairs = [self._new("diagnostic_msgs/msg/KeyValue", key=key, value=value) for key, value in one.values.items()]
        return self._new(
            "diagnostic_msgs/msg/DiagnosticStatus",
            level=int(one.level),
            name=one.name,
            message=one.message,
            hardware_id=one.hardware_id,
            values=pairs,
        )

    def _header(self, header: FrameHeader) -> Any:
        # Seconds are unsigned in a frame and signed in ROS 2, with the same 32 bits.
        sec = (header.sec + 2**31) % 2**32 - 2**31
        stamp = self._new("builtin_interfaces/msg/Time", sec=sec, nanosec=header.nanosec)
        return self._new("std_msgs/msg/Header", stamp=stamp, frame_id=header.frame_id)

    def _new(self, name: str, /, **fields: Any) -> Any:
        return self.store.types[name](**fields)
