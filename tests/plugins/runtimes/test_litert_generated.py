"""Backend litert on a generated file with one dense layer and ReLU, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, Session
from edge_server.core.tensor import DType

pytestmark = pytest.mark.full

schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
flatbuffers = pytest.importorskip("flatbuffers")

WEIGHTS = np.array([[1, -2, 3], [0.5, 0, -1]], np.float32)
BIAS = np.array([0.25, -0.5], np.float32)


def dense_layer() -> bytes:
    """Return a TensorFlow Lite file: y [-1, 2] = relu(x [-1, 3] @ WEIGHTS.T + BIAS)."""
    model = schema.ModelT()
    model.version, model.description = 3, "dense"
    model.buffers = [schema.BufferT() for _ in range(3)]
    for buffer, array in zip(model.buffers[1:], (WEIGHTS, BIAS), strict=True):
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
    graph = schema.SubGraphT()
    graph.tensors = []
    for name, shape, buffer in (("x", [1, 3], 0), ("weights", [2, 3], 1), ("bias", [2], 2), ("y", [1, 2], 0)):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer, tensor.type = name, shape, buffer, schema.TensorType.FLOAT32
        if name in ("x", "y"):
            tensor.shapeSignature = [-1, shape[1]]
        graph.tensors.append(tensor)
    options = schema.FullyConnectedOptionsT()
    options.fusedActivationFunction = schema.ActivationFunctionType.RELU
    operator = schema.OperatorT()
    operator.inputs, operator.outputs, operator.opcodeIndex = [0, 1, 2], [3], 0
    operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.FullyConnectedOptions, options
    graph.inputs, graph.outputs, graph.operators = [0], [3], [operator]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
    code.version = 1
    model.operatorCodes, model.subgraphs = [code], [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("parameters", [{}, {"xnnpack": "no"}, {"num_threads": "1"}])
def test_a_dense_layer_computes_batches_of_any_size_as_numpy(
    parameters: dict[str, str], tmp_path: Path, job: Callable[..., Any]
) -> None:
    path = tmp_path / "dense" / "1" / "model.tflite"
    path.parent.mkdir(parents=True)
    path.write_bytes(dense_layer())
    file = ModelFile(path, path.parent.parent, 1)
    backend = load_backend("litert")
    signature = backend.inspect(file, parameters)
    assert signature is not None
    assert [(one.name, one.dtype, one.dims) for one in (*signature.inputs, *signature.outputs)] == [
        ("x", DType.FP32, (-1, 3)), ("y", DType.FP32, (-1, 2)),
    ]  # fmt: skip
    assert signature.is_batchable
    session = backend.open(job(file, inputs=signature.inputs, outputs=signature.outputs, parameters=parameters))
    assert isinstance(session, Session)
    for rows in (1, 7, 2):
        given = np.random.default_rng(rows).integers(-9, 9, (rows, 3)).astype(np.float32)
        expected = np.maximum(given @ WEIGHTS.T + BIAS, 0)
        np.testing.assert_array_equal(session.run({"x": given}, ["y"])["y"], expected)
    session.close()
