"""The bridge in networks of live ROS 2: QoS, domains, discovery ranges, and nodes that come, go and are killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.plugins.ros.marks import LIVE_ROS

pytestmark = LIVE_ROS

LIMIT_S = 60.0
FOUND = {"answers": {"/found": ["Detection2DArray", "DEFAULT"]}}
TRANSPORTS = ["dds", pytest.param("rclpy", marks=pytest.mark.long)]
FITTING = [("SENSOR_DATA", "SENSOR_DATA"), ("DEFAULT", "SENSOR_DATA"), ("DEFAULT", "DEFAULT")]
NO_SUBSCRIBER = {
    "dds": "a subscriber does not match for its reliability",
    "rclpy": "requesting incompatible QoS. No messages will be sent to it. Last incompatible policy: RELIABILITY",
}
DISTRIBUTIONS = ["jazzy", pytest.param("kilted", marks=pytest.mark.long)]


def wait_for_log(log: Path, text: str) -> None:
    assert eventually(lambda: text in log.read_text(), LIMIT_S), f"expected '{text}' in the log:\n{log.read_text()}"


def stop(camera: Any) -> None:
    camera.kill()
    camera.communicate()


@pytest.mark.long
@pytest.mark.parametrize(("sent", "asked"), FITTING)
@pytest.mark.parametrize("transport", ["dds", "rclpy"])
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_pictures_and_answers_pass_if_each_side_offers_what_the_other_asks(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str, sent: str, asked: str
) -> None:
    flags = (f"--input-qos={asked}", f"--output-qos={sent}", "--detections-topic=/found")
    spec = {"answers": {"/found": ["Detection2DArray", asked]}, "image_qos": sent}
    with live.bridging(scripted().address, *flags, transport=transport, distribution=distribution):
        live.play_camera(distribution, spec)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_log_explains_why_best_effort_and_reliable_do_not_match(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str
) -> None:
    server = scripted()
    flags = ("--input-qos=DEFAULT", "--output-qos=SENSOR_DATA", "--detections-topic=/found")
    with live.bridging(server.address, *flags, transport=transport, distribution=distribution) as bridge:
        camera = live.start_camera(distribution, {**FOUND, "count": 1})
        try:
            wait_for_log(bridge.log, "QoS mismatch: its publisher is best effort, expected reliable")
            wait_for_log(bridge.log, NO_SUBSCRIBER[transport])
        finally:
            stop(camera)
    assert not server.frames


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_camera_that_is_killed_and_started_again_is_answered(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str
) -> None:
    server = scripted()
    flags = ("--detections-topic=/found",)
    with live.bridging(server.address, *flags, transport=transport, distribution=distribution):
        for _ in range(2):
            before = len(server.frames)
            camera = live.start_camera(distribution, {**FOUND, "count": 1_000_000})
            end_s = time.monotonic() + LIMIT_S
            while len(server.frames) < before + 5 and time.monotonic() < end_s:
                time.sleep(0.05)
            stop(camera)
            assert len(server.frames) >= before + 5
        live.play_camera(distribution, FOUND)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dds", "rclpy"])
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_a_bridge_that_is_killed_and_started_again_answers(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str
) -> None:
    server = scripted()
    flags = ("--detections-topic=/found",)
    camera = live.start_camera(distribution, {**FOUND, "count": 40})
    try:
        with live.bridging(server.address, *flags, transport=transport, distribution=distribution) as bridge:
            wait_for_log(bridge.log, "goes to finder")
            end_s = time.monotonic() + LIMIT_S
            while len(server.frames) < 5 and time.monotonic() < end_s:
                time.sleep(0.05)
            bridge.process.send_signal(signal.SIGKILL)
            bridge.process.wait(30)
        with live.bridging(server.address, *flags, transport=transport, distribution=distribution):
            output, error = camera.communicate(timeout=90)
        assert camera.returncode == 0, f"{output}\n{error}"
    finally:
        stop(camera)


@pytest.mark.long
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_two_bridges_answer_one_camera_in_one_domain(
    scripted: Callable[..., Any], live: Any, distribution: str
) -> None:
    server = scripted()
    answers = {f"/{name}": ["Detection2DArray", "DEFAULT"] for name in ("one", "two")}
    with (
        live.bridging(server.address, "--detections-topic=/one", name="one"),
        live.bridging(server.address, "--detections-topic=/two", name="two", environment={"ROS_LOCALHOST_ONLY": "1"}),
    ):
        live.play_camera(distribution, {"answers": answers})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_four_cameras_that_start_together_with_one_bridge_are_answered_each_beside_its_images(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str
) -> None:
    server, images = scripted(), [f"/camera{number}/image_raw" for number in range(4)]
    specs = [
        {"image_topic": image, "answers": {image.replace("image_raw", "found"): ["Detection2DArray", "DEFAULT"]}}
        for image in images
    ]
    where = {"images": images, "transport": transport, "distribution": distribution}
    with live.bridging(server.address, "--detections-topic=found", **where) as bridge:
        cameras = [live.start_camera(distribution, spec) for spec in specs]
        try:
            for camera in cameras:
                output, error = camera.communicate(timeout=90)
                assert camera.returncode == 0, f"{output}\n{error}\n{bridge.log.read_text()}"
        finally:
            for camera in cameras:
                stop(camera)
    assert {request.stream_id for request in server.requests} == {f"ros:{image}:finder" for image in images}


@pytest.mark.long
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_bridges_over_both_transports_answer_one_camera_in_one_domain(
    scripted: Callable[..., Any], live: Any, distribution: str
) -> None:
    server = scripted()
    answers = {f"/{name}": ["Detection2DArray", "DEFAULT"] for name in ("one", "two")}
    own = {"transport": "rclpy", "distribution": distribution}
    with (
        live.bridging(server.address, "--detections-topic=/one", name="one"),
        live.bridging(server.address, "--detections-topic=/two", name="two", **own),
    ):
        live.play_camera(distribution, {"answers": answers, "width": 100, "height": 100})


@pytest.mark.long
@pytest.mark.parametrize("transport", ["dds", "rclpy"])
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_a_camera_in_another_domain_is_not_heard_and_the_log_names_its_domain(
    scripted: Callable[..., Any], live: Any, distribution: str, transport: str
) -> None:
    server = scripted()
    domain = int(live.environment["ROS_DOMAIN_ID"])
    flags = ("--detections-topic=/found",)
    with live.bridging(server.address, *flags, transport=transport, distribution=distribution) as bridge:
        camera = live.start_camera(distribution, {**FOUND, "count": 1}, {"ROS_DOMAIN_ID": str(domain + 100)})
        try:
            wait_for_log(bridge.log, f"no other node is seen in ROS domain {domain}")
            wait_for_log(bridge.log, f"{domain + 100}")
            assert "expected the same ROS_DOMAIN_ID" in bridge.log.read_text()
        finally:
            stop(camera)
    assert not server.frames


LOCALHOST, SUBNET = ({"ROS_AUTOMATIC_DISCOVERY_RANGE": value} for value in ("LOCALHOST", "SUBNET"))
RANGES = [
    (SUBNET, SUBNET),
    (LOCALHOST, SUBNET),
    (SUBNET, LOCALHOST),
    ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "", "ROS_LOCALHOST_ONLY": "1"}, LOCALHOST),
    ({**LOCALHOST, "ROS_STATIC_PEERS": "127.0.0.1"}, LOCALHOST),
]
"""Variables of the bridge and of the camera."""


@pytest.mark.long
@pytest.mark.parametrize(("bridges", "cameras"), RANGES)
@pytest.mark.parametrize("transport", ["dds", "rclpy"])
@pytest.mark.parametrize("distribution", ["jazzy", "kilted"])
def test_nodes_on_one_machine_find_each_other(
    scripted: Callable[..., Any],
    live: Any,
    distribution: str,
    transport: str,
    bridges: dict[str, str],
    cameras: dict[str, str],
) -> None:
    flags = ("--detections-topic=/found",)
    server = scripted()
    with live.bridging(server.address, *flags, transport=transport, distribution=distribution, environment=bridges):
        live.play_camera(distribution, {**FOUND, "limit_s": 20}, cameras)
