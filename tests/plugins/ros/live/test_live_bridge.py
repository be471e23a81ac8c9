"""The bridge against live ROS 2: what it publishes, for pictures of several sizes, with both of its transports."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.ros.marks import LIVE_ROS

COUNT = 10
OUTPUTS = {
    "/found": ["Detection2DArray", "DEFAULT"],
    "/kind": ["Classification", "DEFAULT"],
    "/drawn": ["CompressedImage", "DEFAULT"],
    "/mask": ["Image", "DEFAULT"],
    "/map": ["Image", "DEFAULT"],
}
FLAGS = (
    "--detections-topic=/found", "--classification-topic=/kind", "--annotated-topic=/drawn", "--mask-topic=/mask",
    "--map-topic=/map",
)  # fmt: skip
CONTENTS = {
    "/kind": [["indoors", 0.5], ["2", 0.25]],
    "/drawn": ["jpeg", 4],
    "/mask": ["mono8", 2, 2],
    "/map": ["32FC1", 1, 2],
}
"""What ScriptedServer answers to every picture, but for the box, whose left edge is the picture's first byte."""

pytestmark = LIVE_ROS


def check_answers(answers: dict[str, list[Any]]) -> None:
    for topic, messages in answers.items():
        numbers = [number for number, _, _, _ in messages]
        assert numbers == sorted(set(numbers)), "each answer once, in order"
        assert numbers[0] > 0, "the stamp of a picture that was sent"
        for number, _, frame_id, content in messages:
            assert frame_id == "camera_optical"
            left = number % 200
            assert content == CONTENTS.get(topic, [["cup", 0.75, left + 10.0, 25.0, 20.0, 30.0]])


@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_every_kind_of_result_reaches_a_live_node_over_dds(
    scripted: Callable[..., Any], live: Any, distribution: str
) -> None:
    server = scripted()
    with live.bridging(server.address, *FLAGS) as bridge:
        answers = live.play_camera(distribution, {"answers": OUTPUTS, "count": COUNT})["answers"]
    check_answers(answers)
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, len(frame.data)) == (480, 640, "bgr8", 480 * 640 * 3)
    assert "WARN" not in bridge.log.read_text()


def test_the_camera_of_the_document_reaches_the_server(
    scripted: Callable[..., Any], live: Any, eventually: Callable[..., bool]
) -> None:
    root = Path(__file__).parents[4]
    page = (root / "docs/ros.md").read_text()
    (program,) = re.findall(r"test_live_bridge.py -->\n```python\n(.*?)```", page, re.DOTALL)
    server = scripted()
    topic = "/camera/image_raw/compressed"
    with live.bridging(server.address, "--compressed", "--detections-topic=/found", images=(topic,)):
        camera = subprocess.Popen([live.python_of("kilted"), "-c", program], env=live.environment, cwd=root)
        try:
            assert eventually(lambda: server.frames)
        finally:
            camera.terminate()
            camera.wait(30)
    picture = (root / "edge_server/plugins/vision/demo.jpg").read_bytes()
    assert bytes(server.frames[-1].data) == picture


def test_a_users_cyclonedds_uri_is_kept_and_works_with_kilted(
    scripted: Callable[..., Any], live: Any, ros_domain: dict[str, str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    own = f"<Tracing><Verbosity>config</Verbosity><OutputFile>{trace}</OutputFile></Tracing>"
    uri = f"{ros_domain['CYCLONEDDS_URI']},{own}"
    with live.bridging(scripted().address, *FLAGS, environment={"CYCLONEDDS_URI": uri}):
        live.play_camera("kilted", {"answers": OUTPUTS, "count": COUNT})
    assert "config" in trace.read_text()


@pytest.mark.long
@pytest.mark.parametrize(("width", "height"), [(100, 100), (641, 479), (1920, 1080)])
@pytest.mark.parametrize("transport", ["dds", "rclpy"])
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_pictures_of_every_size_are_answered(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str, width: int, height: int
) -> None:
    server = scripted()
    picture = {"answers": OUTPUTS, "count": COUNT, "width": width, "height": height, "image_qos": "DEFAULT"}
    # Reliable: of best-effort pictures of 6 MB, Fast DDS itself loses most between two of its processes.
    reliable = (*FLAGS, "--input-qos=DEFAULT")
    with live.bridging(server.address, *reliable, transport=transport, distribution=distribution) as bridge:
        check_answers(live.play_camera(distribution, picture)["answers"])
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, len(frame.data)) == (height, width, "bgr8", height * width * 3)
    assert "ROS_DISTRO" not in bridge.log.read_text()
