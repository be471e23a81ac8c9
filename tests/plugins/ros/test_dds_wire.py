"""ROS 2 names, types and bytes over DDS: the bridge in one process, the codec of cyclonedds in another."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = Path(sys.executable).parent / "edge-server"
CAMERA = Path(__file__).parent / "dds_camera.py"
LIMIT_S = 60.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")),
        reason="needs cyclonedds and rosbags: pip install '.[ros]'",
    ),
]


@contextlib.contextmanager
def bridging(address: str, environment: dict[str, str], log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `edge-server ros bridge` meanwhile; end it by SIGTERM and expect exit code 0."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [
                str(COMMAND), "ros", "bridge", "--transport=dds", "--model=finder", f"--address={address}",
                "--image-topic=/camera/image_raw", "--detections-topic=/detections", *flags,
            ],
            env={**os.environ, **environment}, stderr=file,
        )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def start_camera(environment: dict[str, str], count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CAMERA), environment["ROS_DOMAIN_ID"], "/camera/image_raw", "/detections", str(count)],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def heard(camera: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, _ = camera.communicate(timeout=LIMIT_S + 10)
    return [json.loads(line) for line in output.splitlines()]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT_S:.0f} s for {what}"
        time.sleep(0.02)


def test_an_independent_dds_codec_gets_detections_for_its_images(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted()
    with bridging(server.address, ros_domain, tmp_path / "log"):
        found = heard(start_camera(ros_domain, 10))
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


def test_the_server_gets_the_image_as_it_was_published(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted()
    with bridging(server.address, ros_domain, tmp_path / "log", "--max-age-ms=300", "--priority=1"):
        heard(start_camera(ros_domain, 3))
    frame = server.frames[-1]
    assert (frame.height, frame.width, frame.encoding, frame.step, frame.is_bigendian) == (48, 64, "rgb8", 196, False)
    assert bytes(frame.data) == bytes([frame.header.sec % 256]) * (196 * 48)
    numbers = [frame.header.seq for frame in server.frames]
    assert numbers == sorted(set(numbers))
    (request,) = server.requests
    assert (request.model, request.returns.has_detections, request.returns.top_k) == ("finder", True, 0)
    assert (request.delivery.max_age_ms, request.delivery.priority) == (300, 1)


def test_the_bridge_survives_restarts_of_cameras_and_server(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted()
    log = tmp_path / "log"
    with bridging(server.address, ros_domain, log) as process:
        assert len(heard(start_camera(ros_domain, 3))) == 3
        assert len(heard(start_camera(ros_domain, 3))) == 3
        camera = start_camera(ros_domain, 200)
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
    assert "trying again" in log.read_text()


def test_the_bridge_waits_for_a_model_that_is_not_loaded_yet(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted()
    server.is_empty = True
    log = tmp_path / "log"
    with bridging(server.address, ros_domain, log):
        wait_until(lambda: len(server.requests) > 1, "the bridge to ask again")
        server.is_empty = False
        assert len(heard(start_camera(ros_domain, 3))) == 3
    assert log.read_text().count("unknown model 'finder'; asking again every 2 s") == 1


def test_the_bridge_reports_rates_errors_and_silence(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted(error=("INVALID_ARG", "not a picture of a cup"))
    log = tmp_path / "log"
    with bridging(server.address, ros_domain, log):
        camera = start_camera(ros_domain, 1000)
        try:
            wait_until(lambda: "not a picture of a cup" in log.read_text(), "a report of errors")
        finally:
            camera.kill()
            camera.communicate()
        wait_until(lambda: "no images in the last" in log.read_text(), "a report of silence")
    assert re.search(r"/camera/image_raw: in \d+\.\d/s, out 0\.0/s", log.read_text())


def test_a_reliable_bridge_reports_an_incompatible_best_effort_camera(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with bridging(scripted().address, ros_domain, log, "--input-qos=DEFAULT"):
        camera = start_camera(ros_domain, 1)
        try:
            wait_until(lambda: "a publisher does not match for its reliability" in log.read_text(), "the reason")
        finally:
            camera.kill()
            camera.communicate()


IMAGE_HASH = "RIHS01_d31d41a9a4c4bc8eae9be757b0beed306564f7526c88ea6a4588fb9582527d47"
DETECTIONS_HASH = "RIHS01_214274120007f4a683866481336b70310268cfa107aebe9d594a6acf75bda968"
POSITIONS_HASH = "RIHS01_793f5eab9595ac1c0da07873cc859db42eae51f0ee76056db8562515d830e018"
"""As rosidl's generators compute them from the packages of ROS 2 Jazzy."""


