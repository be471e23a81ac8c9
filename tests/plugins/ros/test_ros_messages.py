"""Conversion of ROS messages to frames without a copy, and of results to vision_msgs."""

from __future__ import annotations

import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.message_conversion import (
    MessageKind,
    annotated_message,
    classification_message,
    detections_message,
    kind_of,
    make_frame,
    map_message,
    mask_message,
    view_bytes,
)
from edge_server.protocol.frame_messages import (
    ClassScore,
    DenseMap,
    Detection,
    FrameHeader,
    FrameResult,
    Mask,
    ObjectMask,
    RotatedBox,
)

HEADER = FrameHeader(sec=1_700_000_000, nanosec=999_999_999, frame_id="camera/left ø", seq=7)


def ros2_header() -> SimpleNamespace:
    return SimpleNamespace(
        stamp=SimpleNamespace(sec=1_700_000_000, nanosec=999_999_999), frame_id="camera/left ø"
    )  # fmt: skip


@dataclass
class Image:
    data: Any
    header: Any = field(default_factory=ros2_header)
    height: int = 2
    width: int = 2
    encoding: str = "rgb8"
    is_bigendian: int = 1
    step: int = 8


def test_a_ros_2_image_keeps_every_field() -> None:
    frame = make_frame(Image(b"x" * 16), age_us=1500, seq=7)
    assert frame.header == HEADER
    assert (frame.height, frame.width, frame.encoding, frame.step, frame.is_bigendian) == (2, 2, "rgb8", 8, True)
    assert (frame.age_us, frame.format, frame.region) == (1500, "", None)


def test_a_compressed_image_keeps_its_format() -> None:
    message = SimpleNamespace(header=ros2_header(), format="bgr8; jpeg compressed bgr8", data=b"\xff\xd8")
    frame = make_frame(message)
    assert (frame.format, bytes(frame.data), frame.encoding) == ("bgr8; jpeg compressed bgr8", b"\xff\xd8", "")


@pytest.mark.parametrize(
    "data",
    [b"\x01\x02\x03", bytearray(b"\x01\x02\x03"), array.array("B", [1, 2, 3]), np.array([1, 2, 3], np.uint8)],
    ids=["bytes", "bytearray", "array", "numpy"],
)
def test_image_data_is_passed_on_without_a_copy(data: Any) -> None:
    view = view_bytes(data)
    assert bytes(view) == b"\x01\x02\x03"
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))


def test_a_list_of_numbers_is_image_data_too() -> None:
    assert bytes(view_bytes([1, 2, 255])) == b"\x01\x02\xff"


@pytest.mark.parametrize("data", ["text", [256], [1.5], None, object()])
def test_data_that_is_not_bytes_is_refused(data: Any) -> None:
    with pytest.raises(InvalidRequest, match="data of an image"):
        make_frame(Image(data))


@pytest.mark.parametrize("missing", ["header", "height", "step", "data"])
def test_an_object_that_is_no_image_is_refused_with_the_missing_field(missing: str) -> None:
    message = SimpleNamespace(**{key: value for key, value in vars(Image(b"")).items() if key != missing})
    with pytest.raises(InvalidRequest, match=f"no field '{missing}'"):
        make_frame(message)


def test_a_header_without_a_stamp_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no field 'stamp'"):
        make_frame(Image(b"", header=SimpleNamespace(frame_id="")))


def test_detections_become_boxes_with_centre_and_size() -> None:
    found = (Detection(10, 20, 30, 60, 0.75, 3, "dog"), Detection(0, 0, 1, 1, 0.5, 12))
    message = detections_message(FrameResult(HEADER, detections=found))
    assert message.header == HEADER
    first, second = message.detections
    assert (first.center_x, first.center_y, first.size_x, first.size_y) == (20, 40, 20, 40)
    assert (first.hypothesis.class_id, first.hypothesis.score) == ("dog", 0.75)
    assert second.hypothesis.class_id == "12"


