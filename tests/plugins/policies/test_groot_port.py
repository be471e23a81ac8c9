"""GR00T's ZeroMQ, with a server in this process and messages as its clients of N1.5 to N1.7 send them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import edge_server
from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder

msgpack = pytest.importorskip("msgpack", reason="needs msgpack, of the extra policies")
zmq = pytest.importorskip("zmq", reason="needs pyzmq, of the extra policies")

HUMANOID = """
backend: "python"
input { name: "view" data_type: TYPE_FP32 dims: [ 3, 4, 4 ] }
input { name: "left" data_type: TYPE_FP32 dims: [ 2 ] }
input { name: "task" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "left_arm" data_type: TYPE_FP32 dims: [ 3, 2 ] }
output { name: "waist" data_type: TYPE_FP32 dims: [ 3, 1 ] }
parameters { key: "policy_action_key" value { string_value: "left_arm" } }
parameters { key: "policy_inputs" value { string_value: "KEYS" } }
parameters { key: "image_input" value { string_value: "view" } }
parameters { key: "image_scale" value { string_value: "1/255" } }
"""
DOCUMENT = (Path(__file__).parents[3] / "docs/robots.md").read_text()
NEW_KEYS = re.search(r'"policy_inputs" value \{ string_value: "(view=.*)"', DOCUMENT)[1]
OLD_KEYS = "view=video.ego_view, left=state.left_arm, task=annotation.human.task_description"

WORK = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.act(request) for request in requests]

    def act(self, request):
        view, left, task = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("view", "left", "task"))
        waist = np.float32([[view.mean()], [len(task[0])], [0]])
        steps = np.arange(3, dtype=np.float32)[:, None]
        return pb_utils.InferenceResponse([pb_utils.Tensor("left_arm", steps + left), pb_utils.Tensor("waist", waist)])
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    folder = tmp_path_factory.mktemp("models")
    for name, keys in (("humanoid", NEW_KEYS), ("old", OLD_KEYS)):
        model_folder(folder / name, HUMANOID.replace("KEYS", keys), {"1/model.py": WORK})
    return folder


def two_frames_model() -> onnx.ModelProto:
    """A policy of two frames: adds the mean of each picture to the state of its step."""
    view = helper.make_tensor_value_info("view", TensorProto.UINT8, [1, 2, 4, 6, 3])
    left = helper.make_tensor_value_info("left", TensorProto.FLOAT, [1, 2, 3])
    arm = helper.make_tensor_value_info("left_arm", TensorProto.FLOAT, [1, 2, 3])
    nodes = [
        helper.make_node("Cast", ["view"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels"], ["means"], axes=[2, 3, 4], keepdims=0),
        helper.make_node("Unsqueeze", ["means", "last"], ["column"]),
        helper.make_node("Add", ["left", "column"], ["left_arm"]),
    ]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [2])
    graph = helper.make_graph(nodes, "two_frames", [view, left], [arm], [last])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@contextlib.contextmanager
def serve(models: Path, port: str, **settings: Any) -> Iterator[Any]:
    """Run a server with GR00T's port; `address` is the port's."""
    with edge_server.Server(models, policy_groot=port, **settings) as server:
        (server.address,) = (
            text.removeprefix("GR00T ") for text in server._core.plugins.addresses() if "GR00T" in text
        )  # type: ignore
        yield server


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Any]:
    with serve(models, "127.0.0.1:0/humanoid") as server:
        yield server


class Client:
    """Sends calls as GR00T's PolicyClient does. `encode` and `decode` are its forms of arrays."""

    def __init__(self, address: str, encode: Any, decode: Any) -> None:
        self.encode = encode
        self.decode = decode
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def call(self, endpoint: str, data: Any = None, **more: Any) -> Any:
        request = {"endpoint": endpoint, **more}
        if data is not None:
            request["data"] = data
        return self.send(msgpack.packb(request, default=self.encode))

    def send(self, message: bytes) -> Any:
        self.socket.send(message)
        return msgpack.unpackb(self.socket.recv(), object_hook=self.decode)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}
    return value


def decode(found: Any) -> Any:
    if "__ModalityConfig_class__" in found:
        return found["as_json"]
    return np.load(io.BytesIO(found["as_npy"]), allow_pickle=False) if "__ndarray_class__" in found else found


