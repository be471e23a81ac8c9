"""The node of the ROS 2 package with the real server and real models, on rclpy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edge_server
from tests.kit.models import BUNDLED
from tests.kit.server import serve

pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
]
data = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

CLIENT = Path(__file__).parents[1] / "plugins" / "ros" / "live" / "ros_client.py"
PACKAGE = Path(edge_server.__file__).parent / "plugins" / "ros" / "ros2_package" / "edge_server_ros"
DETECTOR, CLASSIFIER, OTHER = "face_detection_yunet", "efficientnet_lite0", "other_faces"
FACE = (224, 116)
"""A point between the eyes of the astronaut, x and y."""


def test_faces_are_found_and_only_a_model_that_can_find_them_replaces_the_model(
    repository: Any, ros_domain: dict[str, str], tmp_path: Path
) -> None:
    python = str(Path(os.environ["EDGE_TEST_RCLPY"]) / "jazzy" / "bin" / "python")
    version = [python, "-c", "import sys; print(sys.version_info[:2])"]
    if subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip() != str(sys.version_info[:2]):
        pytest.skip("the environment of rclpy has another Python")
    for name in (DETECTOR, CLASSIFIER):
        shutil.copytree(BUNDLED / name, repository.path / name)
    shutil.copytree(BUNDLED / DETECTOR, repository.path / OTHER)
    config = repository.path / OTHER / "config.pbtxt"
    config.write_text(config.read_text().replace(f'name: "{DETECTOR}"', f'name: "{OTHER}"', 1))
    picture = tmp_path / "astronaut.bgr"
    picture.write_bytes(data.astronaut()[:, :, ::-1].tobytes())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONEDDS_"))},
        "ROS_DOMAIN_ID": ros_domain["ROS_DOMAIN_ID"],
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    }
    actions: list[list[Any]] = [
        ["listen", "/detections_output", "vision_msgs/msg/Detection2DArray", "DEFAULT"],
        ["listen", "/diagnostics", "diagnostic_msgs/msg/DiagnosticArray", "DEFAULT"],
        ["camera", "/image", 512, 512, 5, str(picture)],
        ["wait", "/detections_output", 3, 60],
        ["wait", "/diagnostics", 3, 60],
        ["call", "/edge_server/set_model", "edge_server_interfaces/srv/SetModel", {"model_name": "no_such_model"}],
        ["call", "/edge_server/set_model", "edge_server_interfaces/srv/SetModel", {"model_name": CLASSIFIER}],
        ["call", "/edge_server/set_model", "edge_server_interfaces/srv/SetModel", {"model_name": OTHER}],
        ["wait", "/detections_output", 0, 1],
        ["wait", "/detections_output", 2, 60],
    ]
    given = ["-p", f"model_name:={DETECTOR}", "-p"]
    path = os.pathsep.join([str(PACKAGE), *(path for path in sys.path if path)])
    program = "import sys; from edge_server_ros.node import main; sys.exit(main(sys.argv))"
    with serve(repository.path) as server, open(tmp_path / "log", "wb") as log:
        command = [python, "-c", program, "--ros-args", *given, f"server_address:={server.grpc}"]
        command += ["-p", f"server_http_url:=http://{server.http}"]
        node = subprocess.Popen(command, env={**environment, "PYTHONPATH": path}, stderr=log)
        try:
            done = subprocess.run(
                [python, str(CLIENT)], input="".join(json.dumps(action) + "\n" for action in actions),
                env=environment, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
        finally:
            node.kill()
            node.wait()
    log_text = (tmp_path / "log").read_text()
    responses = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("answer" in response for response in responses), f"{responses}\n{log_text}"
    faces, health, missing, unfit, changed, _, after = [response["answer"] for response in responses[3:]]
    for message in (*faces, *after):
        assert message["header"]["frame_id"] == "camera_optical"
        box = message["detections"][0]
        center = box["bbox"]["center"]["position"]
        assert abs(center["x"] - FACE[0]) < box["bbox"]["size_x"] / 2 < 100
        assert abs(center["y"] - FACE[1]) < box["bbox"]["size_y"] / 2 < 100
        assert box["results"][0]["hypothesis"]["class_id"] == "face"
    statuses = {one["name"]: one for one in health[-1]["status"]}
    # The governor of this machine: a level and a state, whatever they are.
    assert statuses["edge_server: governor"]["level"] in ([0], [1], [2]), statuses
    assert statuses["edge_server: server"]["message"].startswith(f"{DETECTOR} version 1 on ")
    assert not missing["success"]
    assert "no_such_model" in missing["message"]
    assert not unfit["success"]
    assert "cannot answer with detections" in unfit["message"]
    assert changed["success"], changed["message"]
    # What Python logs, ROS logs.
    assert f"[edge_server]: /image goes to {OTHER} version 1" in log_text
