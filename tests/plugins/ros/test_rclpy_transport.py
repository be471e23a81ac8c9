"""rclpy transport against a fake rclpy that records calls. live/ runs it on the real one."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    Detection3DMessage,
    Detections3DMessage,
    HypothesisMessage,
    MessageKind,
    annotated_message,
    classification_message,
    detections_message,
    make_frame,
    mask_message,
)
from edge_server.plugins.ros.transports.rclpy_transport import RclpyTransport, message_class, open_transport
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import ClassScore, Detection, FrameHeader, FrameResult, Mask

FAKE = Path(__file__).parent / "fake_ros2"

HEADER = FrameHeader(sec=1_700_000_000, nanosec=999_999_999, frame_id="camera_optical", seq=7)
RESULT = FrameResult(
    HEADER,
    detections=(Detection(10, 20, 50, 80, 0.5, 3, "cat", track_id=7),),
    classes=(ClassScore(3, 0.75, "cat"), ClassScore(1, 0.25)),
    mask=Mask(2, 3, "mono8", bytes(6)),
    annotated_jpeg=b"\xff\xd8 picture",
)
IN_SPACE = Detections3DMessage(
    HEADER, (Detection3DMessage(0.5, -0.25, 2.0, 0.1, 0.2, 0.05, 0.75, HypothesisMessage("cat", 0.5, 3), "7"),)
)


@pytest.fixture
def rclpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FAKE))
    import rclpy as fake

    yield fake
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FAKE)):
            del sys.modules[name]


@pytest.fixture
def transport(rclpy: Any) -> Iterator[RclpyTransport]:
    transport = RclpyTransport("eyes")
    yield transport
    transport.close()


def image() -> Any:
    made = message_class("sensor_msgs/msg/Image")()
    made.header.stamp.sec, made.header.stamp.nanosec, made.header.frame_id = 5, 6, "cam"
    made.height, made.width, made.step, made.encoding = 2, 3, 12, "bgr8"
    made.data = array.array("B", range(24))
    return made


def test_the_node_has_its_own_context_and_installs_no_signal_handlers(rclpy: Any, transport: RclpyTransport) -> None:
    (node,) = rclpy.nodes
    assert node.name == "eyes"
    assert node.context is not rclpy.context.default_context
    assert node.context.signal_handler_options is rclpy.signals.SignalHandlerOptions.NO


def test_closing_destroys_everything_the_transport_created(rclpy: Any) -> None:
    transport = RclpyTransport()
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    (node,) = rclpy.nodes
    transport.close()
    assert (rclpy.nodes, node.subscriptions, node.publishers) == ([], [], [])
    assert not node.context.ok()


def test_a_given_node_is_kept_when_the_transport_is_closed(rclpy: Any) -> None:
    rclpy.init()
    node = rclpy.create_node("given")
    transport = RclpyTransport(node=node)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    transport.close()
    assert rclpy.nodes == [node]
    assert node.publishers == []
    assert node.context.ok()
    node.destroy_node()
    rclpy.shutdown()


def test_quality_of_service_becomes_a_profile(rclpy: Any, transport: RclpyTransport) -> None:
    transport.subscribe("/image", MessageKind.IMAGE, Qos("SENSOR_DATA", 1), lambda message: None)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos("DEFAULT", 10))
    (node,) = rclpy.nodes
    qos = rclpy.qos
    assert node.subscriptions[0].qos_profile == qos.QoSProfile(
        history=qos.HistoryPolicy.KEEP_LAST,
        depth=1,
        reliability=qos.ReliabilityPolicy.BEST_EFFORT,
        durability=qos.DurabilityPolicy.VOLATILE,
    )
    assert node.publishers[0].qos_profile.reliability is qos.ReliabilityPolicy.RELIABLE
    assert node.publishers[0].qos_profile.depth == 10


def test_the_image_callback_gets_the_pixels_without_a_copy(rclpy: Any, transport: RclpyTransport) -> None:
    heard: list[Any] = []
    transport.subscribe("/image", MessageKind.IMAGE, Qos("SENSOR_DATA", 1), heard.append)
    sent = image()
    rclpy.nodes[0].subscriptions[0].receive(sent)
    assert transport.spin(1.0)
    frame = make_frame(heard[0], seq=1)
    assert (frame.header.sec, frame.header.nanosec, frame.header.frame_id) == (5, 6, "cam")
    assert (frame.height, frame.width, frame.step, frame.encoding) == (2, 3, 12, "bgr8")
    assert frame.data.obj is sent.data


def test_spinning_returns_after_its_timeout_and_ends_with_the_context(rclpy: Any, transport: RclpyTransport) -> None:
    assert transport.spin(0.01)
    rclpy.nodes[0].context.try_shutdown()
    assert not transport.spin(0.01)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MessageKind.DETECTIONS, detections_message(RESULT)),
        (MessageKind.CLASSIFICATION, classification_message(RESULT)),
        (MessageKind.COMPRESSED_IMAGE, annotated_message(RESULT)),
        (MessageKind.IMAGE, mask_message(RESULT)),
        (MessageKind.DETECTIONS_3D, IN_SPACE),
    ],
    ids=lambda value: value.name if isinstance(value, MessageKind) else "",
)
def test_every_message_is_published_with_the_header_of_its_frame(
    rclpy: Any, transport: RclpyTransport, kind: MessageKind, message: Any
) -> None:
    transport.advertise("/out", kind, Qos())
    transport.publish("/out", message)
    (sent,) = rclpy.nodes[0].publishers[0].published
    stamp = sent.header.stamp
    assert (stamp.sec, stamp.nanosec, sent.header.frame_id) == (1_700_000_000, 999_999_999, "camera_optical")


def test_a_detection_is_written_field_by_field(rclpy: Any, transport: RclpyTransport) -> None:
    transport.advertise("/out", MessageKind.DETECTIONS, Qos())
    transport.publish("/out", detections_message(RESULT))
    (found,) = rclpy.nodes[0].publishers[0].published[0].detections
    assert (found.bbox.center.position.x, found.bbox.center.position.y) == (30.0, 50.0)
    assert (found.bbox.size_x, found.bbox.size_y) == (40.0, 60.0)
    assert (found.results[0].hypothesis.class_id, found.results[0].hypothesis.score) == ("cat", 0.5)
    assert found.id == "7"
    assert found.header.frame_id == "camera_optical"


def test_a_detection_in_space_is_written_field_by_field(rclpy: Any, transport: RclpyTransport) -> None:
    transport.advertise("/out", MessageKind.DETECTIONS_3D, Qos())
    transport.publish("/out", IN_SPACE)
    (found,) = rclpy.nodes[0].publishers[0].published[0].detections
    for pose in (found.bbox.center, found.results[0].pose.pose):
        assert (pose.position.x, pose.position.y, pose.position.z) == (0.5, -0.25, 2.0)
        assert 2 * math.atan2(pose.orientation.z, pose.orientation.w) == pytest.approx(0.75)
    assert (found.bbox.size.x, found.bbox.size.y, found.bbox.size.z) == (0.1, 0.2, 0.05)
    assert (found.results[0].hypothesis.class_id, found.id, found.header.frame_id) == ("cat", "7", "camera_optical")


def test_a_mask_and_an_image_contain_their_bytes(rclpy: Any, transport: RclpyTransport) -> None:
    transport.advertise("/mask", MessageKind.IMAGE, Qos())
    transport.advertise("/drawn", MessageKind.COMPRESSED_IMAGE, Qos())
    transport.publish("/mask", mask_message(RESULT))
    transport.publish("/drawn", annotated_message(RESULT))
    mask, drawn = (publisher.published[0] for publisher in rclpy.nodes[0].publishers)
    assert (mask.height, mask.width, mask.step, mask.encoding, bytes(mask.data)) == (2, 3, 3, "mono8", bytes(6))
    assert (drawn.format, bytes(drawn.data)) == ("jpeg", b"\xff\xd8 picture")


def test_a_topic_that_was_not_advertised_is_refused(transport: RclpyTransport) -> None:
    with pytest.raises(InvalidRequest, match=r"topic '/out' was not advertised for vision_msgs/msg/Detection2DArray"):
        transport.publish("/out", detections_message(RESULT))
    transport.advertise("/out", MessageKind.IMAGE, Qos())
    with pytest.raises(InvalidRequest, match="was not advertised"):
        transport.publish("/out", detections_message(RESULT))


def test_nothing_is_published_after_ros_has_shut_down(rclpy: Any, transport: RclpyTransport) -> None:
    transport.advertise("/out", MessageKind.DETECTIONS, Qos())
    (node,) = rclpy.nodes
    node.context.try_shutdown()
    transport.publish("/out", detections_message(RESULT))
    assert node.publishers[0].published == []


def test_an_invalid_topic_name_is_an_error_of_the_caller(transport: RclpyTransport) -> None:
    with pytest.raises(InvalidRequest, match="ROS does not allow that name"):
        transport.advertise("/no spaces", MessageKind.IMAGE, Qos())


def test_an_old_vision_msgs_is_named(rclpy: Any) -> None:
    with pytest.raises(Unsupported, match="has no Classification3D; version 4 of vision_msgs is needed"):
        message_class("vision_msgs/msg/Classification3D")


def test_a_silent_topic_is_explained_by_its_publishers(rclpy: Any, transport: RclpyTransport) -> None:
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)
    assert "no publisher of it: no other node is seen in ROS domain 42" in transport.explain_silence("/image")
    camera = rclpy.create_node("camera", context=transport._context)
    assert "other nodes are seen in ROS domain 42, but none publishes it" in transport.explain_silence("/image")
    profile = transport._profile(Qos("SENSOR_DATA"))
    camera.create_publisher(message_class("sensor_msgs/msg/CompressedImage"), "/image", profile)
    expected = "CompressedImage, expected sensor_msgs/msg/Image (--image-topic needs --compressed)"
    assert expected in transport.explain_silence("/image")
    camera.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", profile)
    assert "QoS mismatch" in transport.explain_silence("/image")
    camera.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", transport._profile(Qos()))
    assert "sends nothing" in transport.explain_silence("/image")
    camera.destroy_node()


def test_rclpy_from_a_package_index_needs_no_setup_bash(rclpy: Any, caplog: pytest.LogCaptureFixture) -> None:
    open_transport("eyes", {}).close()
    assert caplog.text == ""


def test_without_ros2_the_error_names_what_to_source() -> None:
    with pytest.raises(Unsupported, match=r"source the setup\.bash of ROS 2"):
        open_transport("eyes", {})
