"""Shape tensors of a model that batches, as clients send them: pictures resized to the size that a request names.

The model is the one of Triton's own tests of shape tensors: OUT is IN resized to SIZE, MADE is the shape of OUT. In the
file SIZE and MADE have three values, the batch size first. Here onnxruntime runs it, as it does until there is an
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.models import finish, identity_config
from tests.kit.server import serve_here

TENSORS = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1 ] }
input { name: "SIZE" data_type: TYPE_TYPE dims: [ 2 ] is_shape_tensor: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "MADE" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
"""
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 8 ] }"
WARMUP = """
model_warmup { name: "small" batch_size: 2
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 2, 2 ] random_data: true } }
  inputs { key: "SIZE" value { data_type: TYPE_INT32 dims: [ 2 ] input_data_file: "size" } } }
"""
SEQUENCES = """
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } }
"""

# Twice from the same picture: to SIZE, and to the shape of what came of that.
TWICE = """
platform: "ensemble"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1 ] }
input { name: "SIZE" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "MADE" data_type: TYPE_INT64 dims: [ 2 ] is_shape_tensor: true }
ensemble_scheduling {
  step { model_name: "wide" input_map [ { key: "IN" value: "IN" }, { key: "SIZE" value: "SIZE" } ]
         output_map { key: "MADE" value: "first" } }
  step { model_name: "wide" input_map [ { key: "IN" value: "IN" }, { key: "SIZE" value: "first" } ]
         output_map [ { key: "OUT" value: "OUT" }, { key: "MADE" value: "MADE" } ] }
}
"""
# What does not batch has values without a batch dimension.
WHOLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }
input { name: "SIZE" data_type: TYPE_INT64 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }
output { name: "MADE" data_type: TYPE_INT64 dims: [ -1, 2 ] }
ensemble_scheduling {
  step { model_name: "same" input_map { key: "INPUT0" value: "SIZE" } output_map { key: "OUTPUT0" value: "same" } }
  step { model_name: "wide" input_map [ { key: "IN" value: "IN" }, { key: "SIZE" value: "same" } ]
         output_map [ { key: "OUT" value: "OUT" }, { key: "MADE" value: "MADE" } ] }
}
"""


def resizing(kind: int, *, has_start: bool = False) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["n", "h", "w"]),
        helper.make_tensor_value_info("SIZE", kind, [3]),
    ]
    nodes = [
        helper.make_node("Cast", ["SIZE"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Resize", ["given", "", "", "wide"], ["OUT"], mode="nearest"),
        helper.make_node("Shape", ["OUT"], ["MADE"]),
    ]
    weights = []
    if has_start:
        inputs.append(helper.make_tensor_value_info("START", TensorProto.FLOAT, ["n", 1]))
        weights.append(onnx.numpy_helper.from_array(np.array([2], np.int64), "axis"))
        nodes.insert(0, helper.make_node("Unsqueeze", ["START", "axis"], ["started"]))
        nodes.insert(1, helper.make_node("Add", ["IN", "started"], ["given"]))
    else:
        nodes.insert(0, helper.make_node("Identity", ["IN"], ["given"]))
    outputs = [
        helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["n", "a", "b"]),
        helper.make_tensor_value_info("MADE", TensorProto.INT64, [3]),
    ]
    graph = helper.make_graph(nodes, "resizing", inputs, outputs, weights)
    return finish(graph)


def config(kind: str, *more: str) -> str:
    return TENSORS.replace("TYPE_TYPE", f"TYPE_{kind}") + "\n".join(more)


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    folder = module_repository.add("narrow", config("INT32", BATCHING, WARMUP), model=resizing(TensorProto.INT32))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "size").write_bytes(np.array([4, 4], "<i4").tobytes())
    wide = resizing(TensorProto.INT64)
    module_repository.add("wide", config("INT64", BATCHING), model=wide)
    module_repository.add("steps", config("INT64", SEQUENCES), model=resizing(TensorProto.INT64, has_start=True))
    module_repository.add("same", identity_config("INT64", "2", batch=0))
    module_repository.add("twice", TWICE)
    module_repository.add("twice_again", TWICE.replace('"wide"', '"twice"'))
    module_repository.add("whole", WHOLE)
    with serve_here(module_repository.path) as server:
        yield server


def pictures(count: int, height: int = 4, width: int = 4) -> np.ndarray:
    return np.random.default_rng(count).random((count, height, width), np.float32)


def tensors(api: Any, images: np.ndarray, size: np.ndarray) -> list[Any]:
    made = []
    for name, array in (("IN", images), ("SIZE", size)):
        made.append(infer_input(api, name, array))
    return made


def resized(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Multiples of the size only, where the nearest pixel is beyond doubt."""
    return images.repeat(height // images.shape[1], axis=1).repeat(width // images.shape[2], axis=2)


def check(result: Any, images: np.ndarray, height: int, width: int) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUT"), resized(images, height, width))
    assert result.as_numpy("MADE").dtype == np.int64
    assert result.as_numpy("MADE").tolist() == [[height, width]] * len(images)


@pytest.mark.parametrize(("model", "kind"), [("narrow", np.int32), ("wide", np.int64)])
@pytest.mark.parametrize("api", [triton, triton_http], ids=["grpc", "http"])
def test_a_client_sends_shape_values_and_gets_them_once_per_item(server: Any, api: Any, model: str, kind: type) -> None:
    address = server.grpc if api is triton else server.http
    with api.InferenceServerClient(address) as client:
        for count, height, width in ((1, 8, 4), (3, 4, 12), (8, 16, 16)):
            images = pictures(count)
            result = client.infer(model, tensors(api, images, np.array([height, width], kind)))
            check(result, images, height, width)


@pytest.mark.parametrize("size", [[0, 4], [-1, 4], [-(2**63), 2]])
def test_invalid_shape_values_fail_only_their_request(server: Any, size: list[int]) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match=r"model 'wide'"):
            client.infer("wide", tensors(triton, pictures(2), np.array(size, np.int64)))
        images = pictures(2)
        check(client.infer("wide", tensors(triton, images, np.array([8, 8]))), images, 8, 8)