def test_discovery_announces_names_types_and_type_hashes_of_ros(ros_domain: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERY, ros_domain["ROS_DOMAIN_ID"]],
        env={**os.environ, **ros_domain}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout)) == [
        ["rt/found", "vision_msgs::msg::dds_::Detection2DArray_", f"typehash={DETECTIONS_HASH};"],
        ["rt/found3d", "vision_msgs::msg::dds_::Detection3DArray_", f"typehash={POSITIONS_HASH};"],
        ["rt/image", "sensor_msgs::msg::dds_::Image_", f"typehash={IMAGE_HASH};"],
    ]


DISCOVERY = """
import json, sys, time
from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication
from cyclonedds.domain import DomainParticipant
from edge_server.plugins.ros.transports.transport import Qos
from edge_server.plugins.ros.transports.dds_transport import DdsTransport
from edge_server.plugins.ros.messages.message_conversion import MessageKind

transport = DdsTransport(int(sys.argv[1]))
transport.advertise("/found", MessageKind.DETECTIONS, Qos())
transport.advertise("/found3d", MessageKind.DETECTIONS_3D, Qos())
transport.advertise("image", MessageKind.IMAGE, Qos("SENSOR_DATA", 5))
watcher = DomainParticipant(int(sys.argv[1]))
reader = BuiltinDataReader(watcher, BuiltinTopicDcpsPublication)
seen, end = {}, time.monotonic() + 20
while len(seen) < 3 and time.monotonic() < end:
    for sample in reader.take(20):
        if getattr(sample, "topic_name", "").startswith("rt/"):
            data = [policy.data for policy in sample.qos if type(policy).__name__ == "Userdata"]
            seen[sample.topic_name] = (sample.topic_name, sample.type_name, data[0].decode() if data else "")
print(json.dumps(list(seen.values())))
transport.close()
"""


def test_a_silent_topic_is_explained_by_type_qos_topic_domain_or_interface(
    scripted: Callable[..., Any], ros_domain: dict[str, str], tmp_path: Path
) -> None:
    server = scripted()
    domain = int(ros_domain["ROS_DOMAIN_ID"])
    cases = {
        "type": (("--compressed",), {}, "type mismatch: its publisher sends sensor_msgs/msg/Image, expected "
                 "sensor_msgs/msg/CompressedImage (without --compressed)"),
        "qos": (("--input-qos=DEFAULT",), {}, "QoS mismatch: its publisher is best effort, expected reliable"),
        "topic": (("--image-topic=/camera/image",), {}, "none publishes it; sensor_msgs/msg/Image is published on "
                  "/camera/image_raw"),
        "domain": ((), {"ROS_DOMAIN_ID": str(domain + 100)}, f"no other node is seen in ROS domain {domain + 100}"),
        # The camera is on the loopback interface.
        "interface": ((), {"CYCLONEDDS_URI": ""}, f"another DDS program of this machine is in domain {domain} and is "
                      "not reached, so its network interface is another one"),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        # It sends until it is ended: no detections come.
        camera = start_camera(ros_domain, 1)
        stack.callback(camera.communicate)
        stack.callback(camera.kill)
        for name, (flags, variables, _) in cases.items():
            environment = {**ros_domain, **variables}
            stack.enter_context(bridging(server.address, environment, tmp_path / name, *flags))
        for name, (_, _, expected) in cases.items():
            wait_until(lambda name=name, expected=expected: expected in (tmp_path / name).read_text(), name)
    found = (tmp_path / "domain").read_text()
    used = re.search(r"programs on this machine use domain ([0-9, ]+): expected the same ROS_DOMAIN_ID", found)
    assert used is not None, found
    assert str(domain) in used[1].split(", ")
