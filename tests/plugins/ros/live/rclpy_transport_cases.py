"""Cases of the rclpy transport on a real rclpy, with a peer in the same process. test_live_rclpy_transport.py runs them
with the Python of rclpy."""

from __future__ import annotations

import array
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rclpy
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    Detection3DMessage,
    Detections3DMessage,
    DiagnosticLevel,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    LabelInfoMessage,
    MessageKind,
    VisionInfoMessage,
    annotated_message,
    classification_message,
    detections_message,
    make_frame,
    mask_message,
)
from edge_server.plugins.ros.transports.rclpy_transport import RclpyTransport, message_class, open_transport
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import ClassScore, Detection, FrameHeader, FrameResult, Mask

HEADER = FrameHeader(sec=1_700_000_000, nanosec=999_999_999, frame_id="camera_optical", seq=7)
RESULT = FrameResult(
    HEADER,
    detections=(Detection(10, 20, 50, 80, 0.5, 3, "cat", track_id=7),),
    classes=(ClassScore(3, 0.75, "cat"), ClassScore(1, 0.25)),
    mask=Mask(2, 3, "mono8", bytes(range(6))),
    annotated_jpeg=b"\xff\xd8 picture",
)
IN_SPACE = Detections3DMessage(
    HEADER, (Detection3DMessage(0.5, -0.25, 2.0, 0.1, 0.2, 0.05, 0.75, HypothesisMessage("cat", 0.5), "7"),)
)
STATUS = DiagnosticStatus(DiagnosticLevel.WARN, "eyes: frames", "hot", "box:8001", {"rate": "9.5"})
LIMIT_S = 60.0


@pytest.fixture
def transport() -> Iterator[RclpyTransport]:
    transport = RclpyTransport("eyes")
    yield transport
    transport.close()


@pytest.fixture
def peer() -> Iterator[Any]:
    """Another node, whose callbacks run on a thread."""
    context = Context()
    rclpy.init(context=context)
    node = rclpy.create_node("peer", context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)

    def spin() -> None:
        try:
            executor.spin()
        except ExternalShutdownException:
            return

    thread = threading.Thread(target=spin)
    thread.start()
    yield node
    executor.shutdown()
    rclpy.try_shutdown(context=context)
    thread.join()
    node.destroy_node()


def wait_for(is_so: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + LIMIT_S
    while not (value := is_so()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return value


def publish_once(transport: RclpyTransport, peer: Any, message: Any) -> Any:
    """Return the message that the peer gets."""
    heard: list[Any] = []
    topic = f"/out_{message.kind.name.lower()}"
    peer.create_subscription(message_class(message.kind.value), topic, heard.append, 1)
    transport.advertise(topic, message.kind, Qos())
    wait_for(lambda: peer.get_publishers_info_by_topic(topic))

    def publish() -> bool:
        transport.publish(topic, message)
        time.sleep(0.05)
        return bool(heard)

    wait_for(publish)
    return heard[0]


def test_the_node_has_its_own_context_and_installs_no_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    transport = RclpyTransport("eyes")
    assert not rclpy.ok()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    transport.close()


def test_closing_destroys_everything_the_transport_created(peer: Any) -> None:
    transport = RclpyTransport()
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    wait_for(lambda: (peer.count_subscribers("/image"), peer.count_publishers("/found")) == (1, 1))
    transport.close()
    wait_for(lambda: (peer.count_subscribers("/image"), peer.count_publishers("/found")) == (0, 0))


def test_a_given_node_is_kept_when_the_transport_is_closed(peer: Any) -> None:
    transport = RclpyTransport(node=peer)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)
    transport.close()
    wait_for(lambda: (peer.count_subscribers("/image"), peer.count_publishers("/found")) == (0, 0))
    assert peer.context.ok()
    assert peer.get_name() == "peer"


@pytest.mark.parametrize(
    ("qos", "reliability", "durability"),
    [
        (Qos(), ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE),
        (Qos("SENSOR_DATA", 1), ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE),
        (Qos(is_transient_local=True), ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL),
    ],
)
def test_other_nodes_see_the_quality_of_service(
    transport: RclpyTransport, peer: Any, qos: Qos, reliability: Any, durability: Any
) -> None:
    transport.advertise("/found", MessageKind.DETECTIONS, qos)
    (info,) = wait_for(lambda: peer.get_publishers_info_by_topic("/found"))
    assert (info.qos_profile.reliability, info.qos_profile.durability) == (reliability, durability)
    assert info.topic_type == "vision_msgs/msg/Detection2DArray"


def test_the_image_callback_gets_the_pixels_without_a_copy_until_it_is_ended(
    transport: RclpyTransport, peer: Any
) -> None:
    heard: list[Any] = []
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), heard.append)
    sent = message_class("sensor_msgs/msg/Image")()
    sent.header.stamp.sec, sent.header.stamp.nanosec, sent.header.frame_id = 5, 6, "cam"
    sent.height, sent.width, sent.step, sent.encoding = 2, 3, 12, "bgr8"
    sent.data = array.array("B", range(24))
    publisher = peer.create_publisher(type(sent), "/image", 1)

    def receive() -> bool:
        publisher.publish(sent)
        return transport.spin(0.05) and bool(heard)

    wait_for(receive)
    frame = make_frame(heard[0], seq=1)
    assert (frame.header.sec, frame.header.nanosec, frame.header.frame_id) == (5, 6, "cam")
    assert (frame.height, frame.width, frame.step, frame.encoding) == (2, 3, 12, "bgr8")
    assert frame.data.obj is heard[0].data
    assert bytes(frame.data) == bytes(range(24))
    transport.unsubscribe("/image")
    wait_for(lambda: peer.count_subscribers("/image") == 0)