def test_metadata_and_configuration_describe_shape_tensors_as_triton_does(server: Any) -> None:
    _, metadata = server.ask("/v2/models/wide")
    assert [(item["name"], item["shape"]) for item in metadata["inputs"]] == [("IN", [-1, -1, -1]), ("SIZE", [-1, 2])]
    assert [(item["name"], item["shape"]) for item in metadata["outputs"]] == [("OUT", [-1, -1, -1]), ("MADE", [-1, 2])]
    _, found = server.ask("/v2/models/wide/config")
    assert [(item["dims"], item["is_shape_tensor"]) for item in found["input"]] == [([-1, -1], False), ([2], True)]


def test_sequences_with_equal_shape_values_run_as_one_batch(server: Any) -> None:
    """Fewer sequences than rows: the model is given the rows that there are, answers go to the sequences."""

    def steps(number: int) -> None:
        images = pictures(1) + number
        with triton.InferenceServerClient(server.grpc) as client:
            for step, (height, width) in enumerate(((8, 4), (4, 8), (8 + 4 * (number % 2), 8))):
                result = client.infer(
                    "steps",
                    tensors(triton, images, np.array([height, width])),
                    sequence_id=number,
                    sequence_start=step == 0,
                    sequence_end=step == 2,
                )
                check(result, images + (step == 0), height, width)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(steps, (1, 2, 3)))


@pytest.mark.sample
@pytest.mark.parametrize("api", [triton, triton_http], ids=["grpc", "http"])
@pytest.mark.parametrize("model", ["twice", "twice_again", "whole"])
def test_an_ensemble_passes_shape_values_to_a_batching_step(server: Any, api: Any, model: str) -> None:
    address = server.grpc if api is triton else server.http
    with api.InferenceServerClient(address) as client:
        for count, height, width in ((1, 8, 4), (3, 4, 12), (8, 16, 16)):
            images = pictures(count)
            check(client.infer(model, tensors(api, images, np.array([height, width]))), images, height, width)


def test_check_generates_shape_values_for_a_model_and_its_ensemble(
    repository: Any, run_command: Callable[..., Any]
) -> None:
    """An ensemble cannot declare a warm-up sample with such values."""
    repository.add("wide", config("INT64"), model=resizing(TensorProto.INT64))
    repository.add("twice", TWICE)
    done = run_command("check", str(repository.path))
    assert done.returncode == 0, done.stderr
    assert "twice" in done.stdout
    assert "wide" in done.stdout
