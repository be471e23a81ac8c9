"""ROS 2 messages on the wire, over DDS and Zenoh: the bridge in one process, the codec of cyclonedds in another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.plugins.ros.conftest import wait_until

pytestmark = [pytest.mark.full]


def test_an_independent_codec_gets_detections_for_its_images(
    scripted: Callable[..., Any], ros2: Any, tmp_path: Path
) -> None:
    server = scripted()
    with ros2.bridging(server.address, tmp_path / "log"):
        found = ros2.heard(ros2.start_camera(10))
    assert len(found) == 10
    for message in found:
        number = message["header"]["stamp"]["sec"]
        assert message["header"] == {"stamp": {"sec": number, "nanosec": 500 + number}, "frame_id": "camera_optical"}
        (detection,) = message["detections"]
        assert detection["header"] == message["header"]
        assert detection["bbox"]["center"] == {"position": {"x": number % 256 + 10.0, "y": 25.0}, "theta": 0.0}
        assert (detection["bbox"]["size_x"], detection["bbox"]["size_y"]) == (20.0, 30.0)
        (result,) = detection["results"]
        assert result["hypothesis"] == {"class_id": "cup", "score": 0.75}


def test_the_server_gets_the_image_as_it_was_published(scripted: Callable[..., Any], ros2: Any, tmp_path: Path) -> None:
    server = scripted()
    with ros2.bridging(server.address, tmp_path / "log", "--max-age-ms=300", "--priority=1"):
        ros2.heard(ros2.start_camera(3))
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, frame.step, frame.is_bigendian) == (48, 64, "rgb8", 196, False)
    assert bytes(frame.data) == bytes([frame.header.sec % 256]) * (196 * 48)
    numbers = [frame.header.seq for frame in server.frames]
    assert numbers == sorted(set(numbers))
    (request,) = server.requests
    assert (request.model, request.returns.has_detections, request.returns.top_k) == ("finder", True, 0)
    assert (request.delivery.max_age_ms, request.delivery.priority) == (300, 1)


def test_one_bridge_answers_several_cameras_each_beside_its_images(
    scripted: Callable[..., Any], ros2: Any, tmp_path: Path
) -> None:
    server, names = scripted(), ["front", "left", "right", "rear"]
    options = {"images": [f"/{name}/image_raw" for name in names], "detections": "detections"}
    with ros2.bridging(server.address, tmp_path / "log", "--stream-id=robot", **options):
        cameras = {name: ros2.start_camera(3, f"/{name}/image_raw", f"/{name}/detections") for name in names}
        heard = {name: ros2.heard(camera) for name, camera in cameras.items()}
    for name, messages in heard.items():
        assert [message["header"]["frame_id"] for message in messages] == [f"{name}_optical"] * 3
        for message in messages:
            (detection,) = message["detections"]
            assert detection["bbox"]["center"]["position"]["x"] == message["header"]["stamp"]["sec"] % 256 + 10.0
    assert {request.stream_id for request in server.requests} == {f"robot/{name}/image_raw" for name in names}


def test_the_bridge_survives_restarts_of_cameras_and_server(
    scripted: Callable[..., Any], ros2: Any, tmp_path: Path
) -> None:
    server = scripted()
    log = tmp_path / "log"
    with ros2.bridging(server.address, log) as process:
        assert len(ros2.heard(ros2.start_camera(3))) == 3
        assert len(ros2.heard(ros2.start_camera(3))) == 3
        camera = ros2.start_camera(200)
        try:
            wait_until(lambda: len(server.requests) == 1 and len(server.frames) > 8, "the third camera")
            server.stop()
            server.start()
            before = len(server.frames)
            wait_until(lambda: len(server.requests) == 2 and len(server.frames) > before + 3, "the bridge to come back")
        finally:
            camera.kill()
            camera.communicate()
        assert process.poll() is None
    assert {request.stream_id for request in server.requests} == {"ros:/camera/image_raw:finder"}
    assert re.search(r"/camera/image_raw: the frame stream .* ended: .*; trying again", log.read_text())


def test_a_camera_that_the_server_refuses_leaves_the_others_and_comes_back(
    scripted: Callable[..., Any], ros2: Any, tmp_path: Path
) -> None:
    server = scripted()
    server.refusal, server.refused_ids = grpc.StatusCode.INVALID_ARGUMENT, {"ros:/front/image_raw:finder"}
    log, images = tmp_path / "log", ["/front/image_raw", "/rear/image_raw"]
    with ros2.bridging(server.address, log, images=images, detections="detections"):
        assert len(ros2.heard(ros2.start_camera(3, "/rear/image_raw", "/rear/detections"))) == 3
        reason = f"the frame stream to {server.address} ended: INVALID_ARGUMENT: refused"
        expected = f"no results for /front/image_raw; the other cameras go on: {reason}"
        wait_until(lambda: expected in log.read_text(), "the reason")
        front = ros2.start_camera(3, "/front/image_raw", "/front/detections")
        report = re.compile(rf"/front/image_raw: in [^0].*, out 0\.0/s.*: {re.escape(reason)}")
        wait_until(lambda: report.search(log.read_text()) is not None, "a report")
        server.refusal = None
        assert len(ros2.heard(front)) == 3
    assert log.read_text().count(expected) == 1


def test_the_bridge_waits_for_a_model_that_is_not_loaded_yet(
    scripted: Callable[..., Any], ros2: Any, tmp_path: Path
) -> None:
    server = scripted()
    server.is_empty = True
    log = tmp_path / "log"
    with ros2.bridging(server.address, log):
        wait_until(lambda: len(server.requests) > 1, "the bridge to ask again")
        server.is_empty = False
        assert len(ros2.heard(ros2.start_camera(3))) == 3
    expected = (
        f"/camera/image_raw: the frame stream to {server.address} ended: NOT_FOUND: unknown model 'finder'; "
        "asking again every 2 s"
    )
    assert log.read_text().count(expected) == 1


def test_the_bridge_reports_rates_errors_and_silence(scripted: Callable[..., Any], ros2: Any, tmp_path: Path) -> None:
    server = scripted(error=("INVALID_ARG", "not a picture of a cup"))
    log = tmp_path / "log"
    with ros2.bridging(server.address, log):
        camera = ros2.start_camera(1000)
        try:
            wait_until(lambda: "not a picture of a cup" in log.read_text(), "a report of errors")
        finally:
            camera.kill()
            camera.communicate()
        wait_until(lambda: "no images in the last" in log.read_text(), "a report of silence")
    assert re.search(r"/camera/image_raw: in \d+\.\d/s, out 0\.0/s", log.read_text())
