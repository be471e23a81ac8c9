"""Fixtures: nodes of live ROS 2, rclpy of Jazzy and Kilted with their own middleware, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.site import Handler, Site

CAMERA = Path(__file__).parent / "rclpy_camera.py"
CLIENT = Path(__file__).parent / "ros_client.py"
LIMIT_S = 90.0

LIFECYCLE = {"configure": 1, "cleanup": 2, "activate": 3, "deactivate": 4, "shutdown": 7}
"""Numbers of lifecycle_msgs/Transition; shutdown is that of an active node."""

HOT = {
    "enabled": True, "state": "HOT", "detail": "85 °C of 80 °C", "share": 0.5, "temperature_c": 85.2,
    "causes": ["thermal"], "shed": [{"class": "normal", "reason": "thermal", "count": 7}],
    "box": {"board": "Orin Nano", "power_mode": {"number": 0, "name": "15W"}},
}  # fmt: skip


@dataclass
class LiveRos2:
    """Processes in one ROS domain on this machine. `distribution` is that of the nodes: "jazzy" or "kilted"."""

    environment: dict[str, str]
    folder: Path

    def python_of(self, distribution: str) -> str:
        return str(Path(os.environ["EDGE_TEST_RCLPY"]) / distribution / "bin/python")

    def own_path(self, distribution: str) -> str:
        """Return the PYTHONPATH with which `python_of` has this package, too. Skips if it has another version."""
        skip_without_same_python(self.python_of(distribution))
        return os.pathsep.join(path for path in sys.path if path)

    def start_camera(
        self, distribution: str, spec: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start rclpy_camera.py; `finish_camera` returns what it prints."""
        pictures = {"image_topic": "/camera/image_raw", "image_qos": "SENSOR_DATA", "width": 640, "height": 480}
        return subprocess.Popen(
            [self.python_of(distribution), str(CAMERA), json.dumps({**pictures, "count": 10, **spec})],
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def play_camera(
        self, distribution: str, spec: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run rclpy_camera.py to its end, and return what it prints."""
        return finish_camera(self.start_camera(distribution, spec, environment))

    @contextlib.contextmanager
    def bridging(
        self,
        address: str,
        *flags: str,
        transport: str = "dds",
        distribution: str = "jazzy",
        images: Sequence[str] = ("/camera/image_raw",),
        environment: Mapping[str, str] | None = None,
        name: str = "bridge",
    ) -> Iterator[BridgeProcess]:
        """Run `edge-server ros bridge` meanwhile; end it by SIGTERM and expect exit code 0.

        With the transport rclpy it runs with the Python and rclpy of `distribution`.
        """
        python, own = sys.executable, {**self.environment, **(environment or {})}
        if transport == "rclpy":
            python = self.python_of(distribution)
            own["PYTHONPATH"] = self.own_path(distribution)
        log = self.folder / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [
                    python, "-m", "edge_server", "ros", "bridge", "--model=finder", f"--address={address}",
                    *(f"--image-topic={image}" for image in images), f"--transport={transport}", *flags,
                ],
                env=own, stderr=file,
            )  # fmt: skip
        try:
            yield BridgeProcess(process, log)
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@dataclass
class BridgeProcess:
    """A bridge that runs, and the file that it logs to."""

    process: subprocess.Popen[bytes]
    log: Path


def finish_camera(camera: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a camera's end and return what it printed."""
    try:
        output, error = camera.communicate(timeout=LIMIT_S)
    finally:
        camera.kill()
        camera.wait()
    assert camera.returncode == 0, f"{output}\n{error}"
    result: dict[str, Any] = json.loads(output)
    return result


def skip_without_same_python(python: str) -> None:
    """Skip where the environment of rclpy has another version of Python than this one: packages would not load."""
    command = [python, "-c", "import sys; print(sys.version_info[:2])"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if found != str(sys.version_info[:2]):
        pytest.skip(f"the environment of rclpy has another Python, {found}")


class RosClient:
    """A process of ros_client.py: `client("wait", "/found", 3, 20)` returns what that action returns."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, str(CLIENT)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, *action: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(action) + "\n")
        self.process.stdin.flush()
        response = json.loads(self.process.stdout.readline())
        assert "answer" in response, f"{action}: {response}"
        return response["answer"]

    def state(self) -> str:
        return self("call", "/edge_server/get_state", "lifecycle_msgs/srv/GetState", {})["current_state"]["label"]

    def change_state(self, name: str) -> bool:
        request = {"transition": {"id": LIFECYCLE[name]}}
        return self("call", "/edge_server/change_state", "lifecycle_msgs/srv/ChangeState", request)["success"]

    def set_model(self, **fields: Any) -> dict[str, Any]:
        return self("call", "/edge_server/set_model", "edge_server_interfaces/srv/SetModel", fields)

    def parameter(self, name: str) -> Any:
        """Return the text of a string parameter of the node."""
        given = self("call", "/edge_server/get_parameters", "rcl_interfaces/srv/GetParameters", {"names": [name]})
        return given["values"][0]["string_value"]


@pytest.fixture
def live(ros_domain: dict[str, str], tmp_path: Path) -> LiveRos2:
    """A domain of this test's own on this machine alone, as users of Jazzy and newer set it."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("ROS_", "CYCLONEDDS_"))}
    own = {"ROS_DOMAIN_ID": ros_domain["ROS_DOMAIN_ID"], "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    return LiveRos2({**without, **own}, tmp_path)


@pytest.fixture
def client(live: Any, distribution: str) -> Iterator[RosClient]:
    client = RosClient(live.python_of(distribution), live.environment)
    with client.process:
        yield client
        client.process.kill()


@pytest.fixture
def governor() -> Iterator[str]:
    """The address of an HTTP server whose governor is hot."""

    class Answers(Handler):
        def do_GET(self) -> None:
            self.answer(json.dumps(HOT).encode(), 200 if self.path == "/edge/v1/governor" else 404)

    with Site(Answers) as site:
        yield site.url
