"""ModelInfer over a real channel."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, QueueFull, Throttled
from edge_server.protocol import messages
from edge_server.service import READING_THREAD_HOLD_US


def floats(message: Any, index: int = 0) -> list[float]:
    return np.frombuffer(message.raw_output_contents[index], "<f4").tolist()


def refusal(front_end: Any, request: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        front_end.call("ModelInfer", request, **options)
    return caught.value


def test_a_raw_tensor_comes_back_with_name_version_and_id(front_end: Any, make_request: Any) -> None:
    answer = front_end.call("ModelInfer", make_request(id="r1"))
    assert (answer.model_name, answer.model_version, answer.id) == ("echo", "1", "r1")
    assert floats(answer) == [1.0, 2.0, 3.0, 4.0]
    assert list(answer.outputs[0].shape) == [1, 4]


def test_a_frame_sized_tensor_comes_back_unchanged(front_end: Any) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (480, 640, 3)).astype("u1")
    request = messages.ModelInferRequest(model_name="echo", raw_input_contents=[frame.tobytes()])
    request.inputs.add(name="INPUT0", datatype="UINT8", shape=frame.shape)
    answer = front_end.call("ModelInfer", request)
    assert answer.raw_output_contents[0] == frame.tobytes()


def test_large_typed_contents_come_back_as_raw_contents(front_end: Any) -> None:
    values = np.arange(50_000, dtype="<f4")
    request = messages.ModelInferRequest(model_name="echo")
    request.inputs.add(name="a", datatype="FP32", shape=[50_000]).contents.fp32_contents.extend(values.tolist())
    request.inputs.add(name="b", datatype="INT32", shape=[2]).contents.int_contents.extend([-1, 7])
    answer = front_end.call("ModelInfer", request)
    assert floats(answer) == values.tolist()
    assert np.frombuffer(answer.raw_output_contents[1], "<i4").tolist() == [-1, 7]


def test_strings_are_length_prefixed_when_raw_and_plain_when_typed(front_end: Any) -> None:
    request = messages.ModelInferRequest(model_name="echo")
    request.inputs.add(name="s", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"", "é".encode()])
    answer = front_end.call("ModelInfer", request)
    assert answer.raw_output_contents[0] == b"\0\0\0\0" + b"\2\0\0\0" + "é".encode()


def test_empty_tensors_need_no_contents(front_end: Any) -> None:
    request = messages.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype="FP32", shape=[0, 3])
    answer = front_end.call("ModelInfer", request)
    assert list(answer.outputs[0].shape) == [0, 3]
    assert answer.raw_output_contents[0] == b""


def test_parameters_of_every_kind_reach_the_model_and_come_back(front_end: Any, make_request: Any) -> None:
    request = make_request()
    request.parameters["b"].bool_param = True
    request.parameters["i"].int64_param = -5
    request.parameters["s"].string_param = "x"
    request.parameters["d"].double_param = 0.5
    request.parameters["sequence_id"].uint64_param = 9
    request.parameters["sequence_start"].bool_param = True
    request.parameters["priority"].uint64_param = 2
    request.parameters["timeout"].int64_param = 1500
    answer = front_end.call("ModelInfer", request)
    assert answer.parameters["b"].bool_param is True
    assert answer.parameters["i"].int64_param == -5
    assert answer.parameters["s"].string_param == "x"
    assert answer.parameters["d"].double_param == 0.5
    assert len(answer.parameters) == 4
    seen = front_end.service.calls[0].request
    assert (seen.sequence.id, seen.sequence.is_start, seen.sequence.is_end) == (9, True, False)
    assert (seen.priority, seen.timeout_us) == (2, 1500)


def test_requested_outputs_and_version_reach_the_service(front_end: Any, make_request: Any, transport: str) -> None:
    request = make_request(model_version="1")
    request.outputs.add(name="OUTPUT0")
    front_end.call("ModelInfer", request)
    seen = front_end.service.calls[0]
    assert (seen.request.version, seen.request.outputs) == (1, ("OUTPUT0",))
    # A thread that reads for many clients may be held for a moment, one that only waits for this answer for any time.
    assert seen.hold_us == (READING_THREAD_HOLD_US if transport == "http2" else math.inf)


def test_an_answer_from_another_thread_wakes_the_call(front_end: Any, make_request: Any) -> None:
    def answer_later() -> None:
        (call,) = front_end.service.wait_for_calls(1)
        call.answer(Tensor("OUTPUT0", DType.FP32, np.ones(2, "<f4")))

    thread = threading.Thread(target=answer_later)
    thread.start()
    answer = front_end.call("ModelInfer", make_request("held"))
    thread.join()
    assert floats(answer) == [1.0, 1.0]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendError("the runtime broke"), grpc.StatusCode.INTERNAL),
        (QueueFull("Exceeds maximum queue size"), grpc.StatusCode.UNAVAILABLE),
        (Throttled("too hot"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_models_error_becomes_the_calls_status(front_end: Any, make_request: Any, error: Any, code: Any) -> None:
    front_end.service.behaviours["echo"] = lambda call: call.answer(error=error)
    failure = refusal(front_end, make_request())
    assert (failure.code(), failure.details()) == (code, error.message)
    assert error.__traceback__ is None


def test_a_throttled_call_gets_a_time_to_retry_in_grpcs_format(front_end: Any, make_request: Any) -> None:
    error = Throttled("the box is HOT: 96 °C of 97", retry_after_s=0.7501)
    front_end.service.behaviours["echo"] = lambda call: call.answer(error=error)
    told = refusal(front_end, make_request())
    assert told.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the box is HOT" in told.details()
    assert dict(told.trailing_metadata())["grpc-retry-pushback-ms"] == "751"


def test_what_cannot_get_better_names_no_time_to_come_back(front_end: Any, make_request: Any) -> None:
    front_end.service.behaviours["echo"] = lambda call: call.answer(error=BackendError("broken"))
    assert "grpc-retry-pushback-ms" not in dict(refusal(front_end, make_request()).trailing_metadata() or ())


@pytest.mark.parametrize(
    ("call_s", "own_ms", "expected_s"),
    [(None, None, None), (50, None, 50), (None, 900, 0.9), (50, 900, 0.9), (5, 90_000, 5)],
)
def test_the_sooner_of_the_calls_and_the_requests_deadline_counts(
    front_end: Any, make_request: Any, call_s: float | None, own_ms: int | None, expected_s: float | None
) -> None:
    request = make_request()
    if own_ms is not None:
        request.parameters["edge_deadline_ms"].int64_param = own_ms
    seen: list[int] = []
    front_end.service.behaviours["echo"] = lambda call: (seen.append(call.request.deadline_ns), call.answer())
    before_ns = time.monotonic_ns()
    front_end.call("ModelInfer", request, timeout=call_s)
    if expected_s is None:
        assert seen == [0]
    else:
        # A second of tolerance: the call's deadline is known on the wall clock only.
        assert abs(seen[0] - before_ns - expected_s * 1e9) < 1e9 + (time.monotonic_ns() - before_ns)


def test_an_unexpected_exception_is_internal_with_a_short_message_and_logged(
    front_end: Any, make_request: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(call: Any) -> None:
        raise ZeroDivisionError("secret detail")

    front_end.service.behaviours["echo"] = broken
    failure = refusal(front_end, make_request())
    assert (failure.code(), failure.details()) == (grpc.StatusCode.INTERNAL, "internal error: ZeroDivisionError")
    assert "secret detail" in caplog.text


def test_a_very_long_error_still_arrives(front_end: Any) -> None:
    request = messages.ModelInferRequest(model_name="x\n" * 50_000)
    failure = refusal(front_end, request)
    assert failure.code() is grpc.StatusCode.NOT_FOUND
    assert failure.details().startswith("Request for unknown model: 'x")


def test_an_unknown_model_is_not_found(front_end: Any, make_request: Any) -> None:
    failure = refusal(front_end, messages.ModelInferRequest(model_name="nobody"))
    assert failure.code() is grpc.StatusCode.NOT_FOUND
    assert failure.details() == "Request for unknown model: 'nobody' is not found"


def test_a_decoupled_model_is_refused_with_tritons_words(front_end: Any, make_request: Any) -> None:
    failure = refusal(front_end, make_request("repeat"))
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
    assert failure.details() == "ModelInfer RPC doesn't support models with decoupled transaction policy"


def test_bytes_that_are_no_message_are_an_invalid_argument(front_end: Any) -> None:
    failure = refusal(front_end, b"\xff\xff\xff")
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_bad_version_is_refused_with_tritons_words(front_end: Any, make_request: Any) -> None:
    failure = refusal(front_end, make_request(model_version="one"))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "failed to get model version from specified version string" in failure.details()


def spoil_contents(request: Any) -> None:
    request.inputs[0].contents.fp32_contents.append(1.0)


def spoil_raw(request: Any) -> None:
    del request.raw_input_contents[:]


def spoil_size(request: Any) -> None:
    request.raw_input_contents[0] = b"\0" * 12


def spoil_shape(request: Any) -> None:
    request.inputs[0].shape[0] = 2**62


def spoil_twice(request: Any) -> None:
    request.inputs.add().CopyFrom(request.inputs[0])
    request.raw_input_contents.append(b"\0" * 16)


def spoil_more(request: Any) -> None:
    request.raw_input_contents.append(b"\0" * 16)


def spoil_type(request: Any) -> None:
    request.inputs[0].datatype = "FLOAT"


def spoil_reserved(request: Any) -> None:
    request.parameters["triton_x"].bool_param = True


def spoil_sequence(request: Any) -> None:
    request.parameters["sequence_start"].string_param = "yes"


def spoil_empty_parameter(request: Any) -> None:
    request.parameters["p"].CopyFrom(messages.InferParameter())


def spoil_outputs(request: Any) -> None:
    request.outputs.add(name="o")
    request.outputs.add(name="o")


@pytest.mark.sample
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            spoil_contents,
            "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'echo'",
        ),
        (spoil_raw, "unable to find data for input tensor 'INPUT0' for model 'echo' in request."),
        (spoil_size, "input byte size mismatch for input 'INPUT0' for model 'echo'. Expected 16, got 12"),
        (spoil_shape, "INPUT0"),
        (spoil_twice, "input 'INPUT0' for model 'echo' is given more than once"),
        (spoil_more, "expected 1 raw_input_contents for the inputs of model 'echo', got 2"),
        (spoil_type, "unknown data-type 'FLOAT'"),
        (spoil_reserved, "reserved for Triton usage and should not be specified"),
        (spoil_sequence, "invalid value type for 'sequence_start' parameter"),
        (spoil_empty_parameter, "parameter 'p' has no value"),
        (spoil_outputs, "output 'o' for model 'echo' is requested more than once"),
    ],
)
def test_a_wrong_request_is_an_invalid_argument_that_says_what(
    front_end: Any, make_request: Any, spoil: Any, words: str
) -> None:
    request = make_request()
    spoil(request)
    failure = refusal(front_end, request)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in failure.details()


def test_a_client_that_cancels_takes_its_request_back(front_end: Any, make_request: Any) -> None:
    call = (
        front_end.channel()
        .unary_unary("/inference.GRPCInferenceService/ModelInfer")
        .future(make_request("held").SerializeToString(), timeout=20)
    )
    (held,) = front_end.service.wait_for_calls(1)
    call.cancel()
    assert held.is_cancelled.wait(20)


def test_a_client_whose_deadline_passes_takes_its_request_back(front_end: Any, make_request: Any) -> None:
    failure = refusal(front_end, make_request("held"), timeout=0.2)
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (held,) = front_end.service.wait_for_calls(1)
    assert held.is_cancelled.wait(20)


def test_classification_answers_scores_indices_and_labels(front_end: Any, make_request: Any) -> None:
    request = make_request(values=(0.25, 0.75, 0.5, 0.0))
    request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 2
    answer = front_end.call("ModelInfer", request)
    assert answer.outputs[0].datatype == "BYTES"
    assert list(answer.outputs[0].shape) == [1, 2]
    assert answer.raw_output_contents[0] == (
        len(b"0.750000:1:dog").to_bytes(4, "little")
        + b"0.750000:1:dog"
        + len(b"0.500000:2").to_bytes(4, "little")
        + b"0.500000:2"
    )


def shared_request() -> Any:
    request = messages.ModelInferRequest(model_name="echo")
    given = request.inputs.add(name="INPUT0", datatype="FP32", shape=[4])
    given.parameters["shared_memory_region"].string_param = "in"
    given.parameters["shared_memory_byte_size"].int64_param = 16
    wanted = request.outputs.add(name="OUTPUT0")
    wanted.parameters["shared_memory_region"].string_param = "out"
    wanted.parameters["shared_memory_offset"].int64_param = 8
    wanted.parameters["shared_memory_byte_size"].int64_param = 24
    return request


def test_tensors_pass_through_shared_memory_and_nothing_stays_pinned(front_end: Any) -> None:
    regions = front_end.service.shared_memory
    regions.register("in", "/in", 0, 16)
    regions.register("out", "/out", 0, 32)
    regions.memory["in"][:] = np.arange(4, dtype="<f4").tobytes()
    answer = front_end.call("ModelInfer", shared_request())
    assert list(answer.raw_output_contents) == [b""]
    assert answer.outputs[0].parameters["shared_memory_region"].string_param == "out"
    assert np.frombuffer(bytes(regions.memory["out"][8:24]), "<f4").tolist() == [0, 1, 2, 3]
    assert regions.pinned == 0


def ask_held(front_end: Any) -> tuple[Any, Any, Callable[[], None]]:
    """Ask "held" for an output in a region; return the answer to come, the call and what writes the tensor."""
    regions = front_end.service.shared_memory
    regions.register("in", "/in", 0, 16)
    regions.register("out", "/out", 0, 32)
    request = shared_request()
    request.model_name = "held"
    future = (
        front_end.channel()
        .unary_unary("/inference.GRPCInferenceService/ModelInfer")
        .future(request.SerializeToString(), timeout=20)
    )
    (held,) = front_end.service.wait_for_calls(1)
    return future, held, lambda: held.answer(Tensor("OUTPUT0", DType.FP32, np.arange(4, dtype="<f4")))


def test_an_output_region_unregistered_meanwhile_takes_the_result_and_is_released(front_end: Any) -> None:
    regions = front_end.service.shared_memory
    future, _, answer = ask_held(front_end)
    regions.unregister("out")
    answer()
    answered = messages.ModelInferResponse.FromString(future.result())
    assert answered.outputs[0].parameters["shared_memory_region"].string_param == "out"
    assert np.frombuffer(bytes(regions.memory["out"][8:24]), "<f4").tolist() == [0, 1, 2, 3]
    regions.wait_until_unpinned()


@pytest.mark.parametrize("how", ["cancelled", "refused", "failed"])
def test_output_regions_of_requests_without_a_result_are_released(front_end: Any, how: str) -> None:
    regions = front_end.service.shared_memory
    if how == "refused":
        regions.register("in", "/in", 0, 16)
        regions.register("out", "/out", 0, 32)
        request = shared_request()
        request.inputs[0].name = "REFUSED"
        assert refusal(front_end, request).code() is grpc.StatusCode.INVALID_ARGUMENT
    else:
        future, held, _ = ask_held(front_end)
        assert regions.pinned == 2
        if how == "cancelled":
            future.cancel()
        else:
            held.answer(error=BackendError("lost"))
    regions.wait_until_unpinned()


@pytest.mark.parametrize("missing", ["in", "out"])
def test_an_unknown_region_is_found_out_before_anything_runs(front_end: Any, missing: str) -> None:
    regions = front_end.service.shared_memory
    regions.register("out" if missing == "in" else "in", "/x", 0, 32)
    failure = refusal(front_end, shared_request())
    assert failure.code() is grpc.StatusCode.NOT_FOUND
    assert failure.details() == f"Unable to find shared memory region: '{missing}'"
    assert front_end.service.calls == []
    assert regions.pinned == 0


def test_a_region_too_small_for_the_result_fails_the_request_only(front_end: Any) -> None:
    regions = front_end.service.shared_memory
    regions.register("in", "/in", 0, 16)
    regions.register("out", "/out", 0, 32)
    request = shared_request()
    request.outputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    assert refusal(front_end, request).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert regions.pinned == 0


def test_matching_metadata_becomes_parameters_and_the_requests_own_win(open_front_end: Any, make_request: Any) -> None:
    front_end = open_front_end(header_pattern=re.compile("frame-.*", re.IGNORECASE))
    request = make_request()
    request.parameters["frame-id"].string_param = "own"
    metadata = [("frame-id", "header"), ("frame-stamp", "12"), ("other", "x"), ("frame-data-bin", b"\xff")]
    answer = front_end.call("ModelInfer", request, metadata=metadata)
    assert {key: value.string_param for key, value in answer.parameters.items()} == {
        "frame-id": "own",
        "frame-stamp": "12",
    }


def test_many_calls_at_once_each_get_their_own_answer(front_end: Any, make_request: Any) -> None:
    infer = front_end.channel().unary_unary("/inference.GRPCInferenceService/ModelInfer")
    futures = [infer.future(make_request(values=(i, 0, 0, 0)).SerializeToString(), timeout=30) for i in range(200)]
    answers = [messages.ModelInferResponse.FromString(future.result()) for future in futures]
    assert [floats(answer)[0] for answer in answers] == list(range(200))
