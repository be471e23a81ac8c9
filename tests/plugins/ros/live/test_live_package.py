"""The ROS 2 package against live ROS 2: built by colcon, its node on rclpy of Jazzy and Kilted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import edge_server

PACKAGE = Path(edge_server.__file__).parent / "plugins" / "ros" / "ros2_package" / "edge_server_ros"
COLCON = os.environ.get("EDGE_TEST_COLCON", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.soak,
    pytest.mark.timeout(180),
    pytest.mark.skipif("EDGE_TEST_RCLPY" not in os.environ, reason="needs rclpy: tests/plugins/ros/fetch_rclpy.sh"),
    pytest.mark.skipif(not COLCON, reason="needs colcon: tests/plugins/ros/fetch_colcon.sh"),
]
both = pytest.mark.parametrize("distribution", ["jazzy", pytest.param("kilted", marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which colcon has built the package."""
    folder = tmp_path_factory.mktemp("workspace")
    shutil.copytree(PACKAGE, folder / "src" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [COLCON, "--log-base", str(folder / "log"), "build"], cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "COLCON_HOME": str(folder / "home")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "install" / PACKAGE.name


class Node:
    """The process of the node, and the file that it logs to."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log


@pytest.fixture
def running(live: Any, workspace: Path, distribution: str) -> Callable[..., Any]:
    """`with running(*ros_arguments)`: the node's program runs; at the end SIGINT, as Ctrl-C, ends it with code 0."""
    python = live.python_of(distribution)
    (modules,) = workspace.glob("lib/python3*/site-packages")
    own = {"PYTHONPATH": f"{modules}{os.pathsep}{live.own_path(distribution)}"}

    @contextlib.contextmanager
    def run(*arguments: str) -> Iterator[Node]:
        log = live.folder / "node.log"
        program = workspace / "lib" / PACKAGE.name / "edge_server_node"
        with open(log, "wb") as file:
            command = [python, str(program), "--ros-args", *arguments]
            process = subprocess.Popen(command, env={**live.environment, **own}, stdout=file, stderr=file)
        try:
            yield Node(process, log)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, log.read_text()
            assert "Traceback" not in log.read_text()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()}") from error
        finally:
            process.kill()
            process.wait()

    return run


def parameters(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in ("-p", f"{name}:={json.dumps(value)}")]


@both
def test_the_node_publishes_what_robots_expect_and_changes_its_model(
    scripted: Callable[..., Any], client: Any, running: Callable[..., Any], governor: str, workspace: Path
) -> None:
    server = scripted()
    server.labels, server.missing_models, server.failing_models = ("cup", "bowl"), {"ghost"}, {"broken"}
    defaults = workspace / "share" / PACKAGE.name / "config" / "params.yaml"
    given = parameters(server_address=server.address, server_http_url=governor, model_name="finder")
    client("listen", "/detections_output", "vision_msgs/msg/Detection2DArray", "DEFAULT")
    client("listen", "/diagnostics", "diagnostic_msgs/msg/DiagnosticArray", "DEFAULT")
    client("camera", "/camera/image_raw", 64, 48, 20)
    with running("--params-file", str(defaults), *given, "-r", "image:=/camera/image_raw") as node:
        (first, *_) = client("wait", "/detections_output", 3, 30)
        assert (first["header"]["frame_id"], first["detections"][0]["bbox"]["size_x"]) == ("camera_optical", 20.0)
        assert server.requests[-1].stream_id == "ros:/camera/image_raw:finder"

        # Those who come later get these, too.
        client("listen", "/vision_info", "vision_msgs/msg/VisionInfo", "TRANSIENT_LOCAL")
        client("listen", "/label_info", "vision_msgs/msg/LabelInfo", "TRANSIENT_LOCAL")
        (info,), (labels,) = client("wait", "/vision_info", 1, 20), client("wait", "/label_info", 1, 20)
        assert (info["method"], info["database_version"]) == ("finder version 1 on script", 1)
        assert info["database_location"] == "/label_info"
        assert [(one["class_id"], one["class_name"]) for one in labels["class_map"]] == [(0, "cup"), (1, "bowl")]

        statuses = {one["name"]: one for one in client("wait", "/diagnostics", 3, 30)[-1]["status"]}
        assert set(statuses) == {"edge_server: frames", "edge_server: server", "edge_server: governor"}
        assert {one["hardware_id"] for one in statuses.values()} == {server.address}
        assert statuses["edge_server: server"]["level"] == [0]
        hot = statuses["edge_server: governor"]
        assert (hot["level"], hot["message"]) == ([1], "HOT - 85 °C of 80 °C")
        values = {pair["key"]: pair["value"] for pair in hot["values"]}
        assert (values["temperature (C)"], values["refused: normal (thermal)"]) == ("85.2", "7")

        # What cannot answer leaves what serves.
        refused = client.set_model(model_name="ghost")
        assert not refused["success"]
        assert "unknown model 'ghost'" in refused["message"]
        refused = client.set_model(model_name="broken")
        assert not refused["success"]
        assert "INTERNAL: it fails" in refused["message"]
        client("wait", "/detections_output", 1, 20)
        assert client.parameter("model_name") == "finder"

        assert client.set_model(model_name="better") == {
            "success": True, "message": "/camera/image_raw goes to better version 1 on script",
        }  # fmt: skip
        (info,) = client("wait", "/vision_info", 1, 20)
        assert (info["method"], info["database_version"]) == ("better version 1 on script", 2)
        assert client.set_model(image_topic="/other/image")["success"]
        client("camera", "", 0, 0, 0)
        client("wait", "/detections_output", 0, 20)
        client("camera", "/other/image", 64, 48, 20)
        client("wait", "/detections_output", 3, 20)
        assert client("count", "/camera/image_raw")[1] == 0
        assert (client.parameter("model_name"), client.parameter("image_topic")) == ("better", "/other/image")
        assert server.requests[-1].stream_id == "ros:/other/image:better"
    assert "other/image goes to better" in node.log.read_text()


