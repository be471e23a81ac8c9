"""Encoded responses equal those of the generated classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.request_response import Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.grpc import unary_inference
from edge_server.frontends.grpc.unary_inference import (
    FINAL_KEY,
    empty_final_message,
    response_message,
    stream_error_message,
    stream_message,
)
from edge_server.memory.region_pins import RegionRef
from edge_server.protocol import messages
from edge_server.protocol.raw_tensors import raw_from_tensor

names = st.text(max_size=12)
values = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), names, st.floats(allow_nan=False), st.just(float("inf"))
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DType)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if dtype is DType.BYTES:
        array = np.empty(shape, object)
        array.reshape(-1)[:] = [draw(st.binary(max_size=4)) for _ in range(array.size)]
    else:
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype.numpy)
    return Tensor(draw(names), dtype, array)


responses = st.builds(
    Response,
    model=names,
    version=st.integers(0, 2**63 - 1),
    request_id=names,
    outputs=st.lists(tensors(), max_size=3).map(tuple),
    parameters=st.dictionaries(names, values, max_size=3),
    is_final=st.booleans(),
)


def expected(response: Response) -> object:
    message = messages.ModelInferResponse(
        model_name=response.model, model_version=str(response.version), id=response.request_id
    )
    for key, value in response.parameters.items():
        set_parameter(message.parameters[key], value)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.dtype.value, shape=tensor.shape)
        message.raw_output_contents.append(bytes(raw_from_tensor(tensor)))
    return message


def set_parameter(parameter: object, value: object) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        setattr(parameter, "int64_param" if value < 2**63 else "uint64_param", value)
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


@given(responses)
def test_a_response_parses_as_what_the_generated_class_holds(response: Response) -> None:
    assert messages.ModelInferResponse.FromString(b"".join(response_message(response, {}))) == expected(response)


@given(responses)
def test_a_stream_response_is_the_response_with_its_final_flag(response: Response) -> None:
    wanted = messages.ModelStreamInferResponse(infer_response=expected(response))
    wanted.infer_response.parameters[FINAL_KEY].bool_param = response.is_final
    assert messages.ModelStreamInferResponse.FromString(b"".join(stream_message(response, {}))) == wanted


def test_a_model_cannot_contradict_the_final_flag() -> None:
    response = Response("m", 1, "", parameters={FINAL_KEY: "no"}, is_final=False)
    parsed = messages.ModelStreamInferResponse.FromString(b"".join(stream_message(response, {})))
    assert parsed.infer_response.parameters[FINAL_KEY].bool_param is False
    assert len(parsed.infer_response.parameters) == 1


def test_an_output_in_shared_memory_is_named_and_carries_no_bytes() -> None:
    outputs = (
        Tensor("a", DType.FP32, np.ones((2, 2), "<f4")),
        Tensor("b", DType.UINT8, np.ones(3, "u1")),
    )
    data = b"".join(response_message(Response("m", 1, "7", outputs), {"a": (RegionRef("shm", 64, 24), 16)}))
    parsed = messages.ModelInferResponse.FromString(data)
    assert [bytes(raw) for raw in parsed.raw_output_contents] == [b"", b"\1\1\1"]
    given = parsed.outputs[0].parameters
    assert given["shared_memory_region"].string_param == "shm"
    assert given["shared_memory_byte_size"].int64_param == 16
    assert given["shared_memory_offset"].int64_param == 64
    assert not parsed.outputs[1].parameters


def test_outputs_that_are_not_contiguous_are_sent_in_row_major_order() -> None:
    array = np.arange(12, dtype="<i4").reshape(3, 4).T
    parsed = messages.ModelInferResponse.FromString(
        b"".join(response_message(Response("m", 1, "", (Tensor("x", DType.INT32, array),)), {}))
    )
    assert np.frombuffer(parsed.raw_output_contents[0], "<i4").tolist() == array.reshape(-1).tolist()


def test_text_that_utf8_cannot_say_still_makes_a_valid_message() -> None:
    response = Response("m", 1, "", parameters={"\ud800": "a\udfffb"})
    assert (
        messages.ModelInferResponse.FromString(b"".join(response_message(response, {}))).parameters["?"].string_param
        == "a?b"
    )


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_parameter_over_64_bits_is_the_servers_fault(value: int) -> None:
    with pytest.raises(ServingFault, match="does not fit into 64 bits"):
        response_message(Response("m", 1, "", parameters={"p": value}), {})


def test_a_response_longer_than_grpc_allows_is_refused_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unary_inference, "MAX_MESSAGE_BYTES", 1000)
    tensor = Tensor("x", DType.UINT8, np.zeros(1001, "u1"))
    with pytest.raises(ServingFault, match="more than the 1000 bytes"):
        response_message(Response("m", 1, "", (tensor,)), {})


def test_an_error_on_a_stream_names_its_request_and_closes_it() -> None:
    parsed = messages.ModelStreamInferResponse.FromString(b"".join(stream_error_message("went wrong", "id-1")))
    assert parsed.error_message == "went wrong"
    assert parsed.infer_response.id == "id-1"
    assert parsed.infer_response.parameters[FINAL_KEY].bool_param is True
    assert messages.ModelStreamInferResponse.FromString(b"".join(stream_error_message("", ""))).error_message


def test_an_empty_final_response_carries_the_requests_names() -> None:
    parsed = messages.ModelStreamInferResponse.FromString(b"".join(empty_final_message("m", "", "9")))
    assert (parsed.infer_response.model_name, parsed.infer_response.model_version) == ("m", "")
    assert parsed.infer_response.id == "9"
    assert parsed.infer_response.parameters[FINAL_KEY].bool_param is True