def test_every_kind_of_message_arrives_with_its_fields(transport: RclpyTransport, peer: Any) -> None:
    messages = [
        detections_message(RESULT), classification_message(RESULT), annotated_message(RESULT), mask_message(RESULT),
        IN_SPACE, VisionInfoMessage(HEADER, "finder", "/labels", 3), LabelInfoMessage(HEADER, ("cup", "ø")),
        DiagnosticsMessage(HEADER, (STATUS,)),
    ]  # fmt: skip
    found, kinds, drawn, mask, in_space, info, labels, health = [
        publish_once(transport, peer, message) for message in messages
    ]
    for message in (found, kinds, drawn, mask, in_space, info, labels, health):
        stamp = message.header.stamp
        assert (stamp.sec, stamp.nanosec, message.header.frame_id) == (1_700_000_000, 999_999_999, "camera_optical")
    (box,) = found.detections
    assert (box.bbox.center.position.x, box.bbox.center.position.y) == (30.0, 50.0)
    assert (box.bbox.size_x, box.bbox.size_y, box.id) == (40.0, 60.0, "7")
    assert (box.results[0].hypothesis.class_id, box.results[0].hypothesis.score) == ("cat", 0.5)
    assert [(one.class_id, one.score) for one in kinds.results] == [("cat", 0.75), ("1", 0.25)]
    assert (drawn.format, bytes(drawn.data)) == ("jpeg", b"\xff\xd8 picture")
    assert (mask.height, mask.width, mask.step, mask.encoding, bytes(mask.data)) == (2, 3, 3, "mono8", bytes(range(6)))
    center = in_space.detections[0].bbox.center
    assert (center.position.x, center.position.y, center.position.z) == (0.5, -0.25, 2.0)
    assert 2 * math.atan2(center.orientation.z, center.orientation.w) == pytest.approx(0.75)
    assert (info.method, info.database_location, info.database_version) == ("finder", "/labels", 3)
    assert [(one.class_id, one.class_name) for one in labels.class_map] == [(0, "cup"), (1, "ø")]
    (status,) = health.status
    assert (status.level, status.name, status.message, status.hardware_id) == (b"\1", "eyes: frames", "hot", "box:8001")
    assert [(pair.key, pair.value) for pair in status.values] == [("rate", "9.5")]


