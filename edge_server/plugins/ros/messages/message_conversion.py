"""Conversion between ROS messages and frames or results, without any ROS library.

Input is any object with the fields of sensor_msgs/Image or CompressedImage: of rclpy, rosbags or cyclonedds. A
result becomes small values named after the messages of sensor_msgs and vision_msgs 4.x; each transport copies them into
its own classes. Headers are not changed.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.protocol.frame_messages import Buffer, Detection, Frame, FrameHeader, FrameResult, Mask, RotatedBox


class MessageKind(enum.Enum):
    """Message types of the bridge. The value is the full ROS 2 name."""

    IMAGE = "sensor_msgs/msg/Image"
    COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
    DETECTIONS = "vision_msgs/msg/Detection2DArray"
    CLASSIFICATION = "vision_msgs/msg/Classification"
    DETECTIONS_3D = "vision_msgs/msg/Detection3DArray"
    CAMERA_INFO = "sensor_msgs/msg/CameraInfo"
    VISION_INFO = "vision_msgs/msg/VisionInfo"
    LABEL_INFO = "vision_msgs/msg/LabelInfo"
    DIAGNOSTICS = "diagnostic_msgs/msg/DiagnosticArray"


@dataclass(frozen=True, slots=True)
class ImageMessage:
    """sensor_msgs/Image. `data` is `height` rows of `step` bytes."""

    header: FrameHeader
    height: int
    width: int
    encoding: str
    step: int
    data: Buffer
    is_bigendian: bool = False
    kind = MessageKind.IMAGE


@dataclass(frozen=True, slots=True)
class CompressedImageMessage:
    """sensor_msgs/CompressedImage."""

    header: FrameHeader
    format: str
    data: Buffer
    kind = MessageKind.COMPRESSED_IMAGE


@dataclass(frozen=True, slots=True)
class HypothesisMessage:
    """vision_msgs/ObjectHypothesis."""

    class_id: str
    score: float


@dataclass(frozen=True, slots=True)
class DetectionMessage:
    """vision_msgs/Detection2D with one hypothesis. Centre and size in pixels of the frame, `theta` in
    radians: from the x axis towards the y axis, so clockwise in the picture; 0 for an upright box.

    `track_id` is the field `id`, the same for an object in all frames; "" without tracking.
    """

    center_x: float
    center_y: float
    size_x: float
    size_y: float
    hypothesis: HypothesisMessage
    track_id: str = ""
    theta: float = 0.0


@dataclass(frozen=True, slots=True)
class DetectionsMessage:
    """vision_msgs/Detection2DArray; each of its detections repeats the header."""

    header: FrameHeader
    detections: tuple[DetectionMessage, ...]
    kind = MessageKind.DETECTIONS


@dataclass(frozen=True, slots=True)
class Detection3DMessage:
    """vision_msgs/Detection3D with one hypothesis. Centre and size in metres, in the optical frame of the camera: x to
    the right, y down, z forward. `theta` in radians turns the box about z, from x towards y.

    The pose of the hypothesis is that of the box. `track_id` is as in DetectionMessage.
    """

    x: float
    y: float
    z: float
    size_x: float
    size_y: float
    size_z: float
    theta: float
    hypothesis: HypothesisMessage
    track_id: str = ""

    @property
    def orientation(self) -> tuple[float, float]:
        """z and w of the quaternion of `theta`; its x and y are 0."""
        return math.sin(self.theta / 2), math.cos(self.theta / 2)


@dataclass(frozen=True, slots=True)
class Detections3DMessage:
    """vision_msgs/Detection3DArray; each of its detections repeats the header."""

    header: FrameHeader
    detections: tuple[Detection3DMessage, ...]
    kind = MessageKind.DETECTIONS_3D


@dataclass(frozen=True, slots=True)
class ClassificationMessage:
    """vision_msgs/Classification, best first."""

    header: FrameHeader
    results: tuple[HypothesisMessage, ...]
    kind = MessageKind.CLASSIFICATION


@dataclass(frozen=True, slots=True)
class VisionInfoMessage:
    """vision_msgs/VisionInfo: which model makes the results, and where its class names are."""

    header: FrameHeader
    method: str
    database_location: str
    database_version: int
    kind = MessageKind.VISION_INFO


@dataclass(frozen=True, slots=True)
class LabelInfoMessage:
    """vision_msgs/LabelInfo: the label of each class number. The field `threshold` is 0: the server does not say which
    it uses."""

    header: FrameHeader
    labels: tuple[str, ...]
    kind = MessageKind.LABEL_INFO


class DiagnosticLevel(enum.IntEnum):
    """Level of a diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True, slots=True)
