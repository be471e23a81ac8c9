"""CDR encoding of messages: a round trip, and errors for damaged bytes."""

from __future__ import annotations

import importlib.util
import math
import random

import numpy as np
import pytest

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    ClassificationMessage,
    CompressedImageMessage,
    Detection3DMessage,
    DetectionMessage,
    Detections3DMessage,
    DetectionsMessage,
    DiagnosticLevel,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    ImageMessage,
    LabelInfoMessage,
    OutgoingMessage,
    VisionInfoMessage,
    make_frame,
)
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library
from edge_server.protocol.frame_messages import FrameHeader

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("rosbags") is None, reason="needs rosbags: pip install '.[ros]'"),
]


@pytest.fixture(scope="module")
def types() -> MessageTypes:
    return MessageTypes()


HEADER = FrameHeader(12, 34, "camera/ø")
CUP = HypothesisMessage("cup", 0.5)
MESSAGES: tuple[OutgoingMessage, ...] = (
    ImageMessage(HEADER, 2, 2, "bayer_rggb8", 3, bytes(range(6)), is_bigendian=True),
    CompressedImageMessage(HEADER, "jpeg", b"\xff\xd8\xff"),
    DetectionsMessage(HEADER, (DetectionMessage(1.5, 2.5, 3, 4, CUP), DetectionMessage(0, 0, 0, 0, CUP))),
    ClassificationMessage(HEADER, (CUP,)),
    VisionInfoMessage(HEADER, "finder version 1 on openvino", "/label_info", 2),
    LabelInfoMessage(HEADER, ("background", "cup")),
    DiagnosticsMessage(
        HEADER, (DiagnosticStatus(DiagnosticLevel.WARN, "bridge: frames", "hot", "box:8001", {"rate": "9.5"}),)
    ),
    Detections3DMessage(HEADER, (Detection3DMessage(0.5, -0.25, 2.0, 0.1, 0.2, 0.05, 0.75, CUP, "17"),)),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind.name)
def test_an_encoded_message_decodes_to_the_same(types: MessageTypes, message: OutgoingMessage) -> None:
    data = types.encode(message)
    assert data[:4] == b"\x00\x01\x00\x00"
    value = types.decode(data, message.kind.value)
    assert (value.header.stamp.sec, value.header.stamp.nanosec, value.header.frame_id) == (12, 34, "camera/ø")
    assert types.encode(message) == bytes(types.store.serialize_cdr(value, message.kind.value))


def test_the_track_id_is_the_id_of_its_detection(types: MessageTypes) -> None:
    message = DetectionsMessage(
        HEADER, (DetectionMessage(1.5, 2.5, 3, 4, CUP, "17"), DetectionMessage(0, 0, 0, 0, CUP))
    )
    value = types.decode(types.encode(message), message.kind.value)
    assert [found.id for found in value.detections] == ["17", ""]


def test_the_angle_of_an_oriented_box_is_theta(types: MessageTypes) -> None:
    message = DetectionsMessage(HEADER, (DetectionMessage(1.5, 2.5, 3, 4, CUP, theta=0.75),))
    (found,) = types.decode(types.encode(message), message.kind.value).detections
    assert (found.bbox.center.theta, found.bbox.size_x, found.bbox.size_y) == (0.75, 3, 4)


def test_a_detection_in_space_is_written_field_by_field(types: MessageTypes) -> None:
    (found,) = types.decode(types.encode(MESSAGES[-1]), "vision_msgs/msg/Detection3DArray").detections
    position, turn, size = found.bbox.center.position, found.bbox.center.orientation, found.bbox.size
    assert (position.x, position.y, position.z, size.x, size.y, size.z) == (0.5, -0.25, 2.0, 0.1, 0.2, 0.05)
    assert (turn.x, turn.y) == (0, 0)
    assert 2 * math.atan2(turn.z, turn.w) == pytest.approx(0.75)
    (result,) = found.results
    assert (result.pose.pose, result.pose.covariance.tolist()) == (found.bbox.center, [0.0] * 36)
    assert (result.hypothesis.class_id, result.hypothesis.score, found.id) == ("cup", 0.5, "17")
    assert found.header.frame_id == "camera/ø"


def test_pixels_of_a_decoded_image_are_a_view_of_the_received_bytes(types: MessageTypes) -> None:
    data = types.encode(MESSAGES[0])
    frame = make_frame(types.decode(data, "sensor_msgs/msg/Image"))
    assert np.shares_memory(np.frombuffer(frame.data, np.uint8), np.frombuffer(data, np.uint8))
    assert (frame.step, frame.encoding, frame.is_bigendian, bytes(frame.data)) == (3, "bayer_rggb8", True, data[-6:])


def test_seconds_beyond_2038_keep_their_bits(types: MessageTypes) -> None:
    message = ClassificationMessage(FrameHeader(4_000_000_000, 1, ""), ())
    value = types.decode(types.encode(message), message.kind.value)
    assert value.header.stamp.sec == 4_000_000_000 - 2**32


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind.name)
def test_damaged_bytes_are_refused_or_decoded(types: MessageTypes, message: OutgoingMessage) -> None:
    data = types.encode(message)
    chance = random.Random(5)
    damaged = [data[:length] for length in range(len(data))]
    for _ in range(2000):
        copy = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            copy[chance.randrange(len(copy))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        damaged.append(bytes(copy))
    refused = 0
    for one in damaged:
        try:
            types.decode(one, message.kind.value)
        except InvalidRequest:
            refused += 1
    assert refused > len(data) // 2


def test_a_missing_library_is_reported_with_what_to_install() -> None:
    with pytest.raises(Unsupported, match=r"rosbags is needed .* pip install '\.\[ros\]'"):
        import_library("rosbags.nothing_of_the_kind")
    with pytest.raises(Unsupported, match=r"for x86-64 alone.*--transport=rclpy"):
        import_library("cyclonedds.nothing_of_the_kind")
