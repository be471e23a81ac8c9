"""ModelStreamInfer over a real channel: order, errors, ends, and what happens when one side does not keep up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError
from edge_server.frontends.grpc import stream_inference as stream_module
from edge_server.protocol import messages


class Sender:
    """An open request side of a stream: a test sends when it likes, and closes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._queue.put(request)

    def close(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queue.get, None)


def first_value(response: Any) -> float:
    return float(np.frombuffer(response.infer_response.raw_output_contents[0], "<f4")[0])


def ids(responses: Any) -> list[str]:
    return [response.infer_response.id for response in responses]


def is_final(response: Any) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


def output(value: float = 0.0) -> Tensor:
    return Tensor("OUTPUT0", DType.FP32, np.array([value], "<f4"))


def test_an_empty_stream_ends_ok(front_end: Any) -> None:
    call = front_end.stream([])
    assert list(call) == []
    assert call.code() is grpc.StatusCode.OK


def test_every_request_is_answered_in_order_and_marked_final(front_end: Any, make_request: Any) -> None:
    requests = [make_request(id=str(i), values=(i, 0, 0, 0)) for i in range(300)]
    responses = list(front_end.stream(requests))
    assert ids(responses) == [str(i) for i in range(300)]
    assert [first_value(response) for response in responses] == list(range(300))
    assert all(is_final(response) for response in responses)


def test_a_client_that_waits_for_each_answer_gets_it(front_end: Any, make_request: Any) -> None:
    sender = Sender()
    call = front_end.stream(sender)
    for i in range(150):
        sender.send(make_request(id=str(i)))
        assert next(call).infer_response.id == str(i)
    sender.close()
    assert list(call) == []


