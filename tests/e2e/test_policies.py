"""Robot policies over openpi's WebSocket, with a real server: answers, episodes, hostile clients, limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder, parameters
from tests.kit.server import COMMAND, serve

messages = pytest.importorskip("edge_server.plugins.policies.array_messages", reason="needs msgpack, of policies")

ARM = """
backend: "python"
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "pause" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "action" data_type: TYPE_FP32 dims: [ 4, 2 ] }
parameters { key: "policy_action_key" value { string_value: "actions" } }
parameters { key: "policy_inputs" value { string_value: "state=observation/state" } }
parameters { key: "policy_dt_ms" value { string_value: "20" } }
parameters { key: "policy_metadata" value { string_value: "{\\"reset_pose\\": [0, 1]}" } }
"""

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
input { name: "state" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 1, 1 ] }
parameters { key: "policy_action_key" value { string_value: "action" } }
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


UPGRADE = {
    "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model_folder(folder / "arm", ARM, {"1/model.py": WORK.replace("OFFSET", "0")})
    model_folder(folder / "counter", COUNTER, {"1/model.py": COUNT})
    model_folder(folder / "changing", ARM, {"1/model.py": WORK.replace("OFFSET", "100")})
    old = ARM + parameters(policy_max_age_ms="50")
    model_folder(folder / "young", old, {"1/model.py": WORK.replace("OFFSET", "0")})
    on_trial = 'version_policy { all {} } parameters { key: "canary_share" value { string_value: "0.5" } }'
    model_folder(folder / "tried", ARM + on_trial, {"1/model.py": WORK.replace("OFFSET", "100")})
    model_folder(folder / "tried", ARM + on_trial, {"2/model.py": WORK.replace("OFFSET", "200")}, version=2)
    model_folder(folder / "tried_counter", COUNTER + on_trial, {"1/model.py": COUNT})
    model_folder(
        folder / "tried_counter",
        COUNTER + on_trial,
        {"2/model.py": COUNT.replace("1 if start", "101 if start")},
        version=2,
    )
    model_folder(folder / "plain", re.sub(r"parameters.*\n", "", ARM), {"1/model.py": WORK.replace("OFFSET", "0")})
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Any]:
    with serve(models, "--policy-openpi=127.0.0.1:0") as server:
        yield server
        assert "plugins/policies" not in server.log(), server.log()


@pytest.fixture(scope="module")
def address(server: Any) -> str:
    return find_address(server)


def find_address(server: Any) -> str:
    found = re.search(r"openpi ws://(127\.0\.0\.1:\d+)", "\n".join(server.banner))
    assert found, server.banner
    return found[1]


class Robot:
    """Client of the WebSocket on a loop of its own, with the messages of openpi's client."""

    def __init__(self, address: str, model: str = "arm", **headers: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._session = self.run(self._open_session())
        self.socket: Any = None
        self._url, self._headers = f"ws://{address}/{model}", headers
        try:
            self.socket = self.run(self._session.ws_connect(self._url, headers=headers, max_msg_size=0))
            self.metadata = messages.read_message(self.receive())
        except BaseException:
            self.close()
            raise

    async def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def run(self, call: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(call, 30))

    def send(self, **observation: Any) -> None:
        self.run(self.socket.send_bytes(messages.write_message(observation)))

    def receive(self) -> Any:
        """Return the next message: bytes, or a text."""
        return self.run(self.socket.receive()).data

    def act(self, *state: float, **others: Any) -> Any:
        """Return the actions for a state, or the text of the refusal."""
        self.send(observation={"state": np.float32(state)}, **others)
        return self.answer()

    def answer(self) -> Any:
        data = self.receive()
        return data if isinstance(data, str) else messages.read_message(data)["actions"]

    def close(self) -> None:
        if not self._loop.is_closed():
            if self.socket is not None:
                self.run(self.socket.close())
            self.run(self._session.close())
            self.run(asyncio.sleep(0))  # transports close in the next turn of the loop
            self._loop.close()


@pytest.fixture
def connect(address: str) -> Iterator[Callable[..., Robot]]:
    robots: list[Robot] = []

    def connect(model: str = "arm", at: str = address, **headers: str) -> Robot:
        robots.append(Robot(at, model, **headers))
        return robots[-1]

    yield connect
    for robot in robots:
        robot.close()


def metrics_of(server: Any, model: str) -> dict[str, float]:
    pattern = rf'^edge_policy_(\w+){{model="{model}",wire="openpi"(?:,result="(\w+)")?}} (\S+)'
    found = re.findall(pattern, server.read_metrics(), re.MULTILINE)
    return {f"{name} {result}".strip(): float(value) for name, result, value in found}


def test_the_actions_are_those_that_tritons_client_gets(server: Any, connect: Callable[..., Robot]) -> None:
    robot = connect()
    assert robot.metadata == {
        "model": "arm", "action_key": "actions", "action_horizon": 4, "action_dt_ms": 20.0, "reset_pose": [0, 1],
    }  # fmt: skip
    state = np.float32([1.5, -2.25])
    client = grpcclient.InferenceServerClient(server.grpc)
    given = infer_input(grpcclient, "state", state)
    expected = client.infer("arm", [given]).as_numpy("action")
    client.close()
    found = robot.act(*state)
    assert found.dtype == np.float32
    assert found.tolist() == expected.tolist()


def test_an_answer_tells_how_long_it_took(connect: Callable[..., Robot]) -> None:
    robot = connect()
    robot.send(observation={"state": [1, 2]}, pause=0.05)
    assert 50 <= messages.read_message(robot.receive())["server_timing"]["infer_ms"] < 30_000


def test_a_wrong_observation_is_answered_with_a_sentence_and_the_next_one_with_actions(
    connect: Callable[..., Robot],
) -> None:
    robot = connect()
    assert robot.act(1, 2, 3) == "model 'arm', 'observation/state' of the observation: expected shape [2], given [3]"
    robot.run(robot.socket.send_bytes(b"\xc1"))
    assert robot.receive().startswith("expected a message in MessagePack")
    robot.run(robot.socket.send_str("{}"))
    assert robot.receive() == "expected an observation as a binary message in MessagePack"
    assert robot.act(1, 2).shape == (4, 2)


def test_a_model_that_fails_harms_one_observation(connect: Callable[..., Robot]) -> None:
    robot = connect()
    assert "sleep length must be non-negative" in robot.act(1, 2, pause=-1.0)
    assert robot.act(1, 2).shape == (4, 2)


def test_observations_that_a_newer_one_overtakes_are_not_run(server: Any, connect: Callable[..., Robot]) -> None:
    robot = connect()
    before = metrics_of(server, "arm")
    for state, pause in ((1, 0.5), (2, 0), (3, 0), (4, 0)):
        robot.send(observation={"state": [state, 0]}, pause=float(pause))
    overtaken = "the observation was overtaken by a newer one"
    found = [robot.answer() for _ in range(4)]
    assert [item if isinstance(item, str) else item[0, 0] for item in found] == [1.0, overtaken, overtaken, 4.0]
    after = metrics_of(server, "arm")
    assert after["observations_total overtaken"] - before.get("observations_total overtaken", 0) == 2
    assert after["observations_total answered"] - before.get("observations_total answered", 0) == 2


def test_an_observation_that_became_too_old_is_not_run(server: Any, connect: Callable[..., Robot]) -> None:
    busy, robot = connect("young"), connect("young")
    busy.act(0, 0)
    busy.send(observation={"state": [0, 0]}, pause=0.5)
    time.sleep(0.1)
    assert "young" in robot.act(1, 2)
    assert metrics_of(server, "young")["observations_total too_old"] >= 1


def test_robots_are_in_the_report_and_in_status(server: Any, connect: Callable[..., Robot]) -> None:
    connect().act(1, 2)
    found = {item["model"]: item for item in server.ask("/edge/v1/policies")[1]["policies"]}["arm"]
    assert found["wire"] == "openpi"
    assert found["robots"] >= 1
    assert 0 < found["newest_age_s"] < 30
    status = subprocess.run(
        [COMMAND, "status", f"--url=http://{server.http}"], capture_output=True, text=True, check=False
    )
    assert "arm over openpi: " in status.stdout
    assert "policies" in server.ask("/edge/v1/page")[1]["panels"]


def count(robot: Robot) -> float:
    """Return what a model of COUNT counts for a robot."""
    robot.send(state=[0.0])
    return float(messages.read_message(robot.receive())["action"][0, 0])


def test_a_robot_is_one_sequence_and_two_robots_are_two(connect: Callable[..., Robot]) -> None:
    one, other = connect("counter"), connect("counter")
    assert [count(one), count(one), count(other), count(one)] == [1, 2, 1, 3]
    one.close()
    assert count(connect("counter")) == 1


def test_an_episode_keeps_its_version_and_the_next_one_takes_the_newest(
    server: Any, models: Path, connect: Callable[..., Robot]
) -> None:
    robot = connect("changing")
    assert robot.act(0, 0)[0, 0] == 100
    model_folder(models / "changing", ARM, {"2/model.py": WORK.replace("OFFSET", "200")}, version=2)

    def starts_with_the_newest() -> bool:
        assert robot.act(0, 0)[0, 0] == 100
        other = connect("changing")
        try:
            return bool(other.act(0, 0)[0, 0] == 200)
        finally:
            other.close()

    assert eventually(starts_with_the_newest)
    assert robot.act(0, 0)[0, 0] == 100
    states = {entry["version"]: entry["state"] for entry in index_of(server, "changing")}
    assert states["2"] == "READY"
    again = connect("changing")
    assert again.act(0, 0)[0, 0] == 200


def test_a_canary_gets_its_share_of_the_episodes_and_each_keeps_its_version(
    server: Any, models: Path, connect: Callable[..., Robot]
) -> None:
    robots = [connect("tried") for _ in range(4)]
    first = [robot.act(0, 0)[0, 0] for robot in robots]
    assert sorted(first) == [100, 100, 200, 200]
    for _ in range(3):
        assert [robot.act(0, 0)[0, 0] for robot in robots] == first
    # The trial ends: the canary's version goes.
    shutil.rmtree(models / "tried/2")
    assert eventually(lambda: server.get("/v2/models/tried/versions/2/ready")[0] != 200)
    assert [robot.act(0, 0)[0, 0] for robot in robots] == first
    assert "'tried' version 2 is unloaded" not in server.log()
    for robot in robots:
        robot.close()
    assert eventually(lambda: "'tried' version 2 is unloaded" in server.log())
    assert connect("tried").act(0, 0)[0, 0] == 100


def index_of(server: Any, model: str) -> list[dict[str, str]]:
    return [entry for entry in server.ask("/v2/repository/index", {})[1] if entry["name"] == model]


def test_a_version_is_unloaded_after_the_episode_that_used_it(
    server: Any, models: Path, connect: Callable[..., Robot]
) -> None:
    model_folder(models / "leaving", ARM, {"1/model.py": WORK.replace("OFFSET", "1")})
    assert eventually(lambda: server.get("/v2/models/leaving/ready")[0] == 200)
    robot = connect("leaving")
    assert robot.act(0, 0)[0, 0] == 1
    shutil.rmtree(models / "leaving")
    assert eventually(lambda: server.get("/v2/models/leaving/ready")[0] != 200)
    assert robot.act(0, 0)[0, 0] == 1
    robot.close()
    assert eventually(lambda: "'leaving' version 1 is unloaded" in server.log())


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("plain", 400, "model 'plain' is no policy: its configuration has no parameter 'policy_action_key'"),
        ("absent", 404, "Request for unknown model"),
        (
            "",
            404,
            "several policies serve (arm, changing, counter, tried, tried_counter, young): name one in the path of the "
            "address, /MODEL",
        ),
    ],
)
def test_a_robot_without_a_policy_is_refused_with_a_sentence(
    address: str, path: str, status: int, message: str
) -> None:
    answered, body = http_get(address, f"/{path}", **UPGRADE)
    assert answered == status
    assert message in body