def encode_as_msgpack_numpy(value: Any) -> Any:
    """The form of the latest clients, which use the package msgpack-numpy."""
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
    if isinstance(value, np.generic):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    return value


def decode_as_msgpack_numpy(found: Any) -> Any:
    if "__ModalityConfig__" in found:
        return found["as_json"]
    if found.get(b"nd") is True:
        assert found[b"kind"] == b""
        return np.ndarray(buffer=found[b"data"], dtype=found[b"type"], shape=found[b"shape"])
    return found


@pytest.fixture
def connect(server: Any) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connect(address: str = "", encode: Any = encode, decode: Any = decode) -> Client:
        clients.append(Client(address or server.address, encode, decode))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


VIEW = np.full((1, 1, 4, 4, 3), 51, np.uint8)
LEFT = np.float32([[[1.5, -2.0]]])
OBSERVATION = {"video": {"ego_view": VIEW}, "state": {"left_arm": LEFT}, "language": {"task": [["pick it"]]}}


@pytest.mark.parametrize("decode", [decode, decode_as_msgpack_numpy])
@pytest.mark.parametrize("encode", [encode, encode_as_msgpack_numpy])
def test_the_newest_clients_get_the_actions_that_the_model_gives(
    server: Any, connect: Callable[..., Client], encode: Any, decode: Any
) -> None:
    actions, info = connect("", encode, decode).call("get_action", {"observation": OBSERVATION, "options": None})
    inputs = {"view": np.full((3, 4, 4), 0.2, np.float32), "left": LEFT[0, 0], "task": ["pick it"]}
    expected = server.infer("humanoid", inputs).outputs
    assert sorted(actions) == ["left_arm", "waist"]
    for name, array in actions.items():
        assert array.shape[0] == 1
        np.testing.assert_allclose(array[0], expected[name], rtol=1e-6)
    assert info == {"model": "humanoid"}


def test_an_older_client_sends_a_bare_observation_and_gets_bare_actions(
    models: Path, connect: Callable[..., Client]
) -> None:
    with serve(models, "127.0.0.1:0/old") as server:
        observation = {
            "video.ego_view": VIEW[0], "state.left_arm": LEFT[0], "annotation.human.task_description": ["pick it"],
        }  # fmt: skip
        client = connect(server.address)
        found = {kind: json.loads(text) for kind, text in client.call("get_modality_config").items()}
        assert [found[kind]["modality_keys"] for kind in ("video", "state", "language")] == [
            [key] for key in observation
        ]
        actions = client.call("get_action", observation)
        assert actions["left_arm"].tolist() == [[1.5, -2.0], [2.5, -1.0], [3.5, 0.0]]


def test_a_policy_of_several_frames_gets_those_that_it_asks_for(tmp_path: Path, connect: Callable[..., Client]) -> None:
    """The client does as NVIDIA's example for DROID: it keeps as many pictures as the steps of the video say."""
    steps = re.search(r'parameters \{ key: "policy_frame_steps" .*', DOCUMENT)[0]
    keys = NEW_KEYS.rpartition(", task=")[0]
    parameters = re.findall('parameters.*"policy_.*', HUMANOID.replace("KEYS", keys))
    graph = {"1/model.onnx": two_frames_model().SerializeToString()}
    model_folder(tmp_path / "droid", "\n".join([*parameters, steps]), graph)
    with serve(tmp_path, "127.0.0.1:0") as server:
        client = connect(server.address)
        found = client.call("get_modality_config")
        assert found["video"]["delta_indices"] == found["state"]["delta_indices"] == [-15, 0]
        pictures = [np.full((4, 6, 3), at, np.uint8) for at in range(16)]
        view = np.stack([pictures[step - 1] for step in found["video"]["delta_indices"]])[None]
        left = np.float32([[[1, 2, 3], [4, 5, 6]]])
        observation = {"video": {"ego_view": view}, "state": {"left_arm": left}}
        actions, _ = client.call("get_action", {"observation": observation})
        assert actions["left_arm"].tolist() == [[[1, 2, 3], [19, 20, 21]]]
        observation["video"] = {"ego_view": view[:, 1:]}
        assert client.call("get_action", {"observation": observation})["error"] == (
            "model 'droid', 'video/ego_view' of the observation: expected shape [1, 2, 4, 6, 3], given [1, 1, 4, 6, 3]"
        )


