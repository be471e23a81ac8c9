"""openpi's WebSocket, with a server in this process: which observations are run, with which version, and for whom."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server
from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder, parameters

websockets = pytest.importorskip("websockets", reason="needs websockets, of policies")
from websockets.sync.client import connect as open_websocket  # noqa: E402

messages = pytest.importorskip("edge_server.plugins.policies.array_messages", reason="needs msgpack, of policies")

ARM = """
backend: "python"
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "pause" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "action" data_type: TYPE_FP32 dims: [ 4, 2 ] }
"""
POLICY = parameters(policy_action_key="actions", policy_inputs="state=observation/state", policy_dt_ms="20")
WORK = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        state = pb_utils.get_input_tensor_by_name(request, "state").as_numpy()
        pause = pb_utils.get_input_tensor_by_name(request, "pause")
        if pause is not None:
            time.sleep(float(pause.as_numpy()[0]))
        steps = np.arange(4, dtype=np.float32)[:, None]
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", steps + state + OFFSET)])
"""
COUNTER = """
backend: "python"
max_batch_size: 4
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 1, 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        start, id = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in ("START", "ID"))
        self.counts[id] = 1 if start else self.counts[id] + 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", np.float32([[[self.counts[id]]]]))])
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, offset, config in (
        ("arm", 0, ARM + POLICY),
        ("changing", 100, ARM + POLICY),
        ("young", 0, ARM + POLICY + parameters(policy_max_age_ms="50")),
        ("plain", 0, ARM),
    ):
        model_folder(folder / name, config, {"1/model.py": WORK.replace("OFFSET", str(offset))})
    model_folder(folder / "counter", COUNTER + POLICY, {"1/model.py": COUNT})
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[edge_server.Server]:
    explicit = {"model_control_mode": "explicit", "load_model": "*"}
    with edge_server.Server(models, http_port=0, policy_openpi="127.0.0.1:0", **explicit) as server:
        yield server


@pytest.fixture(scope="module")
def address(server: Any) -> str:
    (address,) = (text for text in server._core.plugins.addresses() if text.startswith("openpi"))
    return str(address.removeprefix("openpi ws://"))


class Robot:
    """Client of the WebSocket, with the messages of openpi's client."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        assert messages.read_message(socket.recv(30))["action_key"] == "actions"

    def send(self, *state: float, **others: Any) -> None:
        self.socket.send(messages.write_message({"observation": {"state": np.float32(state)}, **others}))

    def receive(self) -> Any:
        """Return the next answer: actions, or the text of a refusal."""
        data = self.socket.recv(30)
        return data if isinstance(data, str) else messages.read_message(data)["actions"]

    def act(self, *state: float, **others: Any) -> Any:
        self.send(*state, **others)
        return self.receive()


@pytest.fixture
def connect(address: str) -> Iterator[Callable[..., Robot]]:
    with contextlib.ExitStack() as robots:

        def connect(model: str = "arm") -> Robot:
            return Robot(robots.enter_context(open_websocket(f"ws://{address}/{model}", proxy=None)))

        yield connect


def counts_of(server: Any, model: str) -> dict[str, float]:
    pattern = rf'^edge_policy_observations_total{{model="{model}",wire="openpi",result="(\w+)"}} (\S+)'
    return {result: float(value) for result, value in re.findall(pattern, server.metrics(), re.MULTILINE)}


def test_what_is_wrong_is_answered_with_a_sentence_and_the_next_observation_with_actions(
    connect: Callable[..., Robot],
) -> None:
    robot = connect()
    assert robot.act(1, 2, 3) == "model 'arm', 'observation/state' of the observation: expected shape [2], given [3]"
    robot.socket.send(b"\xc1")
    assert robot.receive().startswith("expected a message in MessagePack")
    robot.socket.send("{}")
    assert robot.receive() == "expected an observation as a binary message in MessagePack"
    assert "sleep length must be non-negative" in robot.act(1, 2, pause=-1.0)
    assert robot.act(1, 2).tolist() == [[1, 2], [2, 3], [3, 4], [4, 5]]


