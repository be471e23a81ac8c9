"""Requests of different lengths in one batch, without padding: an ONNX model that sums each request's own part."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

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

SAME = """
backend: "identity"
max_batch_size: 16
input { name: "INPUT0" data_type: TYPE_STRING dims: [ -1, 2 ] allow_ragged_batch: true }
output { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1, 2 ] }
batch_output { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" }
dynamic_batching { max_queue_delay_microseconds: 100000 }
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module")
def server(shared_server: Any, module_repository: Any) -> Iterator[Any]:
    for backend in ("onnxruntime", "openvino"):
        module_repository.add(f"sums_{backend}", CONFIG.format(backend=backend), model=segment_sums())
    module_repository.add("same", SAME)
    with shared_server(module_repository.path) as server:
        yield server


def values(number: int) -> np.ndarray:
    """Whole numbers, which floats add without rounding, of another length for each request."""
    return np.arange(number, number + 1 + 7 * number % 13, dtype=np.float32).reshape(1, -1)


def tensors(api: Any, array: np.ndarray, scale: float) -> list[Any]:
    given = api.InferInput("VALUES", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    factor = api.InferInput("SCALE", [len(array), 1], "FP32")
    factor.set_data_from_numpy(np.full((len(array), 1), scale, np.float32))
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


def test_ragged_requests_of_several_items_and_strings_are_split_again(server: Any) -> None:
    def ask(number: int) -> None:
        shape = (1 + number % 3, 1 + number % 4, 2)
        array = np.array([f"{number}.{place}".encode() for place in range(int(np.prod(shape)))], dtype=object)
        given = triton_http.InferInput("INPUT0", list(shape), "BYTES")
        given.set_data_from_numpy(array.reshape(shape))
        with triton_http.InferenceServerClient(server.http) as client:
            answer = client.infer("same", [given]).as_numpy("OUTPUT0")
        assert answer.tolist() == array.reshape(shape).tolist()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(12)))
    assert largest_batch(server, "same") > 3


def test_a_cancelled_ragged_request_does_not_disturb_its_batch(server: Any) -> None:
    answers: dict[int, Any] = {}
    with triton.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(6) as pool:

        def ask(number: int) -> None:
            answers[number] = client.infer("sums_onnxruntime", tensors(triton, values(number), 1)).as_numpy("SUM")

        futures = [pool.submit(ask, number) for number in range(6)]
        calls = [
            client.async_infer("sums_onnxruntime", tensors(triton, values(50 + number), 1), lambda result, error: None)
            for number in range(6)
        ]
        for call in calls:
            call.cancel()
        for future in futures:
            future.result()
    assert {number: answer.tolist() for number, answer in answers.items()} == {
        number: [[float(values(number).sum())]] for number in range(6)
    }


def test_clients_see_the_ragged_input_but_not_the_generated_batch_inputs(server: Any) -> None:
    _, metadata = server.ask("/v2/models/sums_onnxruntime")
    assert [(item["name"], item["shape"]) for item in metadata["inputs"]] == [("VALUES", [-1, -1]), ("SCALE", [-1, 1])]
    assert server.ask("/v2/models/sums_onnxruntime/config")[1]["batch_input"][0]["target_name"] == ["BOUNDS"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [([3], "unexpected shape"), ([9, 1], "batch-size must be <= 8"), ([0, 3], "unexpected shape")],
)
def test_a_ragged_request_is_validated(server: Any, shape: list[int], message: str) -> None:
    with triton.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException, match=message):
        client.infer("sums_onnxruntime", tensors(triton, np.zeros(shape, np.float32), 1))


def test_generated_batch_inputs_cannot_be_sent(server: Any) -> None:
    bounds = triton.InferInput("BOUNDS", [1, 2], "INT32")
    bounds.set_data_from_numpy(np.array([[0, 1_000_000]], np.int32))
    with triton.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException, match="BOUNDS"):
        client.infer("sums_onnxruntime", [*tensors(triton, values(3), 1), bounds])
