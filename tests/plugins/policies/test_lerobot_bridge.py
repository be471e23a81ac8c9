"""The bridge of docs/examples between LeRobot's asynchronous inference over gRPC and a server: the calls of LeRobot's
client, wrong calls, and what becomes of robots."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np
import pytest

import edge_server

pytest.importorskip("msgpack", reason="needs msgpack, of the extra policies")
pytest.importorskip("websockets", reason="needs websockets, of the extra test")

ARM = """
backend: "python"
input { name: "state" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "task" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 4, 2 ] }
parameters { key: "policy_action_key" value { string_value: "action" } }
parameters { key: "policy_inputs" value { string_value: "state=observation.state" } }
parameters { key: "policy_dt_ms" value { string_value: "20" } }
"""
WORK = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        state, task = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("state", "task"))
        time.sleep(0.3 if task[0] == b"slowly" else 0)
        steps = np.arange(4, dtype=np.float32)[:, None]
        return pb_utils.InferenceResponse([pb_utils.Tensor("action", steps + state)])
"""
FEATURES = {"observation.state": {"dtype": "float32", "shape": (2,), "names": ["shoulder.pos", "elbow.pos"]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of openpi's wire."""
    models = tmp_path_factory.mktemp("models")
    (models / "arm/1").mkdir(parents=True)
    (models / "arm/1/model.py").write_text(WORK)
    (models / "arm/config.pbtxt").write_text(ARM)
    with edge_server.Server(models, policy_openpi="127.0.0.1:0") as server:
        (found,) = [text for text in server._core.plugins.addresses() if text.startswith("openpi")]  # type: ignore[union-attr]
        yield found.partition(" ")[2]


@pytest.fixture(scope="module")
def bridge(server: str, lerobot: Any) -> Iterator[Any]:
    bridge = lerobot.bridge.Bridge(server)
    yield bridge
    bridge.stop()


@pytest.fixture(scope="module")
def address(bridge: Any, lerobot: Any) -> Iterator[str]:
    """The address of the bridge."""
    listener, port = lerobot.bridge.make_server(bridge, "127.0.0.1:0")
    listener.start()
    yield f"127.0.0.1:{port}"
    listener.stop(None).wait()


class Client:
    """Calls the service with pickles, as LeRobot's RobotClient does."""

    def __init__(self, address: str, lerobot: Any) -> None:
        self._lerobot = lerobot
        # Its own connection, as a process of its own has: it says who the robot is.
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        path = "/transport.AsyncInference/"
        self.ready = self.channel.unary_unary(f"{path}Ready")
        self.instruct = self.channel.unary_unary(f"{path}SendPolicyInstructions")
        self.observe = self.channel.stream_unary(f"{path}SendObservations")
        self.actions = self.channel.unary_unary(f"{path}GetActions")

    def begin(self, policy: str = "arm", features: Any = FEATURES, actions_per_chunk: int = 50) -> None:
        self.ready(b"", timeout=30)
        wanted = self._lerobot.RemotePolicyConfig("act", policy, features, actions_per_chunk, "cpu")
        self.instruct(field(1, pickle.dumps(wanted)), timeout=30)

    def send(
        self, step: int, shoulder: float, task: str = "pick", at: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        raw = {"shoulder.pos": shoulder, "elbow.pos": np.float32(2.0), "task": task}
        fields = {"timestamp": 100.0, "timestep": step, "observation": raw, "must_go": True, **at}
        data = pickle.dumps(self._lerobot.TimedObservation(**fields))
        half = len(data) // 2
        pieces = [b"\x08\x01" + field(2, data[:half]), b"\x08\x03" + field(2, data[half:])]
        self.observe(iter(pieces), timeout=30)

    def receive(self) -> list[Any]:
        answer = self.actions(b"", timeout=30)
        return list(pickle.loads(answer[1 + len(varint(len(answer))) :])) if answer else []


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value >= 0x80 else bytes([value])


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


@pytest.fixture
def connect(address: str, lerobot: Any) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []

    def connect() -> Client:
        clients.append(Client(address, lerobot))
        return clients[-1]

    yield connect
    for client in clients:
        client.channel.close()


def test_a_robot_gets_timed_actions_for_its_observation(connect: Callable[[], Client]) -> None:
    client = connect()
    client.begin("somebody/arm", actions_per_chunk=3)
    client.send(7, 1.5)
    found = client.receive()
    assert [item.action.tolist() for item in found] == [[1.5, 2.0], [2.5, 3.0], [3.5, 4.0]]
    assert [item.timestep for item in found] == [7, 8, 9]
    assert [item.timestamp for item in found] == pytest.approx([100.0, 100.02, 100.04])


def test_the_newest_observation_is_run(connect: Callable[[], Client]) -> None:
    client = connect()
    client.begin()
    for step in range(3):
        client.send(step, float(step))
    assert client.receive()[0].timestep == 2


def test_without_an_observation_there_are_no_actions(connect: Callable[[], Client]) -> None:
    client = connect()
    client.begin()
    assert client.receive() == []


def test_a_second_call_while_one_runs_is_refused(connect: Callable[[], Client]) -> None:
    client = connect()
    client.begin()
    first = threading.Thread(target=client.receive)
    first.start()
    client.send(0, 0.0, "slowly")
    with pytest.raises(grpc.RpcError) as refused:
        receive_until_refused(client)
    first.join()
    assert refused.value.details() == "a call of GetActions is running for this robot"


def receive_until_refused(client: Client) -> None:
    """Ask again until another call runs at the same time."""
    while True:
        client.receive()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.actions(b"", timeout=30), "expected the call SendPolicyInstructions before this one"),
        (
            lambda client: client.observe(iter([b"\x08\x03"]), timeout=30),
            "expected the call SendPolicyInstructions before this one",
        ),
        (lambda client: client.begin("absent"), "404: Request for unknown model: 'absent' is not found"),
        (lambda client: client.begin(features={}) or client.send(0, 0.0) or client.receive(), "lacks 'observation"),
    ],
)
def test_a_wrong_call_gets_a_sentence(connect: Callable[[], Client], call: Any, message: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        call(connect())
    assert message in refused.value.details()


def test_a_robot_that_is_silent_is_forgotten_when_another_one_comes(
    connect: Callable[[], Client], lerobot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connect(), connect()
    first.begin()
    monkeypatch.setattr(lerobot.bridge, "SILENCE_S", 0.0)
    second.begin()
    with pytest.raises(grpc.RpcError, match="expected the call SendPolicyInstructions before this one"):
        first.send(0, 0.0)


def test_a_robot_goes_on_after_its_connection_to_the_server_was_lost(
    connect: Callable[[], Client], bridge: Any
) -> None:
    client = connect()
    client.begin()
    list(bridge._robots.values())[-1]._socket.close()
    client.send(1, 0.0)
    with pytest.raises(grpc.RpcError, match="FAILED_PRECONDITION"):
        client.receive()
    client.send(2, 0.0)
    assert [item.timestep for item in client.receive()] == [2, 3, 4, 5]


def test_the_bridge_listens_on_this_machine_only_unless_told_otherwise(
    lerobot: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def make_server(bridge: Any, address: str) -> Any:
        asked.append(address)
        raise KeyboardInterrupt

    monkeypatch.setattr(lerobot.bridge, "make_server", make_server)
    monkeypatch.setattr("sys.argv", ["lerobot_bridge.py", "--server=ws://127.0.0.1:9"])
    with pytest.raises(KeyboardInterrupt):
        lerobot.bridge.main()
    assert asked == ["127.0.0.1:8080"]
