"""Warnings about a serving model: over HTTP and in `status`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve_here

WARNINGS = {
    "misspelt": "parameter 'isolaton' has no effect: did you mean 'isolation'?",
    "doubtful": "detection_head yolov8, answer 'out' [300, 6] to the sample picture: ",
}
"""Model -> the beginning of its only warning."""

DETECTOR = parameters(detection_head="yolov8", image_scale="0.0039")


def finds_nothing() -> onnx.ModelProto:
    """A network whose answer to any picture is rows of zeros, which yolov8 does not give."""
    nodes = [
        helper.make_node("ReduceMin", ["pixels"], ["least"], keepdims=0),
        helper.make_node("Mul", ["least", "zeros"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "finds_nothing",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, 3, 320, 320])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 300, 6])],
        [onnx.numpy_helper.from_array(np.zeros((1, 300, 6), np.float32), "zeros")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    more = parameters(isolaton="process")
    module_repository.add("misspelt", identity_config(more=more))
    module_repository.add("doubtful", DETECTOR, model=finds_nothing())
    with serve_here(module_repository.path) as running:
        yield running


@pytest.mark.parametrize("model", WARNINGS)
def test_a_warning_is_in_status_and_in_the_report(server: Any, run_command: Any, model: str) -> None:
    (report,) = [item for item in server.ask("/edge/v1/models")[1]["models"] if item["name"] == model]
    (warning,) = report["warnings"]
    assert warning.startswith(WARNINGS[model])
    done = run_command("status", "--url", server.url(""))
    assert done.returncode == 0, done.stderr
    assert f"WARNING {model} version 1: {warning}" in done.stdout.splitlines()


def test_status_as_json_has_them_too(server: Any, run_command: Any) -> None:
    report = json.loads(run_command("status", "--json", "--url", server.url("")).stdout)
    found = {model["name"]: len(model["warnings"]) for model in report["models"]}
    assert found == dict.fromkeys(WARNINGS, 1)
