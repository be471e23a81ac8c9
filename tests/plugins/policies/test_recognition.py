"""Recognition of exported policies by their names, when they are served and when they are added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.plugins.policies.policy import make_policy, recognise_policy

STATE = InputSpec("observation.state", DType.FP32, (6,))
FRONT = InputSpec("observation.images.front", DType.FP32, (3, 96, 96))
ACTION = OutputSpec("action", DType.FP32, (20, 6))


def spec(*inputs: InputSpec, output: OutputSpec = ACTION, batch: int = 4, **parameters: str) -> ModelSpec:
    return ModelSpec("act", "stub", "", batch, inputs, (output,), (), parameters=parameters)


def test_an_export_of_lerobot_is_a_policy_with_its_cameras() -> None:
    found = recognise_policy(spec(STATE, FRONT, FRONT._replace(name="observation.images.wrist")))
    assert found is not None
    assert found.parameters == {
        "policy_action_key": "action", "image_input": "observation.images.front, observation.images.wrist",
        "image_scale": "1/255",
    }  # fmt: skip
    assert found.note == "recognised by its inputs and outputs: robot policy, 20 actions of 6 values"
    made = make_policy(replace(spec(STATE, FRONT), recognised=recognise_policy(spec(STATE, FRONT))))
    assert [field.images is not None for field in made.inputs] == [False, True]


def test_an_export_of_openpi_with_a_leading_one_is_a_policy() -> None:
    state = InputSpec("observation/state", DType.FP32, (1, 8))
    inputs = state, InputSpec("observation/image", DType.UINT8, (1, 224, 224, 3))
    found = recognise_policy(spec(*inputs, output=OutputSpec("actions", DType.FP32, (1, 10, 7)), batch=0))
    assert found is not None
    assert found.parameters == {"policy_action_key": "actions", "image_input": "observation/image"}


@pytest.mark.parametrize(
    "model",
    [
        spec(STATE, output=OutputSpec("scores", DType.FP32, (20, 6))),
        spec(InputSpec("state", DType.FP32, (6,))),
        spec(STATE, output=OutputSpec("action", DType.FP32, (6,))),
        spec(STATE, policy_action_key="other"),
        replace(spec(STATE), is_decoupled=True),
    ],
)
def test_nothing_else_is_a_policy(model: ModelSpec) -> None:
    assert recognise_policy(model) is None


def test_what_the_configuration_says_about_pictures_stays() -> None:
    found = recognise_policy(spec(STATE, FRONT, image_input="observation.images.front"))
    assert found is not None
    assert found.parameters == {"policy_action_key": "action"}


def test_add_says_that_a_file_is_a_policy_and_writes_its_parameters(tmp_path: Path, run_command: Any) -> None:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    inputs = [
        helper.make_tensor_value_info("observation.state", TensorProto.FLOAT, [1, 6]),
        helper.make_tensor_value_info("observation.images.front", TensorProto.FLOAT, [1, 3, 8, 8]),
    ]
    nodes = [
        helper.make_node("GlobalAveragePool", ["observation.images.front"], ["colours"]),
        helper.make_node("Reshape", ["colours", "flat"], ["colour"]),
        helper.make_node("Concat", ["colour", "observation.state"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "weights"], ["row"]),
        helper.make_node("Reshape", ["row", "chunk"], ["action"]),
    ]
    constants = {"flat": np.array([1, 3]), "weights": np.ones((9, 120), np.float32), "chunk": np.array([1, 20, 6])}
    graph = helper.make_graph(
        nodes, "act", inputs, [helper.make_tensor_value_info("action", TensorProto.FLOAT, [1, 20, 6])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "arm.onnx")
    (tmp_path / "models").mkdir()
    found = run_command("add", str(tmp_path / "arm.onnx"), f"--model-repository={tmp_path / 'models'}")
    assert found.returncode == 0, found.stderr
    assert "robot policy, 20 actions of 6" in " ".join(found.stdout.split())
    assert "--policy-openpi or --policy-groot=HOST:PORT" in found.stdout
    written = (tmp_path / "models/arm/config.pbtxt").read_text()
    assert 'parameters { key: "policy_action_key" value { string_value: "action" } }' in written
    assert 'parameters { key: "image_input" value { string_value: "observation.images.front" } }' in written