class DiagnosticStatus:
    """diagnostic_msgs/DiagnosticStatus."""

    level: DiagnosticLevel
    name: str
    message: str
    hardware_id: str
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DiagnosticsMessage:
    """diagnostic_msgs/DiagnosticArray."""

    header: FrameHeader
    statuses: tuple[DiagnosticStatus, ...]
    kind = MessageKind.DIAGNOSTICS


OutgoingMessage: TypeAlias = (
    "ImageMessage | CompressedImageMessage | DetectionsMessage | Detections3DMessage | ClassificationMessage"
    " | VisionInfoMessage | LabelInfoMessage | DiagnosticsMessage"
)


def make_frame(message: Any, *, age_us: int = 0, seq: int = 0) -> Frame:
    """Return the frame of a sensor_msgs/Image or CompressedImage; it uses the memory of the message.

    `seq` is the number of the frame: a header of ROS 2 has none. Raises InvalidRequest for another object.
    """
    header = read_header(message, seq)
    if hasattr(message, "encoding"):
        return Frame(
            header,
            height=int(_field(message, "height")),
            width=int(_field(message, "width")),
            encoding=str(message.encoding),
            step=int(_field(message, "step")),
            is_bigendian=bool(_field(message, "is_bigendian")),
            age_us=age_us,
            data=view_bytes(_field(message, "data")),
        )
    data = view_bytes(_field(message, "data"))
    return Frame(header, format=str(_field(message, "format")), age_us=age_us, data=data)


def read_header(message: Any, seq: int = 0) -> FrameHeader:
    """Return the std_msgs/Header of a message, with the number `seq`. Raises InvalidRequest when it has none."""
    header = _field(message, "header")
    stamp = _field(header, "stamp")
    return FrameHeader(
        sec=int(_field(stamp, "sec")),
        nanosec=int(_field(stamp, "nanosec")),
        frame_id=str(_field(header, "frame_id")),
        seq=seq,
    )