def test_the_other_calls_are_answered(connect: Callable[..., Client]) -> None:
    client = connect()
    assert client.call("ping") == {"status": "ok", "message": "Server is running"}
    found = client.call("get_modality_config")
    assert found["video"] == {"delta_indices": [0], "modality_keys": ["ego_view"]}
    assert found["state"] == {"delta_indices": [0], "modality_keys": ["left_arm"]}
    assert found["language"] == {"delta_indices": [0], "modality_keys": ["task"]}
    assert found["action"] == {"delta_indices": [0, 1, 2], "modality_keys": ["left_arm", "waist"]}
    assert client.call("reset", {"options": None}) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"endpoint": "get_action", "data": {"observation": {**OBSERVATION, "state": {}}}}, "lacks 'state/left_arm'"),
        ({"endpoint": "get_action"}, "expected an observation as a map, given a value of type NoneType"),
        ({"endpoint": "get_action", "data": {"observation": 5}}, "expected an observation as a map, given a value of"),
        ({"endpoint": "kill"}, "the call kill is refused: clients cannot stop this server"),
        ({"endpoint": ["x"]}, "expected the call ping, get_modality_config, reset or get_action, given '['x']'"),
        (
            {"data": {"observation": {**OBSERVATION, "state": {"left_arm": np.zeros((2, 1, 2), np.float32)}}}},
            "'state/left_arm' of the observation: expected shape [2], given [2, 1, 2]",
        ),
        (
            {"data": {"observation": {**OBSERVATION, "state": {"left_arm": {"__ndarray_class__": True, "as_npy": 5}}}}},
            "expected an array of numbers as a file of numpy.save",
        ),
        (
            {"data": {"observation": {**OBSERVATION, "language": {"task": np.array(["pick it"])}}}},
            "texts are sent as strings, not arrays",
        ),
    ],
)
def test_a_wrong_call_is_answered_with_a_sentence(
    connect: Callable[..., Client], call: dict[str, Any], message: str
) -> None:
    client = connect()
    assert message in client.send(msgpack.packb(call, default=encode))["error"]
    assert client.call("ping")["status"] == "ok"


def test_robots_are_limited_and_one_that_leaves_gives_its_place_to_another(
    server: Any, connect: Callable[..., Client]
) -> None:
    robots = []
    while "error" not in (answer := connect_robot(robots, connect)):
        assert answer[1] == {"model": "humanoid"}
    assert answer == {"error": "16 robots are connected, which is the maximum"}
    assert len(robots) == 17
    assert robots[-1].call("ping")["status"] == "ok"
    robots[0].close()
    assert eventually(lambda: "error" not in robots[-1].call("get_action", {"observation": OBSERVATION}))
    counted = re.search(r'edge_policy_robots\{model="humanoid",wire="groot"\} (\d+)', server.metrics())
    assert counted
    assert int(counted[1]) == 16


def connect_robot(robots: list[Client], connect: Callable[..., Client]) -> Any:
    robots.append(connect())
    return robots[-1].call("get_action", {"observation": OBSERVATION})


def test_a_token_is_taken_as_the_client_sends_it(models: Path, connect: Callable[..., Client], tmp_path: Path) -> None:
    token = secrets.token_hex(32)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"robot {hashlib.sha256(token.encode()).hexdigest()} inference\n")
    with serve(models, "127.0.0.1:0/humanoid", auth_tokens_file=str(tokens)) as server:
        client = connect(server.address)
        assert "error" in client.call("ping")
        assert "error" in client.call("ping", api_token="wrong")
        assert client.call("ping", api_token=token)["status"] == "ok"
        # Nothing is made of a message before its token is known: what follows has too many values.
        message = {"endpoint": "ping", "data": [[0] * 60_000] * 4, "api_token": "wrong"}
        refused = client.send(msgpack.packb(message))
        assert "values in lists and maps" not in refused["error"]
        robot = connect(server.address)
        assert "200000 values in lists and maps" in robot.send(msgpack.packb({**message, "api_token": token}))["error"]
