"""tritonclient.http, the client of most users, and its asyncio variant against the installed server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.looped import Looped
from tests.kit.models import sample_values


@pytest.fixture(scope="module")
def client(zoo: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(zoo.http, concurrency=4) as client:
        yield client


@pytest.fixture(scope="module", params=["threads", "asyncio"])
def any_client(request: pytest.FixtureRequest, client: Any, zoo: Any) -> Iterator[Any]:
    if request.param == "threads":
        yield client
        return
    twin = Looped(triton_aio.InferenceServerClient, zoo.http)
    yield twin
    twin.close()


def given(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    return infer_input(triton, name, array, datatype, binary_data=binary)


def pair(rows: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    return first, first[::-1] * 0.5


def test_every_data_type_is_echoed_as_binary(any_client: Any, datatype: str) -> None:
    array = sample_values(datatype)
    answer = any_client.infer(f"same_{datatype}", [given("INPUT0", array, datatype)])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)
    assert answer.get_output("OUTPUT0")["datatype"] == datatype


def test_every_data_type_of_json_is_echoed_as_json(client: Any, datatype: str) -> None:
    array = sample_values(datatype)
    if datatype in ("FP16", "BF16"):
        pytest.skip("the protocol has no JSON form of it; the refusal is tested with the hostile requests")
    if datatype == "BYTES":
        array = np.array([[b"", b"a", "grüß".encode(), b"\n", b'"']], dtype=object)
    answer = client.infer(
        f"same_{datatype}",
        [given("INPUT0", array, datatype, binary=False)],
        outputs=[triton.InferRequestedOutput("OUTPUT0", binary_data=False)],
    )
    result = answer.as_numpy("OUTPUT0")
    expected = (
        np.array([item.decode() for item in array.ravel()]).reshape(array.shape) if datatype == "BYTES" else array
    )
    assert np.array_equal(np.vectorize(_text)(result) if datatype == "BYTES" else result, expected)


def _text(item: bytes | str) -> str:
    return item.decode() if isinstance(item, bytes) else item


@pytest.mark.sample
@pytest.mark.parametrize("first_is_binary", [True, False])
@pytest.mark.parametrize("out_is_binary", [True, False])
def test_binary_and_json_tensors_can_be_mixed_in_one_request(
    client: Any, first_is_binary: bool, out_is_binary: bool
) -> None:
    first, second = pair(3)
    answer = client.infer(
        "add_sub_onnxruntime",
        [
            given("INPUT0", first, "FP32", binary=first_is_binary),
            given("INPUT1", second, "FP32", binary=not first_is_binary),
        ],
        outputs=[
            triton.InferRequestedOutput("OUTPUT0", binary_data=out_is_binary),
            triton.InferRequestedOutput("OUTPUT1", binary_data=not out_is_binary),
        ],
    )
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), first - second)


@pytest.mark.sample
@pytest.mark.parametrize("binary", [True, False])
def test_classification_names_the_best_classes_with_their_labels(any_client: Any, binary: bool) -> None:
    scores = np.array([[0.1, 0.7, 0.2, 0.0], [4, 3, 2, 9]], np.float32)
    wanted = triton.InferRequestedOutput("OUTPUT0", class_count=2, binary_data=binary)
    answer = any_client.infer("labelled", [given("INPUT0", scores, "FP32")], outputs=[wanted])
    texts = np.vectorize(_text)(answer.as_numpy("OUTPUT0"))
    assert texts.tolist() == [["0.700000:1:dog", "0.200000:2:hen"], ["9.000000:3:owl", "4.000000:0:cat"]]
    assert answer.get_output("OUTPUT0")["datatype"] == "BYTES"


@pytest.mark.sample
@pytest.mark.parametrize("there", [None, "gzip", "deflate"])
@pytest.mark.parametrize("back", [None, "gzip", "deflate"])
def test_bodies_are_compressed_in_both_directions(any_client: Any, there: str | None, back: str | None) -> None:
    first, second = pair(4)
    answer = any_client.infer(
        "add_sub_onnxruntime",
        [given("INPUT0", first, "FP32"), given("INPUT1", second, "FP32", binary=False)],
        request_compression_algorithm=there,
        response_compression_algorithm=back,
    )
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), first + second)


def test_the_request_id_is_returned(client: Any) -> None:
    array = np.zeros((1, 1), np.int32)
    answer = client.infer("same_INT32", [given("INPUT0", array, "INT32")], request_id="frame-000017")
    assert answer.get_response()["id"] == "frame-000017"
    assert "id" not in client.infer("same_INT32", [given("INPUT0", array, "INT32")]).get_response()


def test_concurrent_requests_each_get_their_own_response(any_client: Any) -> None:
    arrays = [np.full((1 + number % 4, 16), number, np.float32) for number in range(48)]
    asked = [("add_sub_openvino", [given("INPUT0", array, "FP32"), given("INPUT1", array, "FP32")]) for array in arrays]
    for array, answer in zip(arrays, _at_once(any_client, asked), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array * 2)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), array * 0)


def _at_once(client: Any, asked: list[tuple[str, list[triton.InferInput]]]) -> list[triton.InferResult]:
    if isinstance(client, triton.InferenceServerClient):
        return [call.get_result() for call in [client.async_infer(*one) for one in asked]]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(client.aio.infer(*one) for one in asked))

    answers: list[Any] = client.run(ask())
    return answers


def test_health_covers_the_server_and_each_model(any_client: Any) -> None:
    assert any_client.is_server_live()
    assert any_client.is_server_ready()
    assert any_client.is_model_ready("add_sub_onnxruntime")
    assert any_client.is_model_ready("versions", "2")
    assert not any_client.is_model_ready("versions", "3")
    assert not any_client.is_model_ready("nobody")


def test_statistics_and_the_index_name_the_model(any_client: Any) -> None:
    assert any_client.get_inference_statistics("conv_openvino")["model_stats"][0]["name"] == "conv_openvino"
    index = any_client.get_model_repository_index()
    # Behind Triton's members there may be the SHA-256 of the files.
    assert any({"name": "conv_openvino", "version": "1", "state": "READY"}.items() <= item.items() for item in index)


def test_model_metadata_shows_the_batch_dimension(any_client: Any) -> None:
    metadata = any_client.get_model_metadata("add_sub_onnxruntime")
    assert metadata["name"] == "add_sub_onnxruntime"
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["inputs"] == [
        {"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]},
        {"name": "INPUT1", "datatype": "FP32", "shape": [-1, 16]},
    ]
    assert any_client.get_model_metadata("fixed")["inputs"][0]["shape"] == [2, 3]


def test_versions_are_served_side_by_side_and_the_highest_is_the_default(client: Any) -> None:
    first, second = pair(1)
    inputs = [given("INPUT0", first, "FP32"), given("INPUT1", second, "FP32")]
    assert sorted(client.get_model_metadata("versions")["versions"]) == ["1", "2", "4"]
    assert client.infer("versions", inputs).get_response()["model_version"] == "4"
    for version in ("1", "2", "4"):
        assert client.infer("versions", inputs, model_version=version).get_response()["model_version"] == version


def test_the_config_is_complete_and_normalised(any_client: Any) -> None:
    config = any_client.get_model_config("add_sub_onnxruntime")
    assert config["name"] == "add_sub_onnxruntime"
    assert config["backend"] == "onnxruntime"
    assert config["platform"] == "onnxruntime_onnx"
    assert config["max_batch_size"] == 4
    assert config["default_model_filename"] == "model.onnx"
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["input"][0]["dims"] == [16]
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert config["instance_group"][0]["count"] >= 1


def test_errors_reach_the_client_with_status_and_message(any_client: Any) -> None:
    array = np.zeros((1, 8), np.float32)
    with pytest.raises(InferenceServerException, match=r"Request for unknown model: 'nobody' is not found") as caught:
        any_client.infer("nobody", [given("INPUT0", array, "FP32")])
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match=r"expects 'INT32'") as caught:
        any_client.infer("same_INT32", [given("INPUT0", array, "FP32")])
    assert caught.value.status() == "400"