@both
def test_a_manager_of_lifecycles_takes_the_node_through_its_states(
    scripted: Callable[..., Any], client: Any, running: Callable[..., Any]
) -> None:
    server = scripted()
    server.missing_models = {"finder"}
    given = parameters(server_address=server.address, model_name="finder", autostart=False, image_topic="/image")
    client("listen", "/detections_output", "vision_msgs/msg/Detection2DArray", "DEFAULT")
    client("camera", "/image", 64, 48, 20)
    with running(*given) as node:
        assert client.state() == "unconfigured"
        assert not client.change_state("configure")
        assert client.state() == "unconfigured"
        server.missing_models = set()
        assert client.change_state("configure")
        assert client.state() == "inactive"
        assert client("count", "/image")[1] == 0
        assert client.change_state("activate")
        client("wait", "/detections_output", 2, 20)
        assert client.state() == "active"
        # A change that is under way ends with the state.
        server.mute_models = {"mute"}
        fields = {"model_name": "mute"}
        client("ask", "/edge_server/set_model", "edge_server_interfaces/srv/SetModel", fields)
        while server.requests[-1].model != "mute":
            assert client.state() == "active"
        assert client.change_state("deactivate")
        assert client.state() == "inactive"
        assert client("count", "/image")[1] == 0
        server.mute_models = set()
        server.stop()
        server.start()
        assert not client("answer")["success"]
        assert client.set_model(model_name="better")["message"] == "the node is not active"
        assert client.change_state("activate")
        client("wait", "/detections_output", 2, 20)
        # The stream ends for good: its id is taken. The node can be configured again.
        server.refusal = grpc.StatusCode.ABORTED
        server.stop()
        server.start()
        wait_for_state(client, "unconfigured")
        server.refusal = None
        assert client.change_state("configure")
        assert client.change_state("cleanup")
        assert client.change_state("configure")
        assert client.change_state("activate")
        client("wait", "/detections_output", 2, 20)
        assert client.change_state("shutdown")
        assert client.state() == "finalized"
    assert "unknown model 'finder'" in node.log.read_text()


def wait_for_state(client: Any, expected: str) -> None:
    while client.state() != expected:
        pass


@both
def test_the_node_starts_by_itself_once_the_server_has_the_model(
    scripted: Callable[..., Any], client: Any, running: Callable[..., Any]
) -> None:
    server = scripted()
    server.is_empty = True
    client("listen", "/detections_output", "vision_msgs/msg/Detection2DArray", "DEFAULT")
    client("camera", "/image", 64, 48, 20)
    with running(*parameters(server_address=server.address, model_name="finder")) as node:
        while "trying again" not in node.log.read_text():
            assert client.state() == "unconfigured"
        server.is_empty = False
        client("wait", "/detections_output", 2, 30)
        assert client.state() == "active"
    assert node.log.read_text().count("unknown model 'finder'") == 1


@pytest.mark.parametrize("distribution", ["jazzy"])
def test_an_invalid_parameter_ends_the_node_with_an_error(running: Callable[..., Any]) -> None:
    with running(*parameters(detections_topic="")) as node:
        assert node.process.wait(60) == 1
        node.process.returncode = 0
    assert "at least one topic" in node.log.read_text()
