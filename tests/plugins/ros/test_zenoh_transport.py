"""The Zenoh transport among nodes made of Zenoh sessions: configuration, graph, silence, and peers that break rules."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.errors import InvalidRequest, ServingFault
from edge_server.plugins.ros.depth.spatial_detections import SpatialDetections
from edge_server.plugins.ros.messages.message_conversion import (
    CompressedImageMessage,
    DetectionsMessage,
    ImageMessage,
    MessageKind,
)
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.plugins.ros.transports.zenoh_transport import (
    MAX_MESSAGE_BYTES,
    ZenohTransport,
    open_transport,
    router_checks,
    session_configuration,
)
from edge_server.protocol.frame_messages import Detection, FrameHeader, FrameResult
from tests.plugins.ros.conftest import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("zenoh", "rosbags", "xxhash")),
        reason="needs eclipse-zenoh, rosbags and xxhash: pip install '.[zenoh]'",
    ),
]

LIMIT_S = 60.0
DOMAIN = 7
TOPIC = "/camera/image_raw"
IMAGE_KEY = (
    f"{DOMAIN}/camera/image_raw/sensor_msgs::msg::dds_::Image_/"
    "RIHS01_d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47"
)


def _block() -> Any:
    """Nothing that a test sends is dropped on its way."""
    import zenoh

    return zenoh.CongestionControl.BLOCK


def attachment(number: int) -> bytes:
    return struct.pack("<qqB16s", number, time.time_ns(), 16, bytes(16))


def picture(number: int, types: MessageTypes) -> bytes:
    header = FrameHeader(sec=number, nanosec=0, frame_id="camera")
    return types.encode(ImageMessage(header, 2, 4, "mono8", 4, bytes([number % 256]) * 8))


@pytest.fixture
def environment(zenoh_router: Any) -> dict[str, str]:
    return {"ROS_DOMAIN_ID": str(DOMAIN), **zenoh_router.environment}


@pytest.fixture
def transport(environment: dict[str, str]) -> Iterator[ZenohTransport]:
    opened = open_transport("edge_server_bridge", environment)
    yield opened
    opened.close()


@pytest.fixture
def node(environment: dict[str, str]) -> Iterator[Any]:
    """A session of another program."""
    import zenoh

    with zenoh.open(session_configuration(environment)) as session:
        wait_until(lambda: bool(session.info.routers_zid()), "the router")
        yield session


@contextlib.contextmanager
def spinning(transport: ZenohTransport) -> Iterator[list[Exception]]:
    """Spin on a thread meanwhile; yields the errors that end it."""
    is_done, errors = threading.Event(), []

    def run() -> None:
        try:
            while not is_done.is_set() and transport.spin(0.05):
                pass
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        is_done.set()
        thread.join()


def graph_of(session: Any) -> set[str]:
    return {str(reply.ok.key_expr) for reply in session.liveliness().get("@ros2_lv/**", timeout=1.0)}


def test_defaults_are_those_of_rmw_zenoh() -> None:
    found = session_configuration({})
    assert json.loads(found.get_json("mode")) == "peer"
    assert json.loads(found.get_json("connect/endpoints")) == ["tcp/localhost:7447"]
    assert json.loads(found.get_json("listen/endpoints")) == ["tcp/localhost:0"]
    assert json.loads(found.get_json("scouting/multicast/enabled")) is False
    assert json.loads(found.get_json("scouting/gossip/target"))["peer"] == ["router"]
    assert json.loads(found.get_json("transport/link/rx/max_message_size")) == MAX_MESSAGE_BYTES


def test_a_file_and_overrides_configure_the_session(tmp_path: Path) -> None:
    file = tmp_path / "session.json5"
    file.write_text('{mode: "client", connect: {endpoints: ["tcp/robot:7447"]}}  // a comment')
    found = session_configuration({
        "ZENOH_SESSION_CONFIG_URI": str(file),
        "ZENOH_CONFIG_OVERRIDE": 'connect/endpoints=["tcp/arm:7447"];scouting/multicast/enabled=false;',
    })  # fmt: skip
    assert json.loads(found.get_json("mode")) == "client"
    assert json.loads(found.get_json("connect/endpoints")) == ["tcp/arm:7447"]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ZENOH_SESSION_CONFIG_URI", "/no/such/file.json5", "'/no/such/file.json5' is no configuration of Zenoh"),
        ("ZENOH_CONFIG_OVERRIDE", "connect/endpoint=[]", "expected KEY=VALUE .* got 'connect/endpoint=\\[\\]'"),
        ("ZENOH_CONFIG_OVERRIDE", "mode=client", "got 'mode=client'"),
        ("ZENOH_CONFIG_OVERRIDE", "mode", "got 'mode'"),
    ],
)
def test_a_wrong_configuration_is_refused(variable: str, value: str, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{variable}: .*{expected}"):
        session_configuration({variable: value})


@pytest.mark.parametrize(("given", "expected"), [("", 1), ("3", 3), ("0", math.inf), ("-1", -1)])
def test_router_checks_are_those_of_the_variable(given: str, expected: float) -> None:
    assert router_checks({"ZENOH_ROUTER_CHECK_ATTEMPTS": given}) == expected


@pytest.mark.parametrize(
    ("variable", "value"), [("ROS_DOMAIN_ID", "seven"), ("ROS_DOMAIN_ID", "-1"), ("ZENOH_ROUTER_CHECK_ATTEMPTS", "x")]
)
def test_what_is_no_number_is_refused(variable: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{variable}: expected a number, got '{value}'"):
        open_transport("bridge", {variable: value})


def test_a_name_of_a_node_that_ros_refuses_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="a node's name has letters, digits and '_' and no digit first, got '1/x'"):
        open_transport("1/x", environment)


def test_a_client_without_a_router_is_told_where_it_was_expected(free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    override = f'mode="client";connect/endpoints=["tcp/127.0.0.1:{port}"]'
    with pytest.raises(ServingFault, match=f"no Zenoh session can be opened to tcp/127.0.0.1:{port}"):
        open_transport("bridge", {"ZENOH_CONFIG_OVERRIDE": override})


def matched_publisher(node: Any, key: str, **options: Any) -> Any:
    """Return a publisher that has a subscriber."""
    writer = node.declare_publisher(key, **options)
    wait_until(lambda: writer.matching_status.matching, "the subscriber")
    return writer


def test_the_graph_shows_node_publishers_and_subscribers_until_the_end(environment: dict[str, str], node: Any) -> None:
    transport = open_transport("edge_server_bridge", environment)
    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos("SENSOR_DATA", 5), print)
    shown: list[str] = []

    def is_shown() -> bool:
        shown[:] = sorted(token.split("/", 3)[3] for token in graph_of(node))
        return len(shown) == 3

    wait_until(is_shown, "the bridge in the graph")
    assert shown[0] == "0/0/NN/%/%/edge_server_bridge"
    assert shown[1].startswith(
        "0/1/MP/%/%/edge_server_bridge/%found/vision_msgs::msg::dds_::Detection2DArray_/RIHS01_214274120007"
    )
    assert shown[1].endswith("/::,10:,:,:,,")
    assert shown[2].startswith("0/2/MS/%/%/edge_server_bridge/%camera%image_raw/sensor_msgs::msg::dds_::Image_/RIHS01_")
    assert shown[2].endswith("/2::,5:,:,:,,")
    transport.close()
    wait_until(lambda: not graph_of(node), "the end of the bridge in the graph")


def test_a_message_has_its_key_number_time_and_publisher(transport: ZenohTransport, node: Any) -> None:
    from xxhash import xxh3_128_digest

    transport.advertise("/found", MessageKind.DETECTIONS, Qos())
    found = node.declare_subscriber(f"{DOMAIN}/found/*/*")
    samples: list[Any] = []

    def is_heard() -> bool:
        transport.publish("/found", DetectionsMessage(FrameHeader(sec=1, nanosec=2, frame_id="camera"), ()))
        samples.extend(iter(found.try_recv, None))
        return len(samples) >= 2

    wait_until(is_heard, "two messages")
    tokens: list[str] = []

    def is_shown() -> bool:
        tokens[:] = [one for one in graph_of(node) if "/MP/" in one]
        return len(tokens) == 1

    wait_until(is_shown, "the publisher's token")
    numbers = []
    for sample in samples:
        number, stamp_ns, size, gid = struct.unpack("<qqB16s", sample.attachment.to_bytes())
        numbers.append(number)
        assert abs(time.time_ns() - stamp_ns) < 60e9
        assert (size, gid) == (16, xxh3_128_digest(tokens[0].encode())[::-1])
        assert sample.payload.to_bytes()[:12] == bytes.fromhex("00010000 01000000 02000000")
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_positions_are_computed_from_depth_and_calibration(transport: ZenohTransport, node: Any) -> None:
    types = MessageTypes()
    made = types.store.types
    spatial = SpatialDetections(
        transport, image_topic=TOPIC, detections_topic="/found", depth_topic="/camera/depth", tolerance_ms=50
    )
    spatial.open_topics(Qos("SENSOR_DATA", 5), Qos())
    header = FrameHeader(sec=1, frame_id="camera")
    wall = np.full((48, 64), 1500, np.uint16).tobytes()
    region = made["sensor_msgs/msg/RegionOfInterest"](0, 0, 0, 0, False)
    matrix = np.array([50.0, 0, 31.5, 0, 50.0, 23.5, 0, 0, 1.0])
    info = made["sensor_msgs/msg/CameraInfo"](
        made["std_msgs/msg/Header"](made["builtin_interfaces/msg/Time"](1, 0), "camera"), 48, 64, "plumb_bob",
        np.zeros(5), matrix, np.zeros(9), np.zeros(12), 0, 0, region,
    )  # fmt: skip
    inputs = {
        "depth": (MessageKind.IMAGE, types.encode(ImageMessage(header, 48, 64, "16UC1", 128, wall))),
        "camera_info": (MessageKind.CAMERA_INFO, bytes(types.store.serialize_cdr(info, MessageKind.CAMERA_INFO.value))),
    }
    found = node.declare_subscriber(f"{DOMAIN}/found/*/*")
    cup = Detection(32, 14, 52, 34, 0.5, 3, "cup")
    samples: list[Any] = []

    def is_heard() -> bool:
        for name, (kind, data) in inputs.items():
            type_name = kind.value.replace("/msg/", "::msg::dds_::") + "_"
            node.put(
                f"{DOMAIN}/camera/{name}/{type_name}/{types.type_hash(kind.value)}", data, attachment=attachment(1)
            )
        spatial.add_result(FrameResult(header, height=48, width=64, detections=(cup,)))
        samples.extend(iter(found.try_recv, None))
        return bool(samples)

    wait_until(is_heard, "a position")
    message = types.decode(samples[0].payload.to_bytes(), MessageKind.DETECTIONS_3D.value)
    position = message.detections[0].bbox.center.position
    assert (position.x, position.y, position.z) == pytest.approx((10 / 50 * 1.5, 0.0, 1.5))
    assert (message.header.stamp.sec, message.header.frame_id) == (1, "camera")


def test_payloads_and_attachments_of_others_are_named_and_harm_nothing(
    transport: ZenohTransport, node: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "edge_server.plugins.ros.transports.zenoh_transport"
    monkeypatch.setattr(f"{module}._WARNING_INTERVAL_S", 0.0)
    monkeypatch.setattr(f"{module}.MAX_MESSAGE_BYTES", 1_000_000)
    types, got = MessageTypes(), []
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos("SENSOR_DATA", 1000), got.append)
    writer = matched_publisher(node, IMAGE_KEY, congestion_control=_block())
    whole = picture(1, types)
    writer.put(whole)
    writer.put(whole, attachment=b"\0" * 12)
    writer.put(b"", attachment=attachment(1))
    writer.put(whole[:-3], attachment=attachment(1))
    writer.put(whole[:40] + b"\xff" * 4 + whole[44:], attachment=attachment(1))
    writer.put(bytes(1_000_001), attachment=attachment(1))
    chance = np.random.default_rng(1)
    for size in chance.integers(0, 200, 200):
        writer.put(chance.bytes(int(size)), attachment=attachment(1))
    writer.put(picture(77, types), attachment=attachment(2))
    with spinning(transport) as errors:
        wait_until(lambda: bool(got) and got[-1].header.stamp.sec == 77, "the whole message")
    assert not errors
    messages = [record.message for record in caplog.records]
    for expected in (
        "/camera/image_raw: a message has no attachment, so its publisher is no node of ROS",
        "/camera/image_raw: the attachment of a message has 12 bytes and is not one of rmw_zenoh, expected 33 bytes",
        "/camera/image_raw: what came is no sensor_msgs/msg/Image",
        "/camera/image_raw: a message has 1000001 bytes, expected at most 1000000",
    ):
        assert any(message.startswith(expected) for message in messages), expected


def test_a_flood_of_wrong_messages_is_one_warning_in_some_seconds(
    transport: ZenohTransport, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Any] = []
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos("SENSOR_DATA", 5000), got.append)
    writer = matched_publisher(node, IMAGE_KEY, congestion_control=_block())
    started = time.monotonic()
    for _ in range(1000):
        writer.put(b"\0")
    writer.put(picture(1, MessageTypes()), attachment=attachment(1))
    wait_until(lambda: bool(got), "the whole message")
    warnings = [record for record in caplog.records if "no attachment" in record.message]
    assert 1 <= len(warnings) <= 1 + (time.monotonic() - started) / 5


BURST = """
import os, sys, time
import zenoh
from edge_server.plugins.ros.transports.zenoh_transport import session_configuration
key, attachment, first, last = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
picture = bytes.fromhex(sys.argv[5])
with zenoh.open(session_configuration(os.environ)) as session:
    writer = session.declare_publisher(key, congestion_control=zenoh.CongestionControl.BLOCK)
    while not writer.matching_status.matching:
        time.sleep(0.01)
    for number in range(first, last):
        # The stamp's seconds, and all pixels.
        writer.put(picture[:4] + number.to_bytes(4, "little") + picture[8:-8] + bytes([number % 256]) * 8,
                   attachment=attachment)
        print(number, flush=True)
        time.sleep(0.002)
    sys.stdin.read()
