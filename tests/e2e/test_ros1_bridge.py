"""Real ROS 1: a master, ordinary rospy nodes, the bridge and the server, each in its own process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

MODULES = os.environ.get("EDGE_TEST_ROS1_PYTHONPATH", "")
MASTER = os.environ.get("EDGE_TEST_ROS1_MASTER", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (MODULES and MASTER),
        reason="EDGE_TEST_ROS1_PYTHONPATH and EDGE_TEST_ROS1_MASTER name no ROS 1; "
        'get one with: eval "$(tests/plugins/ros/fetch_ros1.sh DEST)"',
    ),
    pytest.mark.timeout(180),
]

COMMAND = Path(sys.executable).parent / "edge-server"
NODES = Path(__file__).parents[1] / "plugins" / "ros"
LIMIT_S = 60.0

DETECTOR = "face_detection_yunet"
CLASSIFIER = "efficientnet_lite0"
ESPRESSO = 967
FACE = (224, 116)
"""A point between the eyes of the astronaut, x and y."""

CHECKSUMS = {
    "vision_msgs/Detection2DArray": "402071f61477de256df9f1aa45e6e4c8",
    "vision_msgs/Detection3DArray": "05c51d9aea1fb4cfdc8effb94f197b6f",
    "vision_msgs/Classification2D": "b23d0855d0f41568e09106615351255f",
    "sensor_msgs/CompressedImage": "8f7a12909da2c9d3332d540a0977563f",
}
"""Checksums of the released packages; a publisher with others refuses a subscriber with these."""


@dataclass
class Node:
    """A process whose output goes to a file."""

    name: str
    process: subprocess.Popen[bytes]
    path: Path

    def lines(self) -> list[str]:
        """Return the whole lines written so far."""
        return self.path.read_text().split("\n")[:-1]

    def messages(self) -> list[Any]:
        return [json.loads(line) for line in self.lines() if line.startswith("{")]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Ros:
    """A ROS 1 of its own: a port for the master, an environment, and the nodes started so far."""

    folder: Path
    port: int
    nodes: list[Node] = field(default_factory=list)

    def start(self, name: str, *command: object) -> Node:
        path = self.folder / f"{len(self.nodes)}_{name}.log"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command], stdout=output, stderr=subprocess.STDOUT, env=self.environment()
            )
        self.nodes.append(Node(name, process, path))
        return self.nodes[-1]

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROS_", "EDGE_SERVER_"))}
        return {
            **kept,
            "PYTHONPATH": MODULES,
            "PYTHONUNBUFFERED": "1",
            "ROS_MASTER_URI": f"http://127.0.0.1:{self.port}",
            "ROS_HOSTNAME": "127.0.0.1",
            "ROS_HOME": str(self.folder / "home"),
            "ROS_LOG_DIR": str(self.folder / "log"),
        }

    def master(self) -> Node:
        return self.start("master", sys.executable, MASTER, "--core", "-p", self.port)

    def camera(self, topic: str, picture: Path, frame_id: str, rate: float, *flags: str) -> Node:
        return self.start("camera", sys.executable, NODES / "ros1_camera.py", topic, picture, frame_id, rate, *flags)

    def listener(self, topic: str, kind: str) -> Node:
        return self.start("listener", sys.executable, NODES / "ros1_listener.py", topic, kind, CHECKSUMS[kind])

    def bridge(self, server: Any, model: str, *flags: str) -> Node:
        return self.start(
            "bridge", COMMAND, "ros", "bridge", "--transport=ros1",
            f"--address={server.grpc}", f"--model={model}", *flags,
        )  # fmt: skip

    def wait(self, listener: Node, count: int, frame_id: str = "") -> list[Any]:
        """Return the first `count` messages of a listener with that frame_id; fail with every log when they tarry."""
        end = time.monotonic() + LIMIT_S
        while True:
            found = [one for one in listener.messages() if frame_id in ("", one["header"]["frame_id"])]
            if len(found) >= count:
                return found[:count]
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {node.name}\n{node.path.read_text()[-2000:]}" for node in self.nodes)


@pytest.fixture
def ros(tmp_path: Path, free_ports: Any) -> Iterator[Ros]:
    found = Ros(tmp_path, *free_ports(1))
    try:
        yield found
    finally:
        # Nodes unregister from their master, so it is stopped last.
        for node in sorted(found.nodes, key=lambda one: one.name == "master"):
            node.end()


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any, bundled_repository: Path) -> Iterator[Any]:
    for model in (DETECTOR, CLASSIFIER):
        shutil.copytree(bundled_repository / model, module_repository.path / model)
    with shared_server(module_repository.path) as server:
        yield server


@pytest.fixture(scope="module")
def portrait(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The astronaut, bgr8, as an .npy file."""
    path = tmp_path_factory.mktemp("portrait") / "astronaut.npy"
    np.save(path, np.ascontiguousarray(pictures.astronaut()[:, :, ::-1]))
    return path


def stamps(camera: Node) -> set[tuple[int, ...]]:
    return {tuple(map(int, line.split())) for line in camera.lines() if line[:1].isdigit()}