def test_an_oriented_box_has_its_angle_and_its_own_size() -> None:
    found = Detection(0, 20, 30, 60, 0.75, 3, "dog", rotated=RotatedBox(12, 40, 50, 20, 0.5))
    (box,) = detections_message(FrameResult(HEADER, detections=(found,))).detections
    assert (box.center_x, box.center_y, box.size_x, box.size_y, box.theta) == (12, 40, 50, 20, 0.5)


def test_a_detection_has_its_track_id_as_text() -> None:
    found = (Detection(10, 20, 30, 60, 0.75, 3, "dog", track_id=2**64 - 1), Detection(0, 0, 1, 1, 0.5, 12))
    message = detections_message(FrameResult(HEADER, detections=found))
    assert [box.track_id for box in message.detections] == ["18446744073709551615", ""]


def test_class_ids_are_numbers_on_request() -> None:
    result = FrameResult(
        HEADER, detections=(Detection(0, 0, 1, 1, 0.5, 3, "dog"),), classes=(ClassScore(4, 0.5, "cat"),)
    )
    assert detections_message(result, has_numbers=True).detections[0].hypothesis.class_id == "3"
    assert classification_message(result, has_numbers=True).results[0].class_id == "4"
    assert classification_message(result).results[0].class_id == "cat"


def test_a_frame_without_detections_is_published_too() -> None:
    assert detections_message(FrameResult(HEADER)).detections == ()


def test_a_mask_becomes_an_image_of_class_ids() -> None:
    assert mask_message(FrameResult(HEADER)) is None
    message = mask_message(FrameResult(HEADER, mask=Mask(2, 3, "mono16", bytes(12))))
    assert message is not None
    assert (message.height, message.width, message.encoding, message.step) == (2, 3, "mono16", 6)
    assert message.kind is MessageKind.IMAGE


def test_a_map_becomes_an_image_of_its_encoding() -> None:
    assert map_message(FrameResult(HEADER)) is None
    for encoding, size in (("32FC1", 4), ("mono16", 2)):
        dense = DenseMap("metric_depth", 2, 3, encoding, bytes(6 * size), 0.0, 0.0)
        message = map_message(FrameResult(HEADER, dense_map=dense))
        assert (message.height, message.width, message.step) == (2, 3, 3 * size)
        assert (message.encoding, bytes(message.data), message.header) == (encoding, bytes(6 * size), HEADER)


def test_masks_of_objects_become_an_image_of_the_numbers_of_detections() -> None:
    def found(mask: ObjectMask | None) -> Detection:
        return Detection(0, 0, 4, 2, 0.5, 0, mask=mask)

    masks = (ObjectMask(1, 0, 2, 2, bytes([0b11110000])), None, ObjectMask(0, 0, 4, 1, bytes([0b11010000])))
    result = FrameResult(HEADER, height=2, width=4, detections=tuple(map(found, masks)))
    message = mask_message(result)
    assert message is not None
    assert (message.height, message.width, message.encoding, message.step) == (2, 4, "mono8", 4)
    assert bytes(message.data) == bytes([3, 1, 1, 3, 0, 1, 1, 0]), "the first detection is the best"
    nothing = mask_message(FrameResult(HEADER, height=2, width=4), is_requested=True)
    assert nothing is not None
    assert bytes(nothing.data) == bytes(8)


def test_an_annotated_image_is_a_compressed_image() -> None:
    assert annotated_message(FrameResult(HEADER)) is None
    message = annotated_message(FrameResult(HEADER, annotated_jpeg=b"\xff\xd8"))
    assert message is not None
    assert (message.format, message.data, message.header) == ("jpeg", b"\xff\xd8", HEADER)


def test_type_names_of_both_ros_versions_are_known() -> None:
    assert kind_of("sensor_msgs/Image") is kind_of("sensor_msgs/msg/Image") is MessageKind.IMAGE
    assert kind_of("sensor_msgs/msg/CompressedImage") is MessageKind.COMPRESSED_IMAGE
    assert kind_of("sensor_msgs/msg/Imu") is None
    assert kind_of("") is None
