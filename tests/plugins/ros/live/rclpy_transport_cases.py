"""What the rclpy transport alone promises, on a real rclpy, with a peer in the same process.

test_live_rclpy_transport.py runs these cases with the Python of rclpy.
"""

from __future__ import annotations

import array
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import rclpy
from rclpy.context import Context
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

from edge_server.errors import Unsupported
from edge_server.plugins.ros.messages.message_conversion import (
    MessageKind,
    detections_message,
    make_frame,
)
from edge_server.plugins.ros.transports.rclpy_transport import RclpyTransport, message_class, open_transport
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.protocol.frame_messages import FrameHeader, FrameResult
from tests.kit.eventually import eventually


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


def test_the_node_has_its_own_context_and_installs_no_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    transport = RclpyTransport("eyes")
    assert not rclpy.ok()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    transport.close()


def test_a_given_node_is_kept_when_the_transport_is_closed(peer: Any) -> None:
    transport = RclpyTransport(node=peer)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), lambda message: None)
    transport.close()
    assert eventually(lambda: (peer.count_subscribers("/image"), peer.count_publishers("/found")) == (0, 0))
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
    assert eventually(lambda: peer.get_publishers_info_by_topic("/found"))
    (info,) = peer.get_publishers_info_by_topic("/found")
    assert (info.qos_profile.reliability, info.qos_profile.durability) == (reliability, durability)
    assert info.topic_type == "vision_msgs/msg/Detection2DArray"


def test_the_image_callback_gets_the_pixels_without_a_copy_until_it_is_ended(
    transport: RclpyTransport, peer: Any
) -> None:
    heard: list[Any] = []
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), heard.append)
    sent = message_class("sensor_msgs/msg/Image")(height=2, width=3, step=12, data=array.array("B", range(24)))
    publisher = peer.create_publisher(type(sent), "/image", 1)
    assert eventually(lambda: publisher.publish(sent) or (transport.spin(0.05) and heard))
    assert make_frame(heard[0], seq=1).data.obj is heard[0].data
    transport.unsubscribe("/image")
    assert eventually(lambda: peer.count_subscribers("/image") == 0)


def test_images_come_while_a_service_works_and_its_error_is_raised(transport: RclpyTransport, peer: Any) -> None:
    kind = message_class("edge_server_interfaces/srv/SetModel")
    has_begun, may_go = threading.Event(), threading.Event()

    def change(request: Any) -> dict[str, object]:
        if request.model_name == "bug":
            raise KeyError("a bug")
        has_begun.set()
        assert may_go.wait(60)
        return {"success": True, "message": f"{request.model_name} {request.model_version}"}

    transport.serve("~/set_model", "edge_server_interfaces/srv/SetModel", change)
    client = peer.create_client(kind, "/eyes/set_model")
    assert client.wait_for_service(60.0)
    answer = client.call_async(kind.Request(model_name="yolox", model_version=3))
    assert eventually(lambda: transport.spin(0.05) and has_begun.is_set())
    heard: list[Any] = []
    transport.subscribe("/image", MessageKind.IMAGE, Qos(), heard.append)
    publisher = peer.create_publisher(message_class("sensor_msgs/msg/Image"), "/image", 1)

    def receive() -> bool:
        publisher.publish(message_class("sensor_msgs/msg/Image")())
        return transport.spin(0.05) and len(heard) >= 3

    assert eventually(receive)
    assert not answer.done()
    may_go.set()
    assert eventually(lambda: transport.spin(0.05) and answer.done())
    assert (answer.result().success, answer.result().message) == (True, "yolox 3")
    client.call_async(kind.Request(model_name="bug"))
    with pytest.raises(KeyError, match="a bug"):
        assert eventually(lambda: not transport.spin(0.05))


def test_a_service_whose_package_is_missing_is_refused(transport: RclpyTransport) -> None:
    with pytest.raises(Unsupported, match=r"needs no_such_interfaces\.srv"):
        transport.serve("~/set_model", "no_such_interfaces/srv/SetModel", lambda request: {})


def test_spinning_and_publishing_end_with_the_context(peer: Any) -> None:
    transport = RclpyTransport("eyes")
    transport.advertise("/out", MessageKind.DETECTIONS, Qos())
    assert transport.spin(0.01)
    rclpy.shutdown(context=transport._context)
    assert not transport.spin(0.01)
    transport.publish("/out", detections_message(FrameResult(FrameHeader())))
    transport.close()


def test_an_old_vision_msgs_is_named() -> None:
    with pytest.raises(Unsupported, match="has no Detection9D; version 4 of vision_msgs is needed"):
        message_class("vision_msgs/msg/Detection9D")


def test_rclpy_from_a_package_index_needs_no_setup_bash(caplog: pytest.LogCaptureFixture) -> None:
    open_transport("eyes", {}).close()
    assert caplog.text == ""