def http_get(address: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_other_clients_get_a_sentence(address: str) -> None:
    assert http_get(address, "/healthz") == (200, "OK\n")
    status, body = http_get(address, "/arm")
    assert status == 400
    assert body.startswith(
        f"openpi's protocol at ws://{address}/MODEL: expected GET with the headers Upgrade: websocket"
    )


def test_a_message_that_is_too_large_ends_its_connection_alone(connect: Callable[..., Robot]) -> None:
    robot, other = connect(), connect()
    with contextlib.suppress(ConnectionError, aiohttp.ClientError):
        robot.run(robot.socket.send_bytes(b"\0" * (messages.MAX_MESSAGE_BYTES + 1)))
    with contextlib.suppress(ConnectionError):
        assert robot.run(robot.socket.receive()).type in (
            aiohttp.WSMsgType.CLOSE,
            aiohttp.WSMsgType.CLOSED,
            aiohttp.WSMsgType.ERROR,
        )
    assert other.act(1, 2).shape == (4, 2)


@pytest.mark.soak
def test_robots_that_send_much_share_the_memory_and_harm_none_that_sends_little(models: Path) -> None:
    with serve(models, "--policy-openpi=127.0.0.1:0") as server, contextlib.ExitStack() as robots:
        address = find_address(server)

        def join() -> Robot:
            return robots.enter_context(contextlib.closing(Robot(address)))

        small, large = join(), [join() for _ in range(15)]
        small.act(1, 2)
        before_mb = peak_memory_mb(server)
        message = messages.write_message({"observation/state": [1, 2], "other": np.zeros(31 << 20, np.uint8)})
        header = b"\x82\xff" + len(message).to_bytes(8, "big") + b"\0\0\0\0"
        # Half of the messages are sent whole, the others never end.
        senders, connections = [], []
        for number, robot in enumerate(large):
            data = header + (message if number % 2 else message[: 30 << 20])
            raw = robot.socket.get_extra_info("socket")
            connections.append(robots.enter_context(socket.socket(fileno=os.dup(raw.fileno()))))
            connections[-1].setblocking(True)
            senders.append(threading.Thread(target=send_or_fail, args=(connections[-1], data)))
            senders[-1].start()
        for _ in range(50):
            assert small.act(1, 2).shape == (4, 2)
        for number, robot in enumerate(large):
            if number % 2:
                assert messages.read_message(robot.receive())["actions"].shape == (4, 2)
        for sender in senders:
            sender.join()
        assert small.act(1, 2).shape == (4, 2)
        assert peak_memory_mb(server) - before_mb < 256
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # else a client waits for the answer to its close


def send_or_fail(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(data)


def peak_memory_mb(server: Any) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def test_robots_are_limited_and_connections_that_say_nothing_give_way(
    address: str, connect: Callable[..., Robot]
) -> None:
    host, port = address.split(":")
    with contextlib.ExitStack() as silent:
        for _ in range(70):
            silent.enter_context(socket.create_connection((host, int(port))))
        robots = [connect() for _ in range(16)]
        refusal = "16 robots are connected, which is the maximum\n"
        assert http_get(address, "/arm", **UPGRADE) == (503, refusal)
        assert robots[0].act(1, 2).shape == (4, 2)


def test_a_key_is_taken_as_openpis_client_sends_it(models: Path, tmp_path: Path) -> None:
    token = secrets.token_hex(32)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"robot {hashlib.sha256(token.encode()).hexdigest()} inference\n")
    with serve(models, "--policy-openpi=127.0.0.1:0", f"--auth-tokens-file={tokens}") as server:
        at = find_address(server)
        for headers in ({}, {"Authorization": "Api-Key wrong"}):
            assert http_get(at, "/arm", **UPGRADE, **headers)[0] == 401
        robot = Robot(at, Authorization=f"Api-Key {token}")
        assert robot.act(1, 2).shape == (4, 2)
        robot.close()


def test_a_server_that_stops_says_so_to_its_robots(models: Path) -> None:
    with serve(models, "--policy-openpi=127.0.0.1:0") as server:
        robot = Robot(find_address(server))
        robot.act(1, 2)
        server.process.terminate()
        closing = robot.run(robot.socket.receive())
        assert (closing.type, closing.data, closing.extra) == (aiohttp.WSMsgType.CLOSE, 1001, "the server stops")
        robot.close()
        assert server.process.wait(30) == 0