def test_observations_that_a_newer_one_overtakes_are_not_run(server: Any, connect: Callable[..., Robot]) -> None:
    robot, before = connect(), counts_of(server, "arm")
    for state, pause in ((1, 0.5), (2, 0), (3, 0), (4, 0)):
        robot.send(state, 0, pause=float(pause))
    overtaken = "the observation was overtaken by a newer one"
    found = [robot.receive() for _ in range(4)]
    assert [item if isinstance(item, str) else item[0, 0] for item in found] == [1.0, overtaken, overtaken, 4.0]
    after = counts_of(server, "arm")
    assert [after[key] - before.get(key, 0) for key in ("overtaken", "answered")] == [2, 2]


def test_an_observation_that_became_too_old_is_not_run(server: Any, connect: Callable[..., Robot]) -> None:
    busy, robot = connect("young"), connect("young")
    busy.act(0, 0)
    busy.send(0, 0, pause=0.5)
    assert eventually(lambda: server.statistics("young")["model_stats"][0]["inference_count"] == 1)
    assert "young" in robot.act(1, 2)
    assert counts_of(server, "young")["too_old"] >= 1


def test_robots_are_in_the_report_and_in_status(server: Any, connect: Callable[..., Robot], run_command: Any) -> None:
    connect().act(1, 2)
    url = f"http://127.0.0.1:{server.http_port}"
    with urllib.request.urlopen(f"{url}/edge/v1/policies") as answer:
        found = {item["model"]: item for item in json.load(answer)["policies"]}["arm"]
    assert (found["wire"], found["robots"] >= 1, 0 < found["newest_age_s"] < 30) == ("openpi", True, True)
    assert "arm over openpi: " in run_command("status", f"--url={url}").stdout


def test_a_robot_is_one_sequence_and_two_robots_are_two(server: Any, connect: Callable[..., Robot]) -> None:
    one, other = connect("counter"), connect("counter")
    assert [robot.act(0, 0).item() for robot in (one, one, other, one)] == [1, 2, 1, 3]
    one.socket.close()
    assert eventually(lambda: 'edge_sequences_live{model="counter",version="1"} 1\n' in server.metrics())
    assert connect("counter").act(0, 0).item() == 1


def test_an_episode_keeps_its_version_until_it_ends_and_the_next_one_takes_the_newest(
    server: Any, models: Path, connect: Callable[..., Robot]
) -> None:
    def states() -> dict[str, str]:
        return {entry.version: entry.state for entry in server.models() if entry.name == "changing"}

    robot = connect("changing")
    assert robot.act(0, 0)[0, 0] == 100
    model_folder(models / "changing", "", {"2/model.py": WORK.replace("OFFSET", "200")}, version=2)
    server.load("changing")
    assert connect("changing").act(0, 0)[0, 0] == 200
    assert robot.act(0, 0)[0, 0] == 100
    assert states()["1"] == "UNLOADING"
    robot.socket.close()
    assert eventually(lambda: states().get("1") != "UNLOADING")


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("plain", 400, "model 'plain' is no policy: its configuration has no parameter 'policy_action_key'"),
        ("absent", 404, "Request for unknown model"),
        (
            "",
            404,
            "several policies serve (arm, changing, counter, young): name one in the path",
        ),
    ],
)
def test_a_robot_without_a_policy_is_refused_with_a_sentence(
    connect: Callable[..., Robot], path: str, status: int, message: str
) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        connect(path)
    assert caught.value.response.status_code == status
    assert message in caught.value.response.body.decode()


def test_other_clients_get_a_sentence(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/healthz") as answer:
        assert answer.read() == b"OK\n"
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(f"http://{address}/arm"):
        pass
    with caught.value as refused:
        assert (refused.code, b"expected GET with the headers Upgrade: websocket" in refused.read()) == (400, True)


def test_robots_are_limited_and_connections_that_say_nothing_give_way(
    address: str, connect: Callable[..., Robot]
) -> None:
    host, port = address.split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(70):
            silent.enter_context(socket.create_connection((host, int(port))))
        robots = [connect() for _ in range(16)]
        with pytest.raises(websockets.InvalidStatus) as caught:
            connect()
        assert caught.value.response.status_code == 503
        assert caught.value.response.body == b"16 robots are connected, which is the maximum\n"
        assert robots[0].act(1, 2).shape == (4, 2)
