"""Requests of different lengths in one batch, without padding: an ONNX model that sums each request's own part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

from tests.kit.infer_input import infer_input
from tests.kit.models import finish
from tests.kit.server import serve_here

CONFIG = """
backend: "{backend}"
max_batch_size: 8
input {{ name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }}
input {{ name: "SCALE" data_type: TYPE_FP32 dims: [ 1 ] }}
batch_input {{
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "BOUNDS" data_type: TYPE_INT32 source_input: "VALUES"
}}
output {{ name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "NEGATED" data_type: TYPE_FP32 dims: [ -1 ] }}
batch_output {{ target_name: "NEGATED" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "VALUES" }}
dynamic_batching {{ max_queue_delay_microseconds: 100000 }}
"""


def segment_sums() -> onnx.ModelProto:
    """SUM[i] = SCALE[i] * sum of VALUES[BOUNDS[i] : BOUNDS[i + 1]], by differences of the running sum."""
    constants = {"zero": 0, "first": [0], "second": [1], "last": [-1], "end": [2**31]}
    whole = [onnx.numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()]
    nothing = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "nothing")
    nodes = [
        helper.make_node("Concat", ["nothing", "VALUES"], ["padded"], axis=0),
        helper.make_node("CumSum", ["padded", "zero"], ["running"]),
        helper.make_node("Gather", ["running", "BOUNDS"], ["at"]),
        helper.make_node("Slice", ["at", "second", "end", "first"], ["ends"]),
        helper.make_node("Slice", ["at", "first", "last", "first"], ["begins"]),
        helper.make_node("Sub", ["ends", "begins"], ["sums"]),
        helper.make_node("Unsqueeze", ["sums", "second"], ["columns"]),
        helper.make_node("Mul", ["columns", "SCALE"], ["SUM"]),
        helper.make_node("Neg", ["VALUES"], ["NEGATED"]),
    ]
    graph = helper.make_graph(
        nodes, "sums",
        [helper.make_tensor_value_info("VALUES", TensorProto.FLOAT, ["elements"]),
         helper.make_tensor_value_info("SCALE", TensorProto.FLOAT, ["batch", 1]),
         helper.make_tensor_value_info("BOUNDS", TensorProto.INT32, ["bounds"])],
        [helper.make_tensor_value_info("SUM", TensorProto.FLOAT, ["batch", 1]),
         helper.make_tensor_value_info("NEGATED", TensorProto.FLOAT, ["elements"])],
        [*whole, nothing],
    )  # fmt: skip
    return finish(graph)


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    for backend in ("onnxruntime", "openvino"):
        module_repository.add(f"sums_{backend}", CONFIG.format(backend=backend), model=segment_sums())
    with serve_here(module_repository.path) as server:
        yield server


def values(number: int) -> np.ndarray:
    """Whole numbers, which floats add without rounding, of another length for each request."""
    return np.arange(number, number + 1 + 7 * number % 13, dtype=np.float32).reshape(1, -1)


def tensors(api: Any, array: np.ndarray, scale: float) -> list[Any]:
    given = infer_input(api, "VALUES", array)
    factor = infer_input(api, "SCALE", np.full((len(array), 1), scale, np.float32))
    return [given, factor]


def largest_batch(server: Any, model: str) -> int:
    return max(int(item["batch_size"]) for item in server.statistics(model)["batch_stats"])


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_requests_of_different_lengths_run_as_one_batch_with_equal_outputs(server: Any, backend: str) -> None:
    model = f"sums_{backend}"
    with triton.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(24) as pool:

        def ask(number: int) -> tuple[list[Any], list[Any]]:
            result = client.infer(model, tensors(triton, values(number), number))
            return result.as_numpy("SUM").tolist(), result.as_numpy("NEGATED").tolist()

        alone = [ask(number) for number in range(24)]
        together = list(pool.map(ask, range(24)))
    assert together == alone
    assert alone == [([[float(values(n).sum() * n)]], (-values(n)).tolist()) for n in range(24)]
    assert 1 < largest_batch(server, model) <= 8


def test_clients_see_the_ragged_input_but_not_the_generated_batch_inputs(server: Any) -> None:
    _, metadata = server.ask("/v2/models/sums_onnxruntime")
    assert [(item["name"], item["shape"]) for item in metadata["inputs"]] == [("VALUES", [-1, -1]), ("SCALE", [-1, 1])]
    assert server.ask("/v2/models/sums_onnxruntime/config")[1]["batch_input"][0]["target_name"] == ["BOUNDS"]
