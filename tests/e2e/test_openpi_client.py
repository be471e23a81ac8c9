"""openpi's own client, unchanged, against a policy with two cameras: the actions of the bare runtime."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.kit.model_folder import model_folder
from tests.kit.models import finish
from tests.kit.server import serve

CLIENT = os.environ.get("EDGE_TEST_OPENPI_CLIENT", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CLIENT, reason="needs EDGE_TEST_OPENPI_CLIENT, see fetch_openpi_client.sh"),
]

CONFIG = """
backend: "onnxruntime"
input { name: "top" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] }
input { name: "wrist" data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] }
input { name: "state" data_type: TYPE_FP32 dims: [ 14 ] }
output { name: "action" data_type: TYPE_FP32 dims: [ 50, 14 ] }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "policy_action_key" value { string_value: "actions" } }
parameters { key: "policy_inputs" value { string_value: "top=images/cam_high, wrist=images/cam_wrist" } }
"""

CALLS = """
import json
import sys

import numpy as np
from openpi_client import action_chunk_broker, image_tools, websocket_client_policy

policy = websocket_client_policy.WebsocketClientPolicy("ws://" + sys.argv[1] + "/act")
given = np.load(sys.argv[2])
images = {"cam_high": given["top"], "cam_wrist": given["wrist"]}
observation = {"images": images, "state": given["state"], "prompt": "pick"}
actions = policy.infer(observation)["actions"]
broker = action_chunk_broker.ActionChunkBroker(policy, action_horizon=10)
steps = [broker.infer(observation)["actions"].tolist() for _ in range(12)]
error = ""
try:
    policy.infer({**observation, "state": given["state"][:3]})
except RuntimeError as refused:
    error = str(refused)
print(json.dumps({"metadata": policy.get_server_metadata(), "actions": actions.tolist(), "dtype": str(actions.dtype),
                  "steps": steps, "error": error}))
"""


def write_policy(path: Path) -> None:
    """Write a network as ACT's exports have it: two cameras and the joints in, a chunk of 50 actions out."""
    random = np.random.default_rng(0)
    constants = {
        "pixels": random.normal(size=(48, 64)).astype(np.float32) / 255,
        "joints": random.normal(size=(14, 64)).astype(np.float32),
        "out": random.normal(size=(64, 700)).astype(np.float32),
        "flat": np.array([1, 48]), "row": np.array([1, 14]), "chunk": np.array([50, 14]),
    }  # fmt: skip
    nodes = []
    for name in ("top", "wrist"):
        nodes += [
            helper.make_node("Cast", [name], [f"{name}_real"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", [f"{name}_real"], [f"{name}_planes"], perm=[2, 0, 1]),
            helper.make_node("Unsqueeze", [f"{name}_planes", "first"], [f"{name}_batch"]),
            helper.make_node(
                "AveragePool", [f"{name}_batch"], [f"{name}_small"], kernel_shape=[56, 56], strides=[56, 56]
            ),
            helper.make_node("Reshape", [f"{name}_small", "flat"], [f"{name}_flat"]),
            helper.make_node("MatMul", [f"{name}_flat", "pixels"], [f"{name}_seen"]),
        ]
    nodes += [
        helper.make_node("Reshape", ["state", "row"], ["state_row"]),
        helper.make_node("MatMul", ["state_row", "joints"], ["felt"]),
        helper.make_node("Sum", ["top_seen", "wrist_seen", "felt"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "out"], ["flat_action"]),
        helper.make_node("Reshape", ["flat_action", "chunk"], ["action"]),
    ]
    initial = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    initial.append(numpy_helper.from_array(np.array([0]), "first"))
    inputs = [helper.make_tensor_value_info(name, TensorProto.UINT8, [224, 224, 3]) for name in ("top", "wrist")]
    inputs.append(helper.make_tensor_value_info("state", TensorProto.FLOAT, [14]))
    output = helper.make_tensor_value_info("action", TensorProto.FLOAT, [50, 14])
    model = finish(helper.make_graph(nodes, "act", inputs, [output], initial))
    onnx.save(model, path)


@pytest.fixture(scope="module")
def observation() -> dict[str, Any]:
    random = np.random.default_rng(1)
    pictures = random.integers(0, 255, (2, 224, 224, 3), dtype=np.uint8)
    return {"top": pictures[0], "wrist": pictures[1], "state": random.normal(size=14).astype(np.float32)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model_folder(folder / "act", CONFIG)
    write_policy(folder / "act/1/model.onnx")
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Any]:
    pytest.importorskip("zmq", reason="needs the extra policies")
    with serve(models, "--policy-openpi=127.0.0.1:0") as server:
        yield server


def test_openpis_client_gets_the_actions_of_the_bare_runtime(
    server: Any, models: Path, observation: dict[str, Any], tmp_path: Path
) -> None:
    np.savez(tmp_path / "observation.npz", **observation)
    address = re.search(r"openpi ws://([\d.:]+)", "\n".join(server.banner))
    assert address
    ran = subprocess.run(
        [CLIENT, "-c", CALLS, address[1], str(tmp_path / "observation.npz")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    (expected,) = onnxruntime.InferenceSession(models / "act/1/model.onnx").run(["action"], observation)
    assert found["dtype"] == "float32"
    np.testing.assert_allclose(found["actions"], expected, rtol=1e-5, atol=1e-5)
    assert found["metadata"]["action_horizon"] == 50
    np.testing.assert_allclose(found["steps"], [*expected[:10], *expected[:2]], rtol=1e-5, atol=1e-5)
    assert "'state' of the observation: expected shape [14], given [3]" in found["error"]
