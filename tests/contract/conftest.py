"""Small ONNX models that every runtime reads, made once for the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
helper, TensorProto, numpy_helper = onnx.helper, onnx.TensorProto, onnx.numpy_helper


def _save(path: Path, nodes: list, inputs: list, outputs: list, initializers: list) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    # Old enough for every runtime that the project supports.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def add_sub_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, each FP32 [N, 16], with 4 MB of weights it adds as 0."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16]) for name in ("INPUT0", "INPUT1")]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16]) for name in ("OUTPUT0", "OUTPUT1")]
    nodes = [
        helper.make_node("MatMul", ["INPUT0", "wide"], ["high"]),
        helper.make_node("MatMul", ["high", "narrow"], ["nothing"]),
        helper.make_node("Add", ["INPUT0", "nothing"], ["left"]),
        helper.make_node("Add", ["left", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["left", "INPUT1"], ["OUTPUT1"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((16, 32_768), dtype="f4"), "wide"),
        numpy_helper.from_array(np.zeros((32_768, 16), dtype="f4"), "narrow"),
    ]
    return _save(tmp_path_factory.mktemp("add_sub") / "1" / "model.onnx", nodes, tensors, results, weights)


@pytest.fixture(scope="session")
def slow_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP32 X [1, 1] -> Y [1, 1] = 0 X through tens of milliseconds of matrix products."""
    given = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, 1])]
    results = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 1])]
    nodes = [helper.make_node("Expand", ["X", "shape"], ["m0"])]
    nodes += [helper.make_node("MatMul", [f"m{i}", f"m{i}"], [f"m{i + 1}"]) for i in range(40)]
    nodes.append(helper.make_node("ReduceMean", ["m40"], ["Y"], keepdims=1))
    shape = [numpy_helper.from_array(np.array([512, 512]), "shape")]
    return _save(tmp_path_factory.mktemp("slow") / "1" / "model.onnx", nodes, given, results, shape)
