"""The bridge against rmw_zenoh_cpp of Jazzy and Kilted, under rclpy: its own code over Zenoh's library in C."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.ros.conftest import wait_until

COUNT = 10
PROGRAMS = Path(__file__).parent

pytestmark = [
    pytest.mark.full,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "EDGE_TEST_RMW_ZENOH" not in os.environ, reason="needs rmw_zenoh: tests/plugins/ros/live/build_rmw_zenoh.sh"
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("zenoh", "rosbags", "xxhash")),
        reason="needs eclipse-zenoh, rosbags and xxhash: pip install '.[zenoh]'",
    ),
]


@pytest.fixture(params=["jazzy", "kilted"])
def distribution(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rmw_zenoh(live: Any, zenoh_router: Any, distribution: str) -> dict[str, str]:
    """The variables of a node with rmw_zenoh. The bridges get the router's address from `live`."""
    live.environment.update(zenoh_router.environment, ROS_DOMAIN_ID="5")
    built = Path(os.environ["EDGE_TEST_RMW_ZENOH"]) / distribution
    # PyPI's rclpy is linked to its one middleware: what is loaded before it takes its place.
    return {
        "RMW_IMPLEMENTATION": "rmw_zenoh_cpp", "LD_PRELOAD": str(built / "librmw_zenoh_cpp.so"),
        "AMENT_PREFIX_PATH": str(built),
    }  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(100, 100), (640, 480), (1920, 1080)])
@pytest.mark.parametrize("qos", ["DEFAULT", "SENSOR_DATA"])
def test_every_kind_of_result_reaches_a_live_node(
    scripted: Callable[..., Any], live: Any, rmw_zenoh: dict[str, str], distribution: str, qos: str, width: int,
    height: int,
) -> None:  # fmt: skip
    server = scripted()
    flags = (
        "--detections-topic=/found", "--classification-topic=/kind", "--annotated-topic=/drawn", "--mask-topic=/mask",
        "--map-topic=/map", f"--input-qos={qos}", f"--output-qos={qos}",
    )  # fmt: skip
    outputs = {
        "/found": ["Detection2DArray", qos], "/kind": ["Classification", qos], "/drawn": ["CompressedImage", qos],
        "/mask": ["Image", qos], "/map": ["Image", qos],
    }  # fmt: skip
    spec = {"answers": outputs, "count": COUNT, "image_qos": qos, "width": width, "height": height}
    with live.bridging(server.address, *flags, transport="zenoh") as bridge:
        answers = live.play_camera(distribution, spec, rmw_zenoh)["answers"]
    for topic, messages in answers.items():
        numbers = [number for number, _, _, _ in messages]
        assert numbers == sorted(set(numbers)), "each answer once, in order"
        assert numbers[0] > 0, "the stamp of a picture that was sent"
        for number, _, frame_id, content in messages:
            assert frame_id == "camera_optical"
            left = number % 200
            assert content == {
                "/found": [["cup", 0.75, left + 10.0, 25.0, 20.0, 30.0]], "/kind": [["indoors", 0.5], ["2", 0.25]],
                "/drawn": ["jpeg", 4], "/mask": ["mono8", 2, 2], "/map": ["32FC1", 1, 2],
            }[topic]  # fmt: skip
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, len(frame.data)) == (height, width, "bgr8", height * width * 3)
    assert "WARN" not in bridge.log.read_text()


@pytest.fixture
def watcher(live: Any, rmw_zenoh: dict[str, str], distribution: str) -> Iterator[Callable[[], list[str]]]:
    """Returns what a live node sees of the bridge: one line for its node, and for each publisher and subscription."""
    process = subprocess.Popen(
        [live.python_of(distribution), str(PROGRAMS / "rclpy_graph.py"), "edge_server_bridge"],
        env={**live.environment, **rmw_zenoh}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def look() -> list[str]:
        process.stdin.write("\n")
        process.stdin.flush()
        return list(iter(process.stdout.readline, "\n"))

    yield look
    process.kill()
    process.communicate()


def test_a_live_node_sees_the_bridge_with_its_topics_types_and_qos_until_it_ends(
    scripted: Callable[..., Any], live: Any, watcher: Callable[[], list[str]]
) -> None:
    expected = [
        "node /edge_server_bridge\n",
        "publisher /found vision_msgs/msg/Detection2DArray RIHS01_214274120007 RELIABLE VOLATILE 10\n",
        "subscription /camera/image_raw sensor_msgs/msg/Image RIHS01_d31d41a9a4c4 BEST_EFFORT VOLATILE 1\n",
    ]
    with live.bridging(scripted().address, "--detections-topic=/found", transport="zenoh"):
        wait_until(lambda: watcher() == expected, "the bridge in the graph")
    wait_until(lambda: watcher() == [], "the end of the bridge in the graph")


@pytest.mark.parametrize("profile", ["DEFAULT", "SENSOR_DATA"])
def test_transient_local_messages_reach_a_live_node_that_comes_later(
    live: Any, rmw_zenoh: dict[str, str], distribution: str, profile: str
) -> None:
    from edge_server.plugins.ros.messages.message_conversion import CompressedImageMessage, MessageKind
    from edge_server.plugins.ros.transports.transport import Qos
    from edge_server.plugins.ros.transports.zenoh_transport import open_transport
    from edge_server.protocol.frame_messages import FrameHeader

    transport = open_transport("edge_server_bridge", live.environment)
    transport.advertise("/drawn", MessageKind.COMPRESSED_IMAGE, Qos(profile, 3, is_transient_local=True))
    for number in range(5):
        header = FrameHeader(sec=number, nanosec=0, frame_id=f"camera{number}")
        transport.publish("/drawn", CompressedImageMessage(header, "jpeg", b"\xff\xd8"))
    try:
        spec = {"image_topic": "", "answers": {"/drawn": ["CompressedImage", "TRANSIENT_LOCAL"]}, "count": 3}
        answers = live.play_camera(distribution, spec, rmw_zenoh)["answers"]["/drawn"]
    finally:
        transport.close()
    assert [frame_id for _, _, frame_id, _ in answers] == ["camera2", "camera3", "camera4"]


def test_the_bridge_outlives_a_killed_camera_and_a_killed_router(
    scripted: Callable[..., Any], live: Any, zenoh_router: Any, rmw_zenoh: dict[str, str], distribution: str
) -> None:
    server = scripted()
    spec = {"answers": {"/found": ["Detection2DArray", "DEFAULT"]}, "count": COUNT}
    with live.bridging(server.address, "--detections-topic=/found", transport="zenoh"):
        camera = live.start_camera(distribution, {**spec, "count": 0}, rmw_zenoh)
        wait_until(lambda: len(server.frames) > 3, "the first camera")
        camera.kill()
        camera.communicate()
        live.play_camera(distribution, spec, rmw_zenoh)
        zenoh_router.kill()
        zenoh_router.start()
        live.play_camera(distribution, spec, rmw_zenoh)