def test_answers_that_overtake_each_other_leave_in_the_order_of_requests(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held", id=str(i)) for i in range(4)])
    held = front_end.service.wait_for_calls(4)
    for i in (3, 1, 0, 2):
        held[i].answer(output(i))
    responses = list(call)
    assert ids(responses) == ["0", "1", "2", "3"]
    assert [first_value(response) for response in responses] == [0, 1, 2, 3]


def test_requests_sent_ahead_are_all_submitted_before_the_first_is_answered(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held", id=str(i)) for i in range(64)])
    held = front_end.service.wait_for_calls(64)
    for waiting in held:
        waiting.answer(output())
    assert len(list(call)) == 64


def test_a_decoupled_model_answers_any_number_of_times(front_end: Any, make_request: Any) -> None:
    responses = list(front_end.stream([make_request("repeat", [5, 6, 7], id="a"), make_request("repeat", [8], id="b")]))
    assert ids(responses) == ["a", "a", "a", "b"]
    assert not any(is_final(response) for response in responses)


def test_an_empty_final_response_is_sent_to_those_who_asked(front_end: Any, make_request: Any) -> None:
    requests = [make_request("repeat", [1], id="a"), make_request("repeat", [], id="b", model_version="1")]
    for request in requests:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    responses = list(front_end.stream(requests))
    assert ids(responses) == ["a", "a", "b"]
    assert [is_final(response) for response in responses] == [False, True, True]
    last = responses[-1].infer_response
    assert (last.model_name, last.model_version, len(last.outputs)) == ("repeat", "1", 0)
    assert "triton_enable_empty_final_response" not in front_end.service.calls[0].request.parameters


def test_a_model_that_owes_one_response_is_heard_even_without_outputs(front_end: Any, make_request: Any) -> None:
    front_end.service.behaviours["echo"] = lambda call: call.answer()
    (response,) = front_end.stream([make_request(id="a")])
    assert response.infer_response.id == "a"
    assert is_final(response)


def test_early_responses_leave_before_the_final_one_when_the_client_does_not_read(
    front_end: Any, make_request: Any
) -> None:
    large = Tensor("OUTPUT0", DType.FP32, np.ones(4 << 20, "<f4"))

    def answer_thrice(call: Any) -> None:
        call.answer(large, is_final=False)
        call.answer(large, is_final=False)
        call.answer(output(2.0))

    front_end.service.behaviours["thrice"] = answer_thrice
    responses = list(front_end.stream([make_request("thrice", id="a"), make_request(id="b")]))
    assert ids(responses) == ["a", "a", "a", "b"]
    assert [first_value(response) for response in responses[:3]] == [1.0, 1.0, 2.0]
    assert [is_final(response) for response in responses] == [False, False, True, True]


def test_responses_of_decoupled_requests_interleave(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held_stream", id="a"), make_request("held_stream", id="b")])
    first, second = front_end.service.wait_for_calls(2)
    seen = []
    for held, final in ((second, False), (first, False), (second, True), (first, True)):
        held.answer(output(), is_final=final)
        seen.append(next(call))
    assert ids(seen) == ["b", "a", "b", "a"]
    assert [is_final(response) for response in seen] == [False, False, True, True]
    assert list(call) == []


def test_decoupled_responses_do_not_wait_for_slow_models_on_the_same_stream(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held", id="slow"), make_request("repeat", [1], id="fast")])
    assert next(call).infer_response.id == "fast"
    front_end.service.calls[0].answer(output())
    assert ids(call) == ["slow"]


def test_an_error_travels_in_a_message_and_the_stream_goes_on(front_end: Any, make_request: Any) -> None:
    unknown = messages.ModelInferRequest(model_name="nobody", id="c")
    refused = make_request(id="d")
    refused.inputs[0].name = "REFUSED"
    bad_version = make_request(id="e", model_version="x")
    requests = [make_request(id="a"), b"\xff", unknown, refused, bad_version, make_request(id="f")]
    responses = list(front_end.stream(requests))
    assert ids(responses) == ["a", "", "c", "d", "e", "f"]
    assert [bool(response.error_message) for response in responses] == [False, True, True, True, True, False]
    assert responses[2].error_message == "Request for unknown model: 'nobody' is not found"
    assert all(is_final(response) for response in responses)


def test_errors_keep_their_place_in_the_order(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held", id="a"), messages.ModelInferRequest(model_name="nobody", id="b")])
    (held,) = front_end.service.wait_for_calls(1)
    held.answer(error=BackendError("broke"))
    responses = list(call)
    assert ids(responses) == ["a", "b"]
    assert responses[0].error_message == "broke"


def test_an_unexpected_exception_fails_its_request_only(front_end: Any, make_request: Any) -> None:
    def broken(call: Any) -> None:
        raise ZeroDivisionError

    front_end.service.behaviours["broken"] = broken
    requests = [messages.ModelInferRequest(model_name="broken", id="a"), make_request(id="b")]
    responses = list(front_end.stream(requests))
    assert ids(responses) == ["a", "b"]
    assert responses[0].error_message == "internal error: ZeroDivisionError"


def test_real_error_mode_ends_the_stream_with_the_first_errors_status(front_end: Any, make_request: Any) -> None:
    sender = Sender()
    call = front_end.stream(sender, metadata=[("triton_grpc_error", "true")])
    sender.send(make_request(id="a"), make_request("held_stream", id="b"), messages.ModelInferRequest(model_name="no"))
    assert next(call).infer_response.id == "a"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Request for unknown model: 'no' is not found"
    assert front_end.service.calls[1].is_cancelled.wait(20)


def test_half_close_waits_for_outstanding_responses(front_end: Any, make_request: Any) -> None:
    call = front_end.stream([make_request("held", id="a"), make_request("held_stream", id="b")])
    first, second = front_end.service.wait_for_calls(2)
    second.answer(output(), is_final=False)
    assert next(call).infer_response.id == "b"
    first.answer(output())
    second.answer(is_empty=True)
    assert ids(call) == ["a"]
    assert call.code() is grpc.StatusCode.OK


def test_a_client_that_cancels_takes_back_all_outstanding_requests(front_end: Any, make_request: Any) -> None:
    sender = Sender()
    call = front_end.stream(sender)
    sender.send(*(make_request(model, id="x") for model in ("held", "held_stream", "held")))
    held = front_end.service.wait_for_calls(3)
    call.cancel()
    assert all(waiting.is_cancelled.wait(20) for waiting in held)


def test_a_client_that_sends_without_reading_is_stopped_by_flow_control(
    front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_OUTSTANDING", 8)
    call = front_end.stream([make_request("held", id=str(i)) for i in range(40)])
    answered = 0
    while answered < 40:
        held = front_end.service.wait_for_calls(min(40, answered + 8))
        assert len(held) <= answered + 8
        held[answered].answer(output(answered))
        assert first_value(next(call)) == answered
        answered += 1
    assert list(call) == []


def test_large_requests_are_bounded_by_their_memory_yet_each_gets_through(
    front_end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_OUTSTANDING_BYTES", 1000)
    front_end.service.behaviours["big"] = front_end.service.behaviours["held"]
    request = messages.ModelInferRequest(model_name="big", raw_input_contents=[b"x" * 5000])
    request.inputs.add(name="a", datatype="UINT8", shape=[5000])
    call = front_end.stream([request] * 3)
    for i in range(3):
        held = front_end.service.wait_for_calls(i + 1)
        assert len(held) == i + 1
        held[i].answer(output(i))
        assert first_value(next(call)) == i
    assert list(call) == []


def test_a_stream_waiting_for_room_ends_when_its_client_leaves(
    front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_OUTSTANDING", 2)
    call = front_end.stream([make_request("held", id=str(i)) for i in range(5)])
    held = front_end.service.wait_for_calls(2)
    call.cancel()
    assert all(waiting.is_cancelled.wait(20) for waiting in held)
    while any(thread.name == "grpc-stream" for thread in threading.enumerate()):
        threading.Event().wait(0.01)
    assert len(front_end.service.calls) == 2


def test_unread_responses_end_the_stream_before_they_fill_memory(
    front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "MAX_BACKLOG", 50)
    call = front_end.stream([make_request("held_stream", id="a")])
    (held,) = front_end.service.wait_for_calls(1)
    # The transport takes some megabytes by itself; what does not fit there piles up in the stream.
    frame = Tensor("OUTPUT0", DType.UINT8, np.zeros(1 << 20, "u1"))
    count = 0
    while not held.is_cancelled.is_set() and count < 1000:
        held.answer(frame, is_final=False)
        count += 1
    assert held.is_cancelled.is_set()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_late_responses_after_the_end_are_dropped(front_end: Any, make_request: Any) -> None:
    sender = Sender()
    call = front_end.stream(sender)
    sender.send(make_request("held_stream", id="a"))
    (held,) = front_end.service.wait_for_calls(1)
    call.cancel()
    assert held.is_cancelled.wait(20)
    held.sink(Response("held_stream", 1, "a", (output(),), is_final=False))


def test_a_decoupled_model_may_send_a_last_response_without_outputs(front_end: Any, make_request: Any) -> None:
    front_end.service.behaviours["repeat"] = lambda call: call.answer()
    (only,) = front_end.stream([make_request("repeat", id="a")])
    assert (only.infer_response.model_version, only.infer_response.id) == ("1", "a")
    assert only.infer_response.parameters["triton_final_response"].bool_param


def to_region(request: Any, name: str) -> Any:
    """Have the request's output OUTPUT0 placed in a region of 16 bytes."""
    output = request.outputs.add(name="OUTPUT0")
    output.parameters["shared_memory_region"].string_param = name
    output.parameters["shared_memory_byte_size"].int64_param = 16
    return request


def test_an_output_region_unregistered_meanwhile_takes_all_results(front_end: Any, make_request: Any) -> None:
    regions = front_end.service.shared_memory
    regions.register("out", "/out", 0, 16)
    call = front_end.stream([to_region(make_request("held_stream", id="a"), "out")])
    (held,) = front_end.service.wait_for_calls(1)
    regions.unregister("out")
    for value in (5, 6):
        held.answer(output(value), is_final=value == 6)
        given = next(call)
        assert not given.error_message
        assert given.infer_response.outputs[0].parameters["shared_memory_region"].string_param == "out"
        assert np.frombuffer(regions.memory["out"], "<f4")[0] == value
    regions.wait_until_unpinned()


@pytest.mark.parametrize("model", ["held", "held_stream"])
def test_output_regions_are_released_when_a_stream_ends_early(front_end: Any, make_request: Any, model: str) -> None:
    regions = front_end.service.shared_memory
    regions.register("out", "/out", 0, 16)
    requests = [to_region(make_request(model, id=str(i)), "out") for i in range(3)]
    sender = Sender()
    call = front_end.stream(sender)
    for request in requests:
        sender.send(request)
    calls = front_end.service.wait_for_calls(3)
    assert regions.pinned == 3
    # Of a model with one response a request, this one waits for those before it.
    calls[2].answer(output())
    call.cancel()
    regions.wait_until_unpinned()


def test_two_streams_do_not_wait_for_each_other(front_end: Any, make_request: Any) -> None:
    blocked = front_end.stream([make_request("held", id="a")])
    front_end.service.wait_for_calls(1)
    assert ids(front_end.stream([make_request(id="b")])) == ["b"]
    front_end.service.calls[0].answer(output())
    assert ids(blocked) == ["a"]


def test_answers_from_several_threads_keep_their_order(front_end: Any, make_request: Any) -> None:
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    front_end.service.behaviours["pooled"] = work.put

    def answer_all() -> None:
        for call in iter(work.get, None):
            tensor = next(iter(call.request.inputs.values()))
            call.answer(Tensor("OUTPUT0", tensor.dtype, tensor.array))

    threads = [threading.Thread(target=answer_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    requests = []
    for i in range(500):
        request = make_request(id=str(i), values=(i, 0, 0, 0))
        request.model_name = "pooled"
        requests.append(request)
    responses = list(front_end.stream(requests))
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()
    assert [first_value(response) for response in responses] == list(range(500))


def test_a_stream_goes_back_to_one_thread_when_its_client_slows_down(front_end: Any, make_request: Any) -> None:
    sender = Sender()
    call = front_end.stream(sender)
    sender.send(make_request("held", id="a"))
    (held,) = front_end.service.wait_for_calls(1)
    held.answer(output())
    assert next(call).infer_response.id == "a"
    for i in range(200):
        sender.send(make_request(id=str(i)))
        assert next(call).infer_response.id == str(i)
    sender.close()
    assert list(call) == []


def test_an_unexpected_exception_of_the_stream_itself_is_internal(
    front_end: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> bool:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(stream_module.InferStream, "_submit", broken)
    with pytest.raises(grpc.RpcError) as caught:
        list(front_end.stream([make_request()]))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error: ZeroDivisionError"
    assert "secret detail" in caplog.text
