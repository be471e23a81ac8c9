"""tritonclient.grpc, its asyncio variant and plain gRPC calls against the installed server."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.kit.infer_input import infer_input
from tests.kit.looped import Looped
from tests.kit.models import sample_values
from tests.kit.triton_stream import TritonStream


@pytest.fixture(scope="module")
def client(zoo: Any) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(zoo.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def looped_client(zoo: Any) -> Iterator[Any]:
    twin = Looped(triton_aio.InferenceServerClient, zoo.grpc)
    yield twin
    twin.close()


@pytest.fixture(params=["threads", "asyncio"])
def any_client(request: pytest.FixtureRequest, client: Any, looped_client: Any) -> Any:
    return client if request.param == "threads" else looped_client


def given(name: str, array: np.ndarray, datatype: str) -> triton.InferInput:
    return infer_input(triton, name, array, datatype)


def repeat_inputs(values: list[int], delay_ms: int = 0) -> list[triton.InferInput]:
    return [
        given("IN", np.array(values, np.int32), "INT32"),
        given("DELAY", np.full(len(values), delay_ms, np.uint32), "UINT32"),
        given("WAIT", np.zeros(1, np.uint32), "UINT32"),
    ]


def test_every_data_type_is_echoed_as_raw_contents(any_client: Any, datatype: str) -> None:
    array = sample_values(datatype)
    answer = any_client.infer(f"same_{datatype}", [given("INPUT0", array, datatype)])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array)
    assert answer.get_output("OUTPUT0").datatype == datatype


def test_classification_names_the_best_classes_with_their_labels(any_client: Any) -> None:
    scores = np.array([[0.1, 0.7, 0.2, 0.0], [4, 3, 2, 9]], np.float32)
    wanted = triton.InferRequestedOutput("OUTPUT0", class_count=2)
    answer = any_client.infer("labelled", [given("INPUT0", scores, "FP32")], outputs=[wanted])
    assert answer.as_numpy("OUTPUT0").tolist() == [
        [b"0.700000:1:dog", b"0.200000:2:hen"],
        [b"9.000000:3:owl", b"4.000000:0:cat"],
    ]


def test_the_request_id_and_parameters_are_accepted_and_the_id_is_returned(client: Any) -> None:
    answer = client.infer(
        "same_INT32",
        [given("INPUT0", np.zeros((1, 1), np.int32), "INT32")],
        request_id="frame-17",
        parameters={"camera": "front", "exposure": 7, "is_night": True},
        priority=1,
        timeout=1_000_000,
    )
    assert answer.get_response().id == "frame-17"


def test_concurrent_requests_each_get_their_own_response(any_client: Any) -> None:
    arrays = [np.full((1 + number % 4, 16), number, np.float32) for number in range(48)]
    asked = [
        ("add_sub_onnxruntime", [given("INPUT0", array, "FP32"), given("INPUT1", array, "FP32")]) for array in arrays
    ]
    for array, answer in zip(arrays, _at_once(any_client, asked), strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), array * 2)


def _at_once(client: Any, asked: list[tuple[str, list[triton.InferInput]]]) -> list[Any]:
    if not isinstance(client, triton.InferenceServerClient):

        async def ask() -> list[Any]:
            return await asyncio.gather(*(client.aio.infer(*one) for one in asked))

        return list(client.run(ask()))
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for number, one in enumerate(asked):
        client.async_infer(*one, lambda result, error, number=number: answers.put((number, result, error)))
    found = {}
    for _ in asked:
        number, result, error = answers.get(timeout=30)
        assert error is None
        found[number] = result
    return [found[number] for number in range(len(asked))]


def test_a_stream_answers_in_the_order_of_its_requests(zoo: Any) -> None:
    with TritonStream(zoo.grpc) as stream:
        for number in range(30):
            # The slow model is asked first now and then; the quick ones behind it must wait for their turn.
            model = "slow" if number % 15 == 0 else "same_INT32"
            array = np.full((1, 3), number, np.int32)
            stream.send(model, [given("INPUT0", array, "INT32")], request_id=str(number))
        for number in range(30):
            result, error = stream.answer()
            assert error is None
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.full((1, 3), number, np.int32))


def test_an_error_in_a_stream_names_its_request_and_leaves_the_stream_open(zoo: Any) -> None:
    good = [given("INPUT0", np.zeros((1, 3), np.int32), "INT32")]
    with TritonStream(zoo.grpc) as stream:
        stream.send("same_INT32", good, request_id="1")
        stream.send("nobody", good, request_id="2")
        stream.send("same_FP32", good, request_id="3")
        stream.send("same_INT32", good, request_id="4")
        assert stream.answer()[0].get_response().id == "1"
        assert "unknown model: 'nobody' is not found" in str(stream.answer()[1])
        assert "data-type is 'INT32', but model 'same_FP32' expects 'FP32'" in str(stream.answer()[1])
        assert stream.answer()[0].get_response().id == "4"


def test_a_stream_of_coroutines_answers_in_order_and_keeps_going_after_an_error(looped_client: Any) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            model = "nobody" if number == 7 else "same_INT32"
            array = np.full((1, 2), number, np.int32)
            yield {"model_name": model, "inputs": [given("INPUT0", array, "INT32")], "request_id": str(number)}

    async def talk() -> list[tuple[Any, Any]]:
        return [item async for item in looped_client.aio.stream_infer(requests())]

    answers = looped_client.run(talk())
    assert len(answers) == 20
    for number, (result, error) in enumerate(answers):
        if number == 7:
            assert "unknown model: 'nobody' is not found" in str(error)
        else:
            assert error is None
            assert result.get_response().id == str(number)
            assert result.as_numpy("OUTPUT0").tolist() == [[number, number]]


def test_a_cancelled_call_does_not_disturb_the_next_one(looped_client: Any) -> None:
    inputs = [given("INPUT0", np.zeros((1, 1), np.int32), "INT32")]

    async def talk() -> Any:
        asked = asyncio.ensure_future(looped_client.aio.infer("slow", inputs))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        return await looped_client.aio.infer("slow", inputs)

    assert looped_client.run(talk()).as_numpy("OUTPUT0").tolist() == [[0]]


def test_a_decoupled_model_sends_one_response_for_each_element(zoo: Any) -> None:
    with TritonStream(zoo.grpc) as stream:
        stream.send("repeat", repeat_inputs([4, 5, 6], delay_ms=1), request_id="r")
        results = [stream.result() for _ in range(3)]
    assert [result.as_numpy("OUT").tolist() for result in results] == [[4], [5], [6]]
    assert [result.as_numpy("IDX").tolist() for result in results] == [[0], [1], [2]]
    assert {result.get_response().id for result in results} == {"r"}


@pytest.mark.parametrize("values", [[], [7], [7, 8]])
def test_an_empty_final_response_ends_a_decoupled_request_on_request(zoo: Any, values: list[int]) -> None:
    with TritonStream(zoo.grpc) as stream:
        stream.send("repeat", repeat_inputs(values), request_id="r", enable_empty_final_response=True)
        answers = []
        while True:
            result, error = stream.answer()
            assert error is None
            answers.append(result.get_response())
            if answers[-1].parameters["triton_final_response"].bool_param:
                break
    assert len(answers[-1].outputs) == 0
    assert (answers[-1].id, answers[-1].model_name) == ("r", "repeat")
    assert len(answers) == len(values) + 1
    assert not any(answer.parameters["triton_final_response"].bool_param for answer in answers[:-1])


def test_health_covers_the_server_and_each_model(any_client: Any) -> None:
    assert any_client.is_server_live()
    assert any_client.is_server_ready()
    assert any_client.is_model_ready("versions", "2")
    assert not any_client.is_model_ready("versions", "3")
    assert not any_client.is_model_ready("nobody")


def test_model_metadata_is_the_same_over_http_and_grpc(client: Any, zoo: Any) -> None:
    for model in ("add_sub_onnxruntime", "conv_openvino", "versions", "labelled", "repeat"):
        metadata = client.get_model_metadata(model, as_json=True)
        status, expected = zoo.ask(f"/v2/models/{model}")
        assert status == 200
        assert metadata["name"] == expected["name"]
        assert metadata["versions"] == expected["versions"]
        assert metadata["platform"] == expected["platform"]
        for side in ("inputs", "outputs"):
            found = [(item["name"], item["datatype"], [int(dim) for dim in item["shape"]]) for item in metadata[side]]
            assert found == [(item["name"], item["datatype"], item["shape"]) for item in expected[side]]
        config = client.get_model_config(model).config
        wanted = zoo.ask(f"/v2/models/{model}/config")[1]
        assert (config.name, config.backend, config.platform) == (model, wanted["backend"], wanted["platform"])
        assert config.max_batch_size == wanted["max_batch_size"]
        assert [list(item.dims) for item in config.input] == [item["dims"] for item in wanted["input"]]
        assert len(config.instance_group) == len(wanted["instance_group"])


def test_server_metadata_is_the_same_over_http_and_grpc(client: Any, zoo: Any) -> None:
    assert client.get_server_metadata(as_json=True) == zoo.ask("/v2")[1]


def test_the_repository_index_is_the_same_over_http_and_grpc(client: Any, zoo: Any) -> None:
    found = {(item.name, item.version, item.state) for item in client.get_model_repository_index().models}
    status, expected = zoo.ask("/v2/repository/index", {})
    assert status == 200
    assert found == {(item["name"], item["version"], item["state"]) for item in expected}


def test_errors_have_their_status_and_message(any_client: Any) -> None:
    array = np.zeros((1, 8), np.float32)
    with pytest.raises(InferenceServerException, match=r"Request for unknown model: 'nobody' is not found") as caught:
        any_client.infer("nobody", [given("INPUT0", array, "FP32")])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match=r"but model 'same_INT32' expects 'INT32'") as caught:
        any_client.infer("same_INT32", [given("INPUT0", array, "FP32")])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match=r"stub|fail") as caught:
        any_client.infer("failing", [given("INPUT0", array[:, :4], "FP32")])
    assert caught.value.status() == "StatusCode.INTERNAL"
