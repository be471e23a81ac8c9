"""Definitions of the ROS 1 messages of vision_msgs and diagnostic_msgs, as text for genpy, so that the packages need
not be installed.

ROS 1 connects a publisher and a subscriber when the name and the checksum of their message types are equal. The
checksum covers only the fields: classes that genpy makes from this text match vision_msgs 0.0.1 and 0.0.2 (Kinetic to
Noetic).
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_server.plugins.ros.messages.message_conversion import MessageKind

TYPES: dict[MessageKind, str] = {
    MessageKind.IMAGE: "sensor_msgs/Image",
    MessageKind.COMPRESSED_IMAGE: "sensor_msgs/CompressedImage",
    MessageKind.DETECTIONS: "vision_msgs/Detection2DArray",
    MessageKind.CLASSIFICATION: "vision_msgs/Classification2D",
    MessageKind.DETECTIONS_3D: "vision_msgs/Detection3DArray",
    MessageKind.CAMERA_INFO: "sensor_msgs/CameraInfo",
    MessageKind.VISION_INFO: "vision_msgs/VisionInfo",
    MessageKind.DIAGNOSTICS: "diagnostic_msgs/DiagnosticArray",
}
"""ROS 1 name of each kind that ROS 1 has. Classification2D is called Classification in later versions."""

DEFINITIONS: dict[str, str] = {
    "std_msgs/Header": "uint32 seq\ntime stamp\nstring frame_id\n",
    "geometry_msgs/Point": "float64 x\nfloat64 y\nfloat64 z\n",
    "geometry_msgs/Quaternion": "float64 x\nfloat64 y\nfloat64 z\nfloat64 w\n",
    "geometry_msgs/Pose": "geometry_msgs/Point position\ngeometry_msgs/Quaternion orientation\n",
    "geometry_msgs/PoseWithCovariance": "geometry_msgs/Pose pose\nfloat64[36] covariance\n",
    "geometry_msgs/Vector3": "float64 x\nfloat64 y\nfloat64 z\n",
    "geometry_msgs/Pose2D": "float64 x\nfloat64 y\nfloat64 theta\n",
    "sensor_msgs/Image": (
        "Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\nuint8[] data\n"
    ),
    # Constants are a part of the checksum.
    "sensor_msgs/PointField": (
        "uint8 INT8=1\nuint8 UINT8=2\nuint8 INT16=3\nuint8 UINT16=4\nuint8 INT32=5\nuint8 UINT32=6\nuint8 FLOAT32=7\n"
        "uint8 FLOAT64=8\nstring name\nuint32 offset\nuint8 datatype\nuint32 count\n"
    ),
    "sensor_msgs/PointCloud2": (
        "Header header\nuint32 height\nuint32 width\nsensor_msgs/PointField[] fields\nbool is_bigendian\n"
        "uint32 point_step\nuint32 row_step\nuint8[] data\nbool is_dense\n"
    ),
    "vision_msgs/ObjectHypothesis": "int64 id\nfloat64 score\n",
    "vision_msgs/ObjectHypothesisWithPose": "int64 id\nfloat64 score\ngeometry_msgs/PoseWithCovariance pose\n",
    "vision_msgs/BoundingBox2D": "geometry_msgs/Pose2D center\nfloat64 size_x\nfloat64 size_y\n",
    "vision_msgs/Detection2D": (
        "Header header\nvision_msgs/ObjectHypothesisWithPose[] results\nvision_msgs/BoundingBox2D bbox\n"
        "sensor_msgs/Image source_img\n"
    ),
    "vision_msgs/Detection2DArray": "Header header\nvision_msgs/Detection2D[] detections\n",
    "vision_msgs/BoundingBox3D": "geometry_msgs/Pose center\ngeometry_msgs/Vector3 size\n",
    "vision_msgs/Detection3D": (
        "Header header\nvision_msgs/ObjectHypothesisWithPose[] results\nvision_msgs/BoundingBox3D bbox\n"
        "sensor_msgs/PointCloud2 source_cloud\n"
    ),
    "vision_msgs/Detection3DArray": "Header header\nvision_msgs/Detection3D[] detections\n",
    "vision_msgs/Classification2D": (
        "Header header\nvision_msgs/ObjectHypothesis[] results\nsensor_msgs/Image source_img\n"
    ),
    "vision_msgs/VisionInfo": ("Header header\nstring method\nstring database_location\nint32 database_version\n"),
    "diagnostic_msgs/KeyValue": "string key\nstring value\n",
    "diagnostic_msgs/DiagnosticStatus": (
        "byte OK=0\nbyte WARN=1\nbyte ERROR=2\nbyte STALE=3\nbyte level\nstring name\nstring message\n"
        "string hardware_id\ndiagnostic_msgs/KeyValue[] values\n"
    ),
    "diagnostic_msgs/DiagnosticArray": "Header header\ndiagnostic_msgs/DiagnosticStatus[] status\n",
}
"""Message type -> its fields. `Header` means std_msgs/Header, as in ROS 1."""

CHECKSUMS = {
    "vision_msgs/Detection2DArray": "402071f61477de256df9f1aa45e6e4c8",
    "vision_msgs/Detection3DArray": "05c51d9aea1fb4cfdc8effb94f197b6f",
    "vision_msgs/Classification2D": "b23d0855d0f41568e09106615351255f",
    "vision_msgs/VisionInfo": "eee36f8dc558754ceb4ef619179d8b34",
    "diagnostic_msgs/DiagnosticArray": "60810da900de1dd6ddd437c3503511da",
}
"""md5sums of the released packages. Those computed by genpy must be equal, or no other node would connect."""

_SEPARATOR = "=" * 80


def full_text(name: str) -> str:
    """Return a definition followed by the definitions it uses, in the format of genpy.dynamic.generate_dynamic."""
    needed = list(dict.fromkeys(_used_types(name)))
    parts = [DEFINITIONS[name], *(f"MSG: {other}\n{DEFINITIONS[other]}" for other in needed)]
    return f"\n{_SEPARATOR}\n".join(parts)


def _used_types(name: str) -> Iterator[str]:
    for line in DEFINITIONS[name].splitlines():
        kind = line.split()[0].removesuffix("[]").partition("[")[0]
        kind = "std_msgs/Header" if kind == "Header" else kind
        if kind in DEFINITIONS:
            yield kind
            yield from _used_types(kind)