"""
"""Camera that numbers its pictures, and ends when its standard input does."""


def start_burst(environment: dict[str, str], first: int, last: int) -> subprocess.Popen[str]:
    sample = picture(0, MessageTypes())
    words = [IMAGE_KEY, attachment(1).hex(), str(first), str(last), sample.hex()]
    return subprocess.Popen(
        [sys.executable, "-c", BURST, *words], env={**os.environ, **environment}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_of_a_thousand_frames_of_a_killed_and_revived_camera_each_is_answered_rightly_or_counted(
    scripted: Callable[..., Any], environment: dict[str, str], node: Any
) -> None:
    from edge_server.plugins.ros.bridge import Bridge
    from edge_server.plugins.ros.bridge_parameters import BridgeParameters

    types, answers = MessageTypes(), []
    found = node.declare_subscriber(f"{DOMAIN}/found/*/*", lambda sample: answers.append(sample.payload.to_bytes()))
    # A queue that holds all: what the newest picture replaces is then counted by the stream alone.
    given = BridgeParameters("finder", image_topic=TOPIC, detections_topic="/found", input_queue_size=1000)
    bridge = Bridge([given], open_transport("bridge", environment), scripted(drops_each=7).address)
    stream = bridge.cameras[0]._stream
    runner = threading.Thread(target=bridge.run)
    runner.start()
    sent = 0
    with start_burst(environment, 1, 100_000) as camera:
        assert camera.stdout is not None
        while sent < 400:
            sent = int(camera.stdout.readline())
        camera.kill()
        sent = max([sent, *map(int, camera.stdout.read().split())])
    # The graph loses a killed program after its last message.
    graph_of(node)
    wait_until(lambda: _is_settled(stream), "the answers to the first camera")
    before = stream.counters().offered
    assert before <= sent
    camera = start_burst(environment, sent + 1, 1001)
    wait_until(lambda: stream.counters().offered == before + 1000 - sent, "every frame of the second camera")
    wait_until(lambda: _is_settled(stream), "the answers to the second camera")
    camera.communicate()
    now = stream.counters()
    assert now.offered == now.sent + now.dropped_here
    assert now.sent == now.answered + sum(now.dropped.values()) + now.lost
    assert now.lost == 0
    wait_until(lambda: len(answers) == now.answered, "every answer")
    messages = [types.decode(data, MessageKind.DETECTIONS.value) for data in answers]
    numbers = [message.header.stamp.sec for message in messages]
    assert numbers == sorted(set(numbers)), "each once, in order"
    assert numbers[-1] > sent
    for number, message in zip(numbers, messages, strict=True):
        assert message.detections[0].bbox.center.position.x == number % 256 + 10
    bridge.stop()
    runner.join()
    found.undeclare()


def _is_settled(stream: Any) -> bool:
    now = stream.counters()
    return now.waiting == now.in_flight == 0


def test_late_subscribers_get_the_last_messages_of_a_best_effort_topic_too(environment: dict[str, str]) -> None:
    qos = Qos("SENSOR_DATA", 2, is_transient_local=True)
    first = open_transport("camera", environment)
    first.advertise("/drawn", MessageKind.COMPRESSED_IMAGE, qos)
    for number in range(5):
        header = FrameHeader(sec=number, nanosec=0, frame_id="camera")
        first.publish("/drawn", CompressedImageMessage(header, "jpeg", b"\xff\xd8"))
    second, got = open_transport("viewer", environment), []
    second.subscribe("/drawn", MessageKind.COMPRESSED_IMAGE, qos, lambda message: got.append(message.header.stamp.sec))
    wait_until(lambda: len(got) == 2, "what was sent before")
    assert got == [3, 4]
    first.publish("/drawn", CompressedImageMessage(FrameHeader(sec=9, nanosec=0, frame_id=""), "jpeg", b"\xff\xd8"))
    wait_until(lambda: len(got) == 3, "what is sent now")
    assert got == [3, 4, 9]
    second.close()
    first.close()


def test_nodes_of_humble_are_spoken_to_without_type_hashes(environment: dict[str, str], node: Any) -> None:
    transport = open_transport("bridge", {**environment, "ROS_DISTRO": "humble"})
    got: list[Any] = []
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos(), got.append)
    writer = matched_publisher(node, f"{IMAGE_KEY.rpartition('/')[0]}/TypeHashNotSupported")
    writer.put(picture(3, MessageTypes()), attachment=attachment(1))
    wait_until(lambda: bool(got), "the message")
    assert got[0].header.stamp.sec == 3
    transport.close()


def test_a_silent_topic_is_explained_by_router_domain_or_hash(
    transport: ZenohTransport, node: Any, zenoh_router: Any, free_ports: Callable[[int], list[int]]
) -> None:
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos(), print)
    image = "sensor_msgs::msg::dds_::Image_"
    right = IMAGE_KEY.rpartition("/")[2]
    cases = [
        ("", "the router is reached, but no other node is seen in ROS domain 7: expected RMW_IMPLEMENTATION="),
        ("@ros2_lv/3/{}/0/0/NN/%/%/camera", "nodes are in domain 3: expected the same ROS_DOMAIN_ID"),
        (f"@ros2_lv/7/{{}}/0/3/MP/%/%/camera/%camera%image_raw/{image}/TypeHashNotSupported/::,:,:,:,,",
         "its publisher is a node of ROS 2 Humble: expected ROS_DISTRO=humble here"),
        (f"@ros2_lv/7/{{}}/0/4/MP/%/%/camera/%camera%image_raw/{image}/RIHS01_00/::,:,:,:,,",
         f"type mismatch: its publisher's sensor_msgs/msg/Image has the hash RIHS01_00, expected {right}"),
    ]  # fmt: skip
    for token, expected in cases:
        with contextlib.ExitStack() as stack:
            if token:
                stack.enter_context(node.liveliness().declare_token(token.format(node.info.zid())))
            wait_until(lambda expected=expected: expected in transport.explain_silence(TOPIC), expected)
    zenoh_router.kill()
    node.close()
    wait_until(lambda: "no Zenoh router is reached at tcp/127.0.0.1" in transport.explain_silence(TOPIC), "no router")


def test_a_client_hears_a_peer_that_other_peers_do_not_reach(environment: dict[str, str]) -> None:
    """As on two machines, one of which has the router: nodes listen on their own machine alone."""
    import zenoh

    alone = environment["ZENOH_CONFIG_OVERRIDE"] + ";listen/endpoints=[]"
    got: dict[str, list[Any]] = {"peer": [], "client": []}
    expected = "or by a client of theirs (mode=client in ZENOH_CONFIG_OVERRIDE)"
    with zenoh.open(session_configuration({"ZENOH_CONFIG_OVERRIDE": alone})) as camera, contextlib.ExitStack() as stack:
        writer = camera.declare_publisher(IMAGE_KEY)
        image = IMAGE_KEY.split("/", 3)[3]
        token = f"@ros2_lv/{DOMAIN}/{camera.info.zid()}/0/1/MP/%/%/camera/%camera%image_raw/{image}/::,:,:,:,,"
        stack.enter_context(camera.liveliness().declare_token(token))
        for mode, messages in got.items():
            override = f'{alone};mode="{mode}"'
            bridge = open_transport(mode, {**environment, "ZENOH_CONFIG_OVERRIDE": override})
            stack.callback(bridge.close)
            bridge.subscribe(TOPIC, MessageKind.IMAGE, Qos(), messages.append)
            if mode == "peer":
                wait_until(lambda explain=bridge.explain_silence: expected in explain(TOPIC), "the reason at the peer")

        def is_heard() -> bool:
            writer.put(picture(1, MessageTypes()), attachment=attachment(1))
            return len(got["client"]) > 20

        wait_until(is_heard, "images at the client")
        assert not got["peer"]


def test_a_router_that_is_missing_is_logged_and_may_come_later(
    free_ports: Callable[[int], list[int]], zenoh_router: Any, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node.close()
    zenoh_router.kill()
    environment = {"ROS_DOMAIN_ID": "7", **zenoh_router.environment, "ZENOH_ROUTER_CHECK_ATTEMPTS": "2"}
    transport = open_transport("bridge", environment)
    got: list[Any] = []
    transport.subscribe(TOPIC, MessageKind.IMAGE, Qos(), got.append)

    def warnings() -> int:
        return sum("no Zenoh router is reached" in record.message for record in caplog.records)

    with spinning(transport):
        wait_until(lambda: warnings() == 2, "two warnings")
        zenoh_router.start()
        import zenoh

        with zenoh.open(session_configuration(environment)) as camera:
            writer = camera.declare_publisher(IMAGE_KEY)
            wait_until(lambda: writer.matching_status.matching, "the subscriber")
            writer.put(picture(5, MessageTypes()), attachment=attachment(1))
            wait_until(lambda: bool(got), "the message")
    assert warnings() == 2
    transport.close()
