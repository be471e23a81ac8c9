"""What each transport to ROS promises, between two nodes of its own kind: messages, names, silence, errors, the end.

DDS and Zenoh run here; live/test_live_rclpy_transport.py runs this file for rclpy, with the Python of rclpy.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from edge_server.errors import InvalidRequest, NotFound
from edge_server.plugins.ros.messages.message_conversion import (
    Detection3DMessage,
    Detections3DMessage,
    DiagnosticLevel,
    DiagnosticsMessage,
    DiagnosticStatus,
    HypothesisMessage,
    ImageMessage,
    LabelInfoMessage,
    MessageKind,
    OutgoingMessage,
    VisionInfoMessage,
    annotated_message,
    classification_message,
    detections_message,
    make_frame,
)
from edge_server.plugins.ros.transports.transport import TRANSPORTS, Qos
from edge_server.protocol.frame_messages import ClassScore, Detection, FrameHeader, FrameResult
from tests.kit.eventually import eventually

pytestmark = pytest.mark.full

KINDS = os.environ.get("EDGE_TEST_ROS_TRANSPORTS", "dds zenoh").split()
TOPIC = "/camera/image_raw"
ALL = Qos(depth=1000)


class Nodes:
    """Transports of one kind in one ROS domain, with a thread for each that runs its callbacks."""

    def __init__(self, kind: str, environment: dict[str, str]) -> None:
        self.kind = kind
        self._module, self._environment = importlib.import_module(TRANSPORTS[kind]), environment
        self._opened: dict[Any, contextlib.ExitStack] = {}

    def open(self, name: str) -> Any:
        transport, stack = self._module.open_transport(name, self._environment), contextlib.ExitStack()
        stack.callback(transport.close)
        self._opened[transport] = stack
        return transport

    def spin(self, transport: Any) -> list[Exception]:
        """Run callbacks from now until the transport is closed; return a list for the error that ends this."""
        is_done, errors = threading.Event(), []

        def run() -> None:
            try:
                while not is_done.is_set() and transport.spin(0.05):
                    pass
            except Exception as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._opened[transport].callback(thread.join)
        self._opened[transport].callback(is_done.set)
        return errors

    def close(self, transport: Any) -> None:
        self._opened.pop(transport).close()

    def close_all(self) -> None:
        for transport in tuple(self._opened):
            self.close(transport)


@pytest.fixture(params=KINDS)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    kind, environment = str(request.param), dict(os.environ)
    if kind != "rclpy":
        environment |= request.getfixturevalue("ros_domain")
    if kind == "zenoh":
        environment |= request.getfixturevalue("zenoh_router").environment
    before = set(threading.enumerate())
    made = Nodes(kind, environment)
    yield made
    made.close_all()
    assert not set(threading.enumerate()) - before


def picture(number: int) -> ImageMessage:
    return ImageMessage(FrameHeader(sec=number, frame_id="camera"), 2, 4, "mono8", 4, bytes([number % 256]) * 8)


class Pair:
    """A sender and a receiver of pictures that have found each other. `heard` is empty."""

    def __init__(self, nodes: Nodes, qos: Qos = ALL) -> None:
        self.sender, self.receiver = nodes.open("sender"), nodes.open("receiver")
        self.heard: list[Any] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.sender.advertise(TOPIC, MessageKind.IMAGE, Qos(qos.profile, 1000))
        self.sender.subscribe("/other", MessageKind.IMAGE, Qos(), print)
        self.receiver.subscribe(TOPIC, MessageKind.IMAGE, qos, self._hear)
        self.errors = nodes.spin(self.receiver)
        self.connect(self.sender)

    def _hear(self, message: Any) -> None:
        self.heard.append(message)
        assert self.may_go_on.wait(60)

    def connect(self, sender: Any) -> None:
        """Send number 0 until it is heard, and a last number; forget them."""
        assert eventually(lambda: sender.publish(TOPIC, picture(0)) or self.heard)
        sender.publish(TOPIC, picture(1000))
        assert eventually(lambda: self.numbers()[-1] == 1000)
        self.heard.clear()

    def numbers(self) -> list[int]:
        return [message.header.stamp.sec for message in self.heard]


HEADER = FrameHeader(sec=1_700_000_000, nanosec=999_999_999, frame_id="camera/ø")
CAT = Detection(10, 20, 50, 80, 0.5, 3, "cat", track_id=7)
CLASSES = (ClassScore(3, 0.75, "cat"), ClassScore(1, 0.25))
IN_SPACE = Detection3DMessage(0.5, -0.25, 2.0, 0.1, 0.2, 0.05, 0.75, HypothesisMessage("cat", 0.5), "7")
STATUS = DiagnosticStatus(DiagnosticLevel.WARN, "eyes: frames", "hot", "box:8001", {"rate": "9.5"})
RESULT = FrameResult(HEADER, detections=(CAT,), classes=CLASSES, annotated_jpeg=b"\xff\xd8 picture")


def test_every_kind_of_message_arrives_with_its_fields(nodes: Nodes) -> None:
    sender, receiver, heard = nodes.open("sender"), nodes.open("receiver"), dict[MessageKind, Any]()
    messages: list[OutgoingMessage | None] = [
        ImageMessage(HEADER, 2, 3, "bgr8", 12, bytes(range(24))), detections_message(RESULT),
        classification_message(RESULT), annotated_message(RESULT), Detections3DMessage(HEADER, (IN_SPACE,)),
        VisionInfoMessage(HEADER, "finder", "/labels", 3), LabelInfoMessage(HEADER, ("cup", "ø")),
        DiagnosticsMessage(HEADER, (STATUS,)),
    ]  # fmt: skip
    for message in messages:
        sender.advertise(f"/{message.kind.name}", message.kind, Qos())
        hear = lambda found, kind=message.kind: heard.setdefault(kind, found)  # noqa: E731
        receiver.subscribe(f"/{message.kind.name}", message.kind, Qos(), hear)
    nodes.spin(receiver)
    for message in messages:
        assert eventually(
            lambda message=message: sender.publish(f"/{message.kind.name}", message) or message.kind in heard
        )
    for found in heard.values():
        stamp = found.header.stamp
        assert (stamp.sec, stamp.nanosec, found.header.frame_id) == (1_700_000_000, 999_999_999, "camera/ø")
    image, boxes, kinds, drawn, in_space, info, labels, health = (heard[message.kind] for message in messages)
    frame = make_frame(image)
    assert (frame.height, frame.width, frame.step, frame.encoding) == (2, 3, 12, "bgr8")
    assert bytes(frame.data) == bytes(range(24))
    (box,) = boxes.detections
    assert (box.bbox.center.position.x, box.bbox.center.position.y) == (30.0, 50.0)
    assert (box.bbox.size_x, box.bbox.size_y, box.id) == (40.0, 60.0, "7")
    assert (box.results[0].hypothesis.class_id, box.results[0].hypothesis.score) == ("cat", 0.5)
    assert [(one.class_id, one.score) for one in kinds.results] == [("cat", 0.75), ("1", 0.25)]
    assert (drawn.format, bytes(drawn.data)) == ("jpeg", b"\xff\xd8 picture")
    center = in_space.detections[0].bbox.center
    assert (center.position.x, center.position.y, center.position.z) == (0.5, -0.25, 2.0)
    assert 2 * math.atan2(center.orientation.z, center.orientation.w) == pytest.approx(0.75)
    assert (info.method, info.database_location, info.database_version) == ("finder", "/labels", 3)
    assert [(one.class_id, one.class_name) for one in labels.class_map] == [(0, "cup"), (1, "ø")]
    (status,) = health.status
    # rclpy has a byte, others its number.
    assert status.level in (1, b"\1")
    assert (status.name, status.message, status.hardware_id) == ("eyes: frames", "hot", "box:8001")
    assert [(pair.key, pair.value) for pair in status.values] == [("rate", "9.5")]


def test_reliable_messages_arrive_once_in_order_and_their_memory_stays_theirs(nodes: Nodes) -> None:
    pair = Pair(nodes)
    for number in range(1, 301):
        pair.sender.publish(TOPIC, picture(number))
    assert eventually(lambda: pair.numbers()[-1:] == [300])
    assert pair.numbers() == list(range(1, 301))
    assert [bytes(message.data) for message in pair.heard] == [bytes([n % 256]) * 8 for n in range(1, 301)]


def test_for_a_slow_callback_the_newest_messages_wait_and_older_ones_are_dropped(nodes: Nodes) -> None:
    pair = Pair(nodes, Qos("SENSOR_DATA", 2))
    pair.may_go_on.clear()
    pair.sender.publish(TOPIC, picture(1))
    assert eventually(lambda: pair.numbers() == [1])
    for number in range(2, 101):
        pair.sender.publish(TOPIC, picture(number))
    # A question about the graph is answered after the messages before it.
    pair.sender.explain_silence("/other")
    pair.may_go_on.set()
    assert eventually(lambda: pair.numbers()[-1] == 100)
    assert pair.numbers() == [1, 99, 100]


def test_messages_of_several_threads_arrive_each_once(nodes: Nodes) -> None:
    pair = Pair(nodes)

    def publish(first: int) -> None:
        for number in range(first, first + 50):
            pair.sender.publish(TOPIC, picture(number))

    threads = [threading.Thread(target=publish, args=(first,)) for first in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: len(pair.heard) == 150)
    assert sorted(pair.numbers()) == [*range(100, 150), *range(200, 250), *range(300, 350)]


def test_a_sender_that_went_and_came_back_is_heard_again(nodes: Nodes) -> None:
    pair = Pair(nodes)
    for _ in range(3):
        nodes.close(pair.sender)
        assert eventually(lambda: "no other node is seen" in pair.receiver.explain_silence(TOPIC))
        pair.sender = nodes.open("sender")
        pair.sender.advertise(TOPIC, MessageKind.IMAGE, ALL)
        pair.connect(pair.sender)


def test_late_subscribers_get_the_last_messages_of_a_transient_local_topic(nodes: Nodes) -> None:
    sender, receiver, heard = nodes.open("sender"), nodes.open("receiver"), []
    qos = Qos(depth=2, is_transient_local=True)
    sender.advertise(TOPIC, MessageKind.IMAGE, qos)
    for number in range(5):
        sender.publish(TOPIC, picture(number))
    receiver.subscribe(TOPIC, MessageKind.IMAGE, qos, lambda message: heard.append(message.header.stamp.sec))
    nodes.spin(receiver)
    assert eventually(lambda: len(heard) == 2)
    sender.publish(TOPIC, picture(9))
    assert eventually(lambda: len(heard) == 3)
    assert heard == [3, 4, 9]


def test_a_topic_must_be_advertised_for_the_kind_of_its_messages(nodes: Nodes) -> None:
    transport = nodes.open("sender")
    for _ in range(2):
        with pytest.raises(NotFound, match=f"topic '{TOPIC}' was not advertised for sensor_msgs/msg/Image"):
            transport.publish(TOPIC, picture(1))
        transport.advertise(TOPIC, MessageKind.DETECTIONS, Qos())


@pytest.mark.parametrize("name", ["/no spaces", "/a/**", "//a", ""])
def test_names_that_ros_refuses_are_refused(nodes: Nodes, name: str) -> None:
    transport = nodes.open("sender")
    with pytest.raises(InvalidRequest, match="ROS"):
        transport.advertise(name, MessageKind.IMAGE, Qos())
    with pytest.raises(InvalidRequest, match="ROS"):
        transport.subscribe(name, MessageKind.IMAGE, Qos(), print)


def test_an_error_of_a_callback_is_raised_by_spin(nodes: Nodes) -> None:
    pair = Pair(nodes)
    pair.heard = None  # type: ignore[assignment]
    assert eventually(lambda: pair.sender.publish(TOPIC, picture(1)) or pair.errors)
    assert "'NoneType' object has no attribute 'append'" in str(pair.errors[0])


def test_silence_is_explained_by_what_other_nodes_publish(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    receiver = nodes.open("receiver")
    receiver.subscribe(TOPIC, MessageKind.IMAGE, Qos(), print)

    def explains(text: str) -> bool:
        return eventually(lambda: text in receiver.explain_silence(TOPIC))

    assert explains("no other node is seen")
    sender = nodes.open("sender")
    sender.advertise("/front", MessageKind.IMAGE, Qos())
    assert explains("other nodes are seen in ROS domain")
    # rclpy looks at the topic alone.
    elsewhere = "" if nodes.kind == "rclpy" else "; sensor_msgs/msg/Image is published on /front"
    assert explains(f"but none publishes it{elsewhere}")
    other = nodes.open("other")
    other.advertise(TOPIC, MessageKind.COMPRESSED_IMAGE, Qos())
    assert explains("sends sensor_msgs/msg/CompressedImage, expected sensor_msgs/msg/Image (--image-topic needs --comp")
    nodes.close(other)
    assert explains("but none publishes it")
    # Zenoh has no such mismatch.
    if nodes.kind != "zenoh":
        careless = nodes.open("careless")
        careless.advertise(TOPIC, MessageKind.IMAGE, Qos("SENSOR_DATA", 1))
        assert explains("QoS mismatch: its publisher is best effort, expected reliable (--input-qos=SENSOR_DATA fits b")
        assert nodes.kind == "rclpy" or "a publisher does not match for its reliability" in caplog.text
    sender.advertise(TOPIC, MessageKind.IMAGE, Qos())
    assert explains("sends nothing")
