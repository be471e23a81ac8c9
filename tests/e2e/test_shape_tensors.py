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
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.kit.models import identity_config
from tests.kit.server import serve

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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def config(kind: str, *more: str) -> str:
    return TENSORS.replace("TYPE_TYPE", f"TYPE_{kind}") + "\n".join(more)


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    folder = module_repository.add("narrow", config("INT32", BATCHING, WARMUP), model=resizing(TensorProto.INT32))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "size").write_bytes(np.array([4, 4], "<i4").tobytes())
    wide = resizing(TensorProto.INT64)
    module_repository.add("wide", config("INT64", BATCHING), model=wide)
    module_repository.add("kept", config("INT64", "response_cache { enable: true }"), model=wide)
    module_repository.add("steps", config("INT64", SEQUENCES), model=resizing(TensorProto.INT64, has_start=True))
    module_repository.add("wrong", config("INT64").replace("dims: [ 2 ]", "dims: [ 3 ]"), model=wide)
    module_repository.add("same", identity_config("INT64", "2", batch=0))
    module_repository.add("twice", TWICE)
    module_repository.add("twice_again", TWICE.replace('"wide"', '"twice"'))
    module_repository.add("whole", WHOLE)
    module_repository.add("rows", TWICE.replace("is_shape_tensor: true", "", 1))
    module_repository.add("short", TWICE.replace("INT64 dims: [ 2 ]", "INT32 dims: [ 2 ]", 1))
    module_repository.add("real", TWICE.replace("INT64 dims: [ 2 ]", "FP32 dims: [ 2 ]", 1))
    module_repository.add("free", TWICE.replace("dims: [ 2 ]", "dims: [ -1 ]", 1))
    with serve(
        module_repository.path, "--exit-on-error=false", "--strict-readiness=false", "--cache-config=local,size=4194304"
    ) as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


def pictures(count: int, height: int = 4, width: int = 4) -> np.ndarray:
    return np.random.default_rng(count).random((count, height, width), np.float32)


def tensors(api: Any, images: np.ndarray, size: np.ndarray) -> list[Any]:
    made = []
    for name, array in (("IN", images), ("SIZE", size)):
        item = api.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        item.set_data_from_numpy(array)
        made.append(item)
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


def batches(server: Any, model: str) -> dict[int, int]:
    return {item["batch_size"]: item["compute_infer"]["count"] for item in server.statistics(model)["batch_stats"]}


def ask_at_once(server: Any, asked: list[tuple[int, int, int]]) -> None:
    """Send requests of (rows, height, width) at the same time, and check each answer."""
    with triton.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(len(asked)) as pool:

        def ask(one: tuple[int, int, int]) -> None:
            images = pictures(one[0])
            check(client.infer("wide", tensors(triton, images, np.array(one[1:], np.int64))), images, *one[1:])

        list(pool.map(ask, asked))


def test_requests_with_equal_shape_values_run_as_one_batch(server: Any) -> None:
    before = batches(server, "wide").get(7, 0)
    ask_at_once(server, [(4, 8, 8), (1, 8, 8), (2, 8, 8)])
    assert batches(server, "wide")[7] == before + 1


def test_requests_with_different_shape_values_run_separately(server: Any) -> None:
    before = server.statistics("wide")["execution_count"]
    ask_at_once(server, [(2, 4, 8), (3, 4, 4), (2, 4, 12)])
    assert server.statistics("wide")["execution_count"] == before + 3


@pytest.mark.parametrize(
    ("size", "shown"),
    [([2, 8, 8], "3"), ([[8, 8]], "1,2"), ([[8, 8], [8, 8]], "2,2"), ([8], "1")],
    ids=["with the batch size", "with a batch dimension of 1", "a row each", "too few"],
)
def test_shape_values_in_another_form_are_refused_with_the_expected_form(server: Any, size: Any, shown: str) -> None:
    words = rf"unexpected shape for input 'SIZE' for model 'wide'. Expected \[2\], got \[{shown}\]. NOTE: it is a shape"
    with triton.InferenceServerClient(server.grpc) as client, pytest.raises(InferenceServerException, match=words):
        client.infer("wide", tensors(triton, pictures(2), np.array(size, np.int64)))


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


def test_a_cached_response_is_used_for_equal_shape_values_only(server: Any) -> None:
    images = pictures(2)
    with triton.InferenceServerClient(server.grpc) as client:
        for height in (8, 8, 4, 8):
            check(client.infer("kept", tensors(triton, images, np.array([height, 8]))), images, height, 8)
    assert server.statistics("kept")["inference_stats"]["cache_hit"]["count"] == 2


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


def test_concurrent_requests_to_ensembles_each_get_their_own_size(server: Any) -> None:
    asked = [(1 + number % 3, 4 + 4 * (number % 2), 4 + 4 * (number % 5)) for number in range(16)]
    with triton.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(8) as pool:

        def ask(one: tuple[int, int, int]) -> None:
            for model in ("twice", "whole"):
                images = pictures(one[0])
                check(client.infer(model, tensors(triton, images, np.array(one[1:]))), images, *one[1:])

        list(pool.map(ask, asked))


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (
            "twice",
            [[8, 8], [8, 8]],
            r"input 'SIZE' for model 'twice'. Expected \[2\], got \[2,2\]. NOTE: it is a shape",
        ),
        ("twice", [2, 8, 8], r"input 'SIZE' for model 'twice'. Expected \[2\], got \[3\]. NOTE: it is a shape"),
        ("twice", [0, 4], r"in ensemble 'twice', step 1 \(model 'wide'\)"),
        ("whole", [[8, 8]], r"input 'SIZE' for model 'whole'. Expected \[2\], got \[1,2\]."),
    ],
)
def test_an_ensemble_refuses_what_its_step_would_refuse(server: Any, model: str, size: Any, message: str) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match=message):
            client.infer(model, tensors(triton, pictures(2), np.array(size, np.int64)))
        images = pictures(2)
        check(client.infer(model, tensors(triton, images, np.array([8, 8]))), images, 8, 8)


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


def reason_of(server: Any, model: str) -> str:
    _, index = server.ask("/v2/repository/index", {})
    return str(next(item for item in index if item["name"] == model)["reason"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "rows",
            "step 1 (model 'wide'): input 'SIZE' takes tensor 'SIZE' of shape [-1, 2] (input 'SIZE' of the",
        ),
        ("short", "takes tensor 'SIZE', a TYPE_INT32 (input 'SIZE' of the ensemble), but the model expects TYPE_INT64"),
        (
            "real",
            "input 'SIZE' data_type: expected TYPE_INT32 or TYPE_INT64, because it is a shape tensor, given TYPE_FP",
        ),
        (
            "free",
            "input 'SIZE' dims: expected one dimension of a fixed size, because it is a shape tensor of a model",
        ),
    ],
)
def test_an_ensemble_whose_tensor_cannot_be_shape_values_is_not_served(server: Any, model: str, message: str) -> None:
    assert message in reason_of(server, model)


def test_a_configuration_with_the_batch_size_among_the_shape_values_is_not_served(server: Any) -> None:
    reason = reason_of(server, "wrong")
    assert (
        "input 'SIZE' dims: expected [2], as many as the values of the model file's shape tensor [3] beside the batch "
        "size, given [3]" in reason
    )