def assert_a_face_was_found(message: Any, camera: Node, frame_id: str) -> None:
    header = message["header"]
    assert header["frame_id"] == frame_id
    assert tuple(header["stamp"]) in stamps(camera)
    box = message["detections"][0]["bbox"]
    assert abs(box["center"]["x"] - FACE[0]) < box["size_x"] / 2 < 100
    assert abs(box["center"]["y"] - FACE[1]) < box["size_y"] / 2 < 100
    found = message["detections"][0]
    assert (found["header"]["stamp"], found["header"]["frame_id"]) == (header["stamp"], frame_id)
    assert found["results"][0]["id"] == 0
    assert 0.5 < found["results"][0]["score"] <= 1


def test_frames_of_a_ros1_camera_come_back_as_detections_with_their_stamp_and_frame(
    ros: Ros, server: Any, portrait: Path
) -> None:
    ros.master()
    bridge = ros.bridge(
        server, DETECTOR, "--image-topic=/camera/image_raw", "--detections-topic=/faces", "--annotated-topic=/drawn"
    )
    faces = ros.listener("/faces", "vision_msgs/Detection2DArray")
    drawn = ros.listener("/drawn", "sensor_msgs/CompressedImage")
    camera = ros.camera("/camera/image_raw", portrait, "camera_optical", 10)
    for message in ros.wait(faces, 10):
        assert_a_face_was_found(message, camera, "camera_optical")
    picture = ros.wait(drawn, 1)[0]
    assert (picture["format"], picture["header"]["frame_id"]) == ("jpeg", "camera_optical")
    assert picture["data"] > 10_000
    assert bridge.end() == 0, ros.logs()
    assert "Traceback" not in ros.logs(), ros.logs()


def test_a_ros1_depth_camera_gets_the_position_of_a_face(ros: Ros, server: Any, portrait: Path) -> None:
    ros.master()
    bridge = ros.bridge(
        server, DETECTOR, "--image-topic=/camera/image_raw", "--detections3d-topic=/faces",
        "--depth-topic=/camera/depth",
    )  # fmt: skip
    faces = ros.listener("/faces", "vision_msgs/Detection3DArray")
    camera = ros.camera("/camera/image_raw", portrait, "camera_optical", 10, "--depth")
    for message in ros.wait(faces, 5):
        assert tuple(message["header"]["stamp"]) in stamps(camera)
        face = message["detections"][0]
        center, result = face["bbox"]["center"], face["results"][0]
        assert face["header"]["frame_id"] == "camera_optical"
        assert center["position"]["z"] == pytest.approx(1.5)
        assert center["position"]["x"] == pytest.approx((FACE[0] - 256) / 500 * 1.5, abs=0.05)
        assert center["position"]["y"] == pytest.approx((FACE[1] - 256) / 500 * 1.5, abs=0.05)
        assert (result["id"], result["pose"]["pose"]) == (0, center)
    assert bridge.end() == 0, ros.logs()
    assert "Traceback" not in ros.logs(), ros.logs()


def test_compressed_frames_come_back_as_a_classification(ros: Ros, server: Any, coffee: Path) -> None:
    ros.master()
    bridge = ros.bridge(
        server, CLASSIFIER, "--compressed", "--image-topic=/camera/image_raw/compressed", "--classification-topic=/what"
    )
    heard = ros.listener("/what", "vision_msgs/Classification2D")
    camera = ros.camera("/camera/image_raw/compressed", coffee, "kitchen", 5, "--compressed")
    for message in ros.wait(heard, 3):
        assert message["header"]["frame_id"] == "kitchen"
        assert tuple(message["header"]["stamp"]) in stamps(camera)
        assert len(message["results"]) == 5
        assert message["results"][0]["id"] == ESPRESSO
    assert bridge.end(signal.SIGINT) == 0, ros.logs()
    assert "Traceback" not in ros.logs(), ros.logs()


def test_the_bridge_outlives_the_master_and_the_camera(ros: Ros, server: Any, portrait: Path) -> None:
    """It starts before the master, and finds the nodes of a second master without a restart."""
    bridge = ros.bridge(server, DETECTOR, "--image-topic=/image", "--detections-topic=/faces")
    master = ros.master()
    first = ros.camera("/image", portrait, "first", 10)
    heard = ros.listener("/faces", "vision_msgs/Detection2DArray")
    ros.wait(heard, 3, "first")
    first.end()
    second = ros.camera("/image", portrait, "second", 10)
    ros.wait(heard, 3, "second")
    master.end()
    # The registrations of rospy's nodes are lost with their master, but open connections stay.
    known = len(heard.messages())
    ros.wait(heard, known + 3)
    second.end(signal.SIGKILL)
    heard.end(signal.SIGKILL)
    master = ros.master()
    third = ros.camera("/image", portrait, "third", 10)
    anew = ros.listener("/faces", "vision_msgs/Detection2DArray")
    for message in ros.wait(anew, 3, "third"):
        assert_a_face_was_found(message, third, "third")
    assert bridge.process.poll() is None
    assert bridge.end() == 0, ros.logs()
    assert "Traceback" not in bridge.path.read_text(), ros.logs()


def test_a_bridge_without_a_master_can_be_stopped(ros: Ros, server: Any) -> None:
    bridge = ros.bridge(server, DETECTOR, "--detections-topic=/faces")
    end = time.monotonic() + LIMIT_S
    while not any("no ROS master" in line for line in bridge.lines()):
        assert time.monotonic() < end, ros.logs()
        time.sleep(0.05)
    assert bridge.end() == 0, ros.logs()
