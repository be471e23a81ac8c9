"""tritonclient.grpc.aio against the server as a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

Result = TypeVar("Result")


def with_client(zoo: Any, talk: Callable[[triton.InferenceServerClient], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with triton.InferenceServerClient(zoo.grpc) as client:
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
                client.infer("add_sub_onnxruntime", [given("INPUT0", array, "FP32"), given("INPUT1", array, "FP32")])
                for array in arrays
            )
        )

    for array, answer in zip(arrays, with_client(zoo, talk), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array * 2)


def test_a_stream_answers_in_order_and_keeps_going_after_an_error(zoo: Any) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            model = "nobody" if number == 7 else "same_INT32"
            array = np.full((1, 2), number, np.int32)
            yield {"model_name": model, "inputs": [given("INPUT0", array, "INT32")], "request_id": str(number)}

    async def talk(client: Any) -> list[tuple[Any, Any]]:
        return [item async for item in client.stream_infer(requests())]

    answers = with_client(zoo, talk)
    assert len(answers) == 20
    for number, (result, error) in enumerate(answers):
        if number == 7:
            assert "unknown model: 'nobody' is not found" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(number)
            assert result.as_numpy("OUTPUT0").tolist() == [[number, number]]


def test_health_metadata_config_and_statistics_answer(zoo: Any) -> None:
    async def talk(client: Any) -> list[Any]:
        return [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("conv_onnxruntime"),
            await client.get_model_metadata("conv_onnxruntime"),
            await client.get_model_config("conv_onnxruntime"),
            await client.get_inference_statistics("conv_onnxruntime"),
        ]

    live, ready, model_ready, metadata, config, statistics = with_client(zoo, talk)
    assert live
    assert ready
    assert model_ready
    assert list(metadata.inputs[0].shape) == [-1, 3, 32, 32]
    assert config.config.backend == "onnxruntime"
    assert statistics.model_stats[0].name == "conv_onnxruntime"


def test_an_error_names_what_was_wrong(zoo: Any) -> None:
    array = np.zeros((9, 4), np.float32)
    with pytest.raises(InferenceServerException, match=r"batch-size must be <= 4 for 'labelled'") as caught:
        with_client(zoo, lambda client: client.infer("labelled", [given("INPUT0", array, "FP32")]))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_cancelled_call_does_not_disturb_the_next_one(zoo: Any) -> None:
    inputs = [given("INPUT0", np.zeros((1, 1), np.int32), "INT32")]

    async def talk(client: Any) -> Any:
        asked = asyncio.ensure_future(client.infer("slow", inputs))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        return await client.infer("slow", inputs)

    assert with_client(zoo, talk).as_numpy("OUTPUT0").tolist() == [[0]]