def test_images_come_while_a_service_works_and_its_error_is_raised(transport: RclpyTransport, peer: Any) -> None:
    kind = message_class("edge_server_interfaces/srv/SetModel")
    has_begun, may_go = threading.Event(), threading.Event()

    def change(request: Any) -> dict[str, object]:
        if request.model_name == "bug":
            raise KeyError("a bug")
        has_begun.set()
        assert may_go.wait(LIMIT_S)
        return {"success": True, "message": f"{request.model_name} {request.model_version}"}

    transport.serve("~/set_model", "edge_server_interfaces/srv/SetModel", change)
    client = peer.create_client(kind, "/eyes/set_model")
    assert client.wait_for_service(LIMIT_S)
    answer = client.call_async(kind.Request(model_name="yolox", model_version=3))
    wait_for(lambda: transport.spin(0.05) and has_begun.is_set())
    heard: list[Any] = []
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), heard.append)
    publisher = peer.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", 1)

    def receive() -> bool:
        publisher.publish(message_class("sensor_msgs/msg/Image")())
        return transport.spin(0.05) and len(heard) >= 3

    wait_for(receive)
    assert not answer.done()
    may_go.set()
    wait_for(lambda: transport.spin(0.05) and answer.done())
    assert (answer.result().success, answer.result().message) == (True, "yolox 3")
    client.call_async(kind.Request(model_name="bug"))
    with pytest.raises(KeyError, match="a bug"):
        wait_for(lambda: not transport.spin(0.05))


def test_a_service_whose_package_is_missing_is_refused(transport: RclpyTransport) -> None:
    with pytest.raises(Unsupported, match=r"needs no_such_interfaces\.srv"):
        transport.serve("~/set_model", "no_such_interfaces/srv/SetModel", lambda request: {})


def test_a_topic_that_was_not_advertised_is_refused(transport: RclpyTransport) -> None:
    with pytest.raises(InvalidRequest, match=r"topic '/out' was not advertised for vision_msgs/msg/Detection2DArray"):
        transport.publish("/out", detections_message(RESULT))
    transport.advertise("/out", MessageKind.IMAGE, Qos())
    with pytest.raises(InvalidRequest, match="was not advertised"):
        transport.publish("/out", detections_message(RESULT))


def test_spinning_and_publishing_end_with_the_context(peer: Any) -> None:
    transport = RclpyTransport("eyes")
    transport.advertise("/out", MessageKind.DETECTIONS, Qos())
    assert transport.spin(0.01)
    rclpy.shutdown(context=transport._context)
    assert not transport.spin(0.01)
    transport.publish("/out", detections_message(RESULT))
    transport.close()


def test_an_invalid_topic_name_is_an_error_of_the_caller(transport: RclpyTransport) -> None:
    with pytest.raises(InvalidRequest, match="ROS does not allow that name"):
        transport.advertise("/no spaces", MessageKind.IMAGE, Qos())


def test_an_old_vision_msgs_is_named() -> None:
    with pytest.raises(Unsupported, match="has no Detection9D; version 4 of vision_msgs is needed"):
        message_class("vision_msgs/msg/Detection9D")


def test_a_silent_topic_is_explained_by_its_publishers(transport: RclpyTransport, peer: Any) -> None:
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)

    def explains(text: str) -> Callable[[], bool]:
        return lambda: text in transport.explain_silence("/image")

    wait_for(explains(f"other nodes are seen in ROS domain {peer.context.get_domain_id()}, but none publishes it"))
    compressed = peer.create_publisher(message_class("sensor_msgs/msg/CompressedImage"), "/image", 1)
    wait_for(explains("CompressedImage, expected sensor_msgs/msg/Image (--image-topic needs --compressed)"))
    peer.destroy_publisher(compressed)
    best_effort = rclpy.qos.QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    peer.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", best_effort)
    wait_for(explains("QoS mismatch"))
    peer.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", 1)
    wait_for(explains("sends nothing"))


def test_rclpy_from_a_package_index_needs_no_setup_bash(caplog: pytest.LogCaptureFixture) -> None:
    open_transport("eyes", {}).close()
    assert caplog.text == ""