def view_bytes(data: Any) -> Buffer:
    """Return a view of a uint8[] field (bytes, bytearray, array.array, numpy). A list of numbers is copied."""
    if isinstance(data, bytes):
        return data
    try:
        view = memoryview(data)
    except TypeError:
        pass
    else:
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    try:
        return bytes(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the data of an image must be bytes, got {type(data).__name__}: {error}") from None


def _field(message: Any, name: str) -> Any:
    try:
        return getattr(message, name)
    except AttributeError:
        raise InvalidRequest(
            f"expected a sensor_msgs/Image or CompressedImage, but {type(message).__name__} has no field '{name}'"
        ) from None


def stamp_now() -> FrameHeader:
    """Return a header with the time of this machine's clock, for messages that are not about a frame."""
    sec, nanosec = divmod(time.time_ns(), 1_000_000_000)
    return FrameHeader(sec, nanosec)


def detections_message(result: FrameResult, *, has_numbers: bool = False) -> DetectionsMessage:
    """Return the detections of a frame. With `has_numbers`, each class_id is the number of the class instead of its
    label. Keypoints are omitted: vision_msgs has no field for them."""
    return DetectionsMessage(result.header, tuple(_detection(found, has_numbers) for found in result.detections))


def box_of(found: Detection) -> RotatedBox:
    """Return the oriented box of a detection, or its upright box with angle 0."""
    if found.rotated is not None:
        return found.rotated
    width, height = found.x_max - found.x_min, found.y_max - found.y_min
    return RotatedBox((found.x_min + found.x_max) / 2, (found.y_min + found.y_max) / 2, width, height, 0.0)


def _detection(found: Detection, has_numbers: bool) -> DetectionMessage:
    box = box_of(found)
    return DetectionMessage(
        center_x=box.x,
        center_y=box.y,
        size_x=box.width,
        size_y=box.height,
        hypothesis=make_hypothesis(found.label, found.class_index, found.score, has_numbers),
        track_id=str(found.track_id) if found.track_id else "",
        theta=box.angle,
    )


def classification_message(result: FrameResult, *, has_numbers: bool = False) -> ClassificationMessage:
    """Return the classes of a frame."""
    return ClassificationMessage(
        result.header, tuple(make_hypothesis(one.label, one.index, one.score, has_numbers) for one in result.classes)
    )


def annotated_message(result: FrameResult) -> CompressedImageMessage | None:
    """Return the annotated frame, or None when the server sent none."""
    if not len(result.annotated_jpeg):
        return None
    return CompressedImageMessage(result.header, "jpeg", result.annotated_jpeg)


def mask_message(result: FrameResult, *, is_requested: bool = False) -> ImageMessage | None:
    """Return the mask as an image, or None if the result has none.

    Segmentation: class numbers, mono8 or mono16. Masks of objects: mono8, 0 where there is no object, else the number
    of the detection in the frame's detections, counted from 1; of several objects at a pixel, the best. `is_requested`:
    a result without any mask shows no object.
    """
    mask: Mask | None = result.mask
    if mask is None:
        has_masks = is_requested or any(found.mask is not None for found in result.detections)
        return _object_masks_message(result) if has_masks else None
    step = mask.width * (2 if mask.encoding == "mono16" else 1)
    return ImageMessage(result.header, mask.height, mask.width, mask.encoding, step, mask.data)


def map_message(result: FrameResult) -> ImageMessage | None:
    """Return the map of depth or anomaly as an image, 32FC1 (depth in metres, as in REP 118) or mono16, or None."""
    dense = result.dense_map
    if dense is None:
        return None
    step = dense.width * (2 if dense.encoding == "mono16" else 4)
    return ImageMessage(result.header, dense.height, dense.width, dense.encoding, step, dense.data)


def result_messages(
    result: FrameResult, names: Iterable[str], *, has_numbers: bool = False, has_mask: bool = False
) -> dict[str, OutgoingMessage]:
    """Return the messages that a result has for some of the names detections, classification, annotated, mask and map.
    `has_numbers` is as in `detections_message`, `has_mask` is `is_requested` of `mask_message`."""
    makers: dict[str, Callable[[FrameResult], OutgoingMessage | None]] = {
        "detections": partial(detections_message, has_numbers=has_numbers),
        "classification": partial(classification_message, has_numbers=has_numbers),
        "annotated": annotated_message,
        "mask": partial(mask_message, is_requested=has_mask),
        "map": map_message,
    }
    return {name: message for name in names if (message := makers[name](result)) is not None}


def _object_masks_message(result: FrameResult) -> ImageMessage:
    image = np.zeros((result.height, result.width), np.uint8)
    # Only the best 100 detections have masks: MAX_MASKS of plugins.vision.
    for number, found in reversed(list(enumerate(result.detections[:255], start=1))):
        if (mask := found.mask) is not None:
            image[mask.y : mask.y + mask.height, mask.x : mask.x + mask.width][mask.pixels()] = number
    return ImageMessage(result.header, result.height, result.width, "mono8", result.width, image.reshape(-1).data)


def make_hypothesis(label: str, index: int, score: float, has_numbers: bool) -> HypothesisMessage:
    """Return the class of a detection, by its label, or by its number if it has none or `has_numbers`."""
    return HypothesisMessage(str(index) if has_numbers or not label else label, score)


def kind_of(type_name: str) -> MessageKind | None:
    """Return the kind of a type name such as "sensor_msgs/Image", or None."""
    parts: Sequence[str] = type_name.split("/")
    full = f"{parts[0]}/msg/{parts[-1]}"
    return next((kind for kind in MessageKind if kind.value == full), None)
