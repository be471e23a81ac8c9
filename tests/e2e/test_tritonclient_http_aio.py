"""tritonclient.http.aio against the server as a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.http.aio as triton
from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

Result = TypeVar("Result")


def with_client(zoo: Any, talk: Callable[[triton.InferenceServerClient], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with triton.InferenceServerClient(zoo.http) as client:
            return await talk(client)

    return asyncio.run(run())


def given(name: str, array: np.ndarray, datatype: str) -> InferInput:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def test_every_data_type_goes_there_and_back(zoo: Any, datatype: str, sample: Callable[[str], np.ndarray]) -> None:
    array = sample(datatype)
    answer = with_client(zoo, lambda client: client.infer(f"same_{datatype}", [given("INPUT0", array, datatype)]))
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)


def test_many_requests_in_flight_at_once_get_each_its_own_answer(zoo: Any) -> None:
    arrays = [np.full((1 + number % 4, 16), number, np.float32) for number in range(48)]

    async def talk(client: Any) -> list[Any]:
        return await asyncio.gather(
            *(
                client.infer("add_sub_openvino", [given("INPUT0", array, "FP32"), given("INPUT1", array, "FP32")])
                for array in arrays
            )
        )

    for array, answer in zip(arrays, with_client(zoo, talk), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array * 2)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), array * 0)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_travel_compressed_both_ways(zoo: Any, algorithm: str) -> None:
    array = np.arange(4000, dtype=np.int32).reshape(1, -1)
    answer = with_client(
        zoo,
        lambda client: client.infer(
            "same_INT32",
            [given("INPUT0", array, "INT32")],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        ),
    )
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)


def test_classification_names_the_best_class(zoo: Any) -> None:
    wanted = InferRequestedOutput("OUTPUT0", class_count=1)
    array = np.array([[0, 0, 5, 0]], np.float32)
    answer = with_client(
        zoo, lambda client: client.infer("labelled", [given("INPUT0", array, "FP32")], outputs=[wanted])
    )
    assert answer.as_numpy("OUTPUT0").tolist() == [[b"5.000000:2:hen"]]


def test_health_metadata_config_and_statistics_answer(zoo: Any) -> None:
    async def talk(client: Any) -> list[Any]:
        return [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("conv_openvino"),
            await client.get_model_metadata("conv_openvino"),
            await client.get_model_config("conv_openvino"),
            await client.get_inference_statistics("conv_openvino"),
            await client.get_model_repository_index(),
        ]

    live, ready, model_ready, metadata, config, statistics, index = with_client(zoo, talk)
    assert live
    assert ready
    assert model_ready
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 32, 32]}]
    assert config["backend"] == "openvino"
    assert statistics["model_stats"][0]["name"] == "conv_openvino"
    assert {"name": "conv_openvino", "version": "1", "state": "READY"} in index


def test_an_error_names_what_was_wrong(zoo: Any) -> None:
    array = np.zeros((1, 3), np.float32)
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'INPUT0' for model 'labelled'"):
        with_client(zoo, lambda client: client.infer("labelled", [given("INPUT0", array, "FP32")]))
