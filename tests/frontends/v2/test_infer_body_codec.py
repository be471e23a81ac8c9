"""JSON codec of inference bodies."""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Response, SequenceStep
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, InvalidRequest, NotFound
from edge_server.frontends.json_text import parse_json, parse_object
from edge_server.frontends.v2.infer_body_codec import decode_infer, encode_infer, parse_header_length
from edge_server.protocol.raw_tensors import raw_from_tensor


class StubPin:
    device = None

    def __init__(self, regions, view):
        self._regions = regions
        self.view = view

    def release(self):
        self._regions.held -= 1

    def write(self, data):
        self.view[: len(data)] = data


class StubRegions:
    """One region "r" of 64 bytes that counts its pins."""

    def __init__(self):
        self.memory = bytearray(range(64))
        self.held = 0

    def pin(self, name, offset, byte_size, *, writable=False):
        if name != "r" or offset + byte_size > 64:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        self.held += 1
        return StubPin(self, memoryview(self.memory)[offset : offset + byte_size])


def model(*dtypes, **more):
    fields = {"max_batch_size": 0, "platform": "", "backend": "stub", "instance_groups": (), **more}
    inputs = tuple(InputSpec(f"IN{i}", dtype, (-1,)) for i, dtype in enumerate(dtypes))
    outputs = tuple(OutputSpec(f"OUT{i}", dtype, (-1,)) for i, dtype in enumerate(dtypes))
    return ModelSpec(name="m", inputs=inputs, outputs=outputs, **fields)


ONE = model(DType.FP32)


def decode(members, payload=b"", spec=ONE, regions=None, **more):
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    length = len(text) if payload else None
    return decode_infer(text + payload, length, spec, regions or StubRegions(), **more)


def given_input(dtype, shape, data=None, **parameters):
    item = {"name": "IN0", "shape": shape, "datatype": dtype.value}
    if data is not None:
        item["data"] = data
    if parameters:
        item["parameters"] = parameters
    return {"inputs": [item]}


def test_the_error_of_a_body_without_inputs_shows_the_body_of_the_model_and_the_path_of_flat_objects():
    expected = (
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'; expected "
        '{"inputs": [{"name": "IN0", "datatype": "FP32", "shape": [1, 1], "data": [...]}, ...]}. The flat object '
        '{"IN0": [...], ...} is for /v2/models/m/generate'
    )
    with pytest.raises(InvalidRequest) as error:
        decode({"IN0": [1, 2, 6]}, spec=model(DType.FP32, DType.INT64, max_batch_size=8))
    assert error.value.message == expected


def tensor_of(dtype, shape, data):
    return decode(given_input(dtype, shape, data)).request.inputs["IN0"]


@pytest.mark.parametrize(
    ("dtype", "data", "stored"),
    [
        (DType.BOOL, [True, False], [True, False]),
        (DType.UINT8, [0, 255], [0, 255]),
        (DType.INT8, [-128, 127], [-128, 127]),
        (DType.UINT16, [0, 65535], [0, 65535]),
        (DType.INT16, [-32768, 32767], [-32768, 32767]),
        (DType.UINT32, [0, 2**32 - 1], [0, 2**32 - 1]),
        (DType.INT32, [-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
        (DType.UINT64, [0, 2**64 - 1], [0, 2**64 - 1]),
        (DType.INT64, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        (DType.FP32, [1, 0.5], [1.0, 0.5]),
        (DType.FP64, [1, 1e308], [1.0, 1e308]),
        (DType.BYTES, ["", "Käse\u0000"], [b"", "Käse\u0000".encode()]),
    ],
)
def test_every_type_that_json_carries_is_read_at_its_limits(dtype, data, stored):
    tensor = tensor_of(dtype, [2], data)
    assert tensor.dtype is dtype
    assert tensor.array.dtype == dtype.numpy
    assert tensor.array.tolist() == stored


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        (DType.BOOL, [0, 1]),
        (DType.BOOL, ["true", "false"]),
        (DType.UINT8, [0, 256]),
        (DType.UINT8, [-1, 0]),
        (DType.INT8, [True, False]),
        (DType.INT32, [1.0, 2.0]),
        (DType.INT32, [2**31, 0]),
        (DType.INT64, [2**63, 0]),
        (DType.UINT64, [2**64, -1]),
        (DType.INT64, [10**400, 0]),
        (DType.FP32, [True, 1.0]),
        (DType.FP32, ["1", 1.0]),
        (DType.FP32, [1e39, 0.0]),
        (DType.FP32, [10**400, 0]),
        (DType.FP64, [None, 1.0]),
        (DType.BYTES, [1, "a"]),
        (DType.BYTES, [["a"], "b"]),
        (DType.FP32, [1.0, [2.0]]),
        (DType.FP32, [[1.0], 2.0]),
        (DType.FP32, [{}, 1.0]),
    ],
)
def test_nothing_is_bent_to_fit_its_type(dtype, data):
    with pytest.raises(InvalidRequest, match="'IN0' for model 'm'"):
        tensor_of(dtype, [2], data)


def test_bare_nan_and_infinities_are_numbers_both_ways():
    body = b'{"inputs":[{"name":"IN0","shape":[3],"datatype":"FP32","data":[NaN,Infinity,-Infinity]}]}'
    decoded = decode(body)
    values = decoded.request.inputs["IN0"].array.tolist()
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    response = Response("m", 1, "", outputs=(Tensor("OUT0", DType.FP32, np.array(values, "<f4")),))
    text, chunks, length = encode_infer(response, decoded, ONE)
    assert b'"data":[NaN,Infinity,-Infinity]' in text
    assert (chunks, length) == ([], None)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1], [2], [3], [4]], [[[1, 2]], [[3, 4]]]])
def test_data_may_be_flat_or_nested(data):
    assert tensor_of(DType.INT32, [2, 2], data).array.tolist() == [[1, 2], [3, 4]]


def test_empty_data_is_an_empty_tensor():
    for data in ([], [[]], [[], []]):
        assert tensor_of(DType.FP32, [0, 2], data).shape == (0, 2)


@pytest.mark.parametrize("data", [[1], [1, 2, 3], [[1, 2], [3]], 1, "12", {"0": 1}, None])
def test_data_of_another_count_or_kind_is_refused(data):
    members = given_input(DType.INT32, [2], [])
    members["inputs"][0]["data"] = data
    with pytest.raises(InvalidRequest, match="'data'"):
        decode(members)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_short_floats_are_refused_in_json_both_ways(dtype):
    with pytest.raises(InvalidRequest) as caught:
        tensor_of(dtype, [1], [1])
    assert caught.value.message == (
        f"receiving {dtype.value} data via JSON is not supported. Please use the binary data format for input IN0"
    )
    decoded = decode(given_input(DType.FP32, [1], [1]))
    with pytest.raises(InvalidRequest, match=f"sending {dtype.value} data via JSON is not supported"):
        encode_infer(Response("m", 1, "", (Tensor("OUT0", dtype, np.zeros(1, dtype.numpy)),)), decoded, ONE)


def test_binary_inputs_follow_the_json_in_its_order_mixed_with_json_and_shared_memory():
    spec = model(DType.FP32, DType.INT32, DType.BYTES, DType.UINT8)
    region = {"shared_memory_region": "r", "shared_memory_offset": 4, "shared_memory_byte_size": 3}
    members = {
        "inputs": [
            {"name": "IN2", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
            {"name": "IN1", "shape": [1], "datatype": "INT32", "data": [7]},
            {"name": "IN0", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}},
            {"name": "IN3", "shape": [3], "datatype": "UINT8", "parameters": region},
        ]
    }
    regions = StubRegions()
    payload = b"\2\0\0\0ab" + np.float32(1.5).tobytes()
    request = decode(members, payload, spec, regions).request
    assert {name: tensor.array.tolist() for name, tensor in request.inputs.items()} == {
        "IN0": [1.5],
        "IN1": [7],
        "IN2": [b"ab"],
        "IN3": [4, 5, 6],
    }
    assert regions.held == 1
    request.release()
    assert regions.held == 0


def test_binary_numbers_are_views_of_the_body_when_they_lie_well():
    text = json.dumps(given_input(DType.UINT8, [4], binary_data_size=4)).encode()
    body = text + b"abcd"
    array = decode_infer(body, len(text), model(DType.UINT8), StubRegions()).request.inputs["IN0"].array
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_short_and_long_payloads_are_refused_in_tritons_words():
    members = given_input(DType.FP32, [2], binary_data_size=8)
    with pytest.raises(InvalidRequest) as caught:
        decode(members, b"12345")
    assert caught.value.message == "unexpected size for input 'IN0', expecting 3 additional bytes for model 'm'"
    with pytest.raises(InvalidRequest, match="expecting 8 additional bytes"):
        decode(members)
    with pytest.raises(InvalidRequest, match="unexpected additional input data for model 'm'"):
        decode(members, bytes(9))
    with pytest.raises(InvalidRequest, match="Expected 8, got 4"):
        decode(given_input(DType.FP32, [2], binary_data_size=4), bytes(4))


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"data": [1.0], "parameters": {"binary_data_size": 4}},
        {"data": [1.0], "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}},
        {"parameters": {"binary_data_size": 4, "shared_memory_region": "r", "shared_memory_byte_size": 4}},
    ],
)
def test_an_input_has_exactly_one_source_of_data(sources):
    item = {"name": "IN0", "shape": [1], "datatype": "FP32", **sources}
    with pytest.raises(InvalidRequest, match="Input must set only one of the following fields: 'data'"):
        decode({"inputs": [item]}, b"1234")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"inputs":{}}',
        b'{"inputs":[1]}',
        b'{"inputs":[{}]}',
        b'{"inputs":[{"name":1}]}',
        b'{"inputs":[{"name":"IN0"}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP31","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":7,"shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":1,"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":[1.0],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":[true],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":[-1],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":[9999999999999999999999],"data":[1]}]}',
        b'{"inputs":[{"name":"IN0","datatype":"FP32","shape":[1],"data":[1],"parameters":[]}]}',
        b'{"inputs":[],"id":7}',
        b'{"inputs":[],"parameters":7}',
        b'{"inputs":[],"outputs":{}}',
        b'{"inputs":[],"outputs":[{}]}',
        b'{"inputs":[],"inputs":[]}',
        b'{"inputs":[],"id":"\\ud800"}',
        b'{"inputs":[],"id":"\xff"}',
        b'\xef\xbb\xbf{"inputs":[]}',
        '{"inputs":[]}'.encode("utf-16"),
        b'{"inputs":[],"id":' + b"9" * 5000 + b"}",
        b'{"inputs":[],"x":' + b"[" * 101 + b"]" * 101 + b"}",
        b"[" * 1_000_000,
    ],
)
def test_malformed_requests_are_invalid(body):
    with pytest.raises(InvalidRequest):
        decode(body)


def test_names_given_twice_are_refused():
    twice = {"name": "IN0", "shape": [1], "datatype": "FP32", "data": [1]}
    with pytest.raises(InvalidRequest, match="input 'IN0' for model 'm' is given more than once"):
        decode({"inputs": [twice, twice]})
    with pytest.raises(InvalidRequest, match="output 'OUT0' for model 'm' is requested more than once"):
        decode({"inputs": [twice], "outputs": [{"name": "OUT0"}, {"name": "OUT0"}]})


def test_everything_beside_tensors_reaches_the_request():
    members = given_input(DType.FP32, [1], [1])
    members |= {
        "id": "frame 7 \U0001f600",
        "parameters": {"priority": 1, "timeout": 5, "sequence_id": "cam", "sequence_end": True, "gain": 0.5},
        "outputs": [{"name": "OUT1"}, {"name": "OUT0"}],
    }
    request = decode(members, version=3, extra={"gain": "header", "x-id": "9"}).request
    assert (request.model, request.version, request.id) == ("m", 3, "frame 7 \U0001f600")
    assert (request.priority, request.timeout_us) == (1, 5)
    assert request.sequence == SequenceStep("cam", is_end=True)
    assert request.parameters == {"gain": 0.5, "x-id": "9"}
    assert request.outputs == ("OUT1", "OUT0")


def test_a_failed_decoding_leaves_nothing_pinned():
    regions = StubRegions()
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    good = {"name": "IN0", "shape": [1], "datatype": "FP32", "parameters": place}
    bad = {"name": "IN1", "shape": [1], "datatype": "FP32", "data": ["x"]}
    for members in (
        {"inputs": [good, bad], "outputs": [{"name": "OUT0", "parameters": place}]},
        {"inputs": [good], "outputs": [{"name": "OUT0", "parameters": {**place, "shared_memory_region": "none"}}]},
        {"inputs": [good], "parameters": {"triton_x": 1}, "outputs": [{"name": "OUT0", "parameters": place}]},
    ):
        with pytest.raises(EdgeServerError):
            decode(members, regions=regions)
        assert regions.held == 0


@pytest.mark.parametrize("length", [-1, 12, 2**70])
def test_a_header_length_outside_the_body_is_refused(length):
    with pytest.raises(InvalidRequest, match=r"inference header size should be in range \(0, 11\), got: "):
        decode_infer(b'{"inputs":1', length, ONE, StubRegions())


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", ["", "x", "1.5", "0x10", "1 2", "٣", "--1", "9" * 30])
def test_a_header_length_that_is_no_integer_is_refused(text):
    with pytest.raises(InvalidRequest, match="Unable to parse Inference-Header-Content-Length"):
        parse_header_length(text)


def test_header_lengths_are_integers_of_either_sign():
    assert [parse_header_length(text) for text in ("0", " 12 ", "-3", "+4")] == [0, 12, -3, 4]


def raw_request(spec, body):
    return decode_infer(body, 0, spec, StubRegions())


def test_a_raw_body_is_the_one_input_and_all_outputs_come_back_binary():
    spec = model(DType.FP32, max_batch_size=4)
    decoded = raw_request(spec, np.arange(3, dtype="<f4").tobytes())
    assert decoded.request.inputs["IN0"].array.tolist() == [[0, 1, 2]]
    text, chunks, length = encode_infer(
        Response("m", 2, "", (Tensor("OUT0", DType.FP32, np.ones((1, 2), "<f4")),)), decoded, spec
    )
    assert length == len(text)
    assert [bytes(chunk) for chunk in chunks] == [np.ones(2, "<f4").tobytes()]
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 8}


def test_a_raw_body_of_bytes_is_one_element():
    request = raw_request(model(DType.BYTES), b"\xff\xd8 any file").request
    assert request.inputs["IN0"].array.tolist() == [b"\xff\xd8 any file"]


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ([InputSpec("a", DType.FP32, (1,)), InputSpec("b", DType.FP32, (1,))], b"1234"),
        ([InputSpec("a", DType.FP32, (-1, -1))], b"1234"),
        ([InputSpec("a", DType.FP32, (-1, 2))], b"1234"),
        ([InputSpec("a", DType.FP32, (2,))], b"1234"),
        ([InputSpec("a", DType.FP32, (-1, 0))], b"1234"),
        ([InputSpec("a", DType.BYTES, (2,))], b"1234"),
        ([], b""),
    ],
)
def test_raw_bodies_that_fit_no_shape_are_refused(inputs, body):
    spec = ModelSpec("m", "stub", "", 0, tuple(inputs), (), ())
    with pytest.raises(InvalidRequest, match="'m'"):
        raw_request(spec, body)


def response(*tensors, **more):
    return Response("m", 3, more.pop("request_id", ""), outputs=tensors, **more)


def two_outputs():
    return Tensor("OUT1", DType.INT32, np.array([[3, 4]], "<i4")), Tensor("OUT0", DType.FP32, np.array([1.5], "<f4"))


TWO = model(DType.FP32, DType.INT32)


def test_outputs_stand_in_the_order_of_the_response():
    decoded = decode(given_input(DType.FP32, [1], [1]), spec=TWO)
    text, _, _ = encode_infer(response(*two_outputs(), request_id="7", parameters={"p": 1}), decoded, TWO)
    assert json.loads(text) == {
        "id": "7",
        "model_name": "m",
        "model_version": "3",
        "parameters": {"p": 1},
        "outputs": [
            {"name": "OUT1", "datatype": "INT32", "shape": [1, 2], "data": [3, 4]},
            {"name": "OUT0", "datatype": "FP32", "shape": [1], "data": [1.5]},
        ],
    }
    text, _, _ = encode_infer(response(*two_outputs()), decoded, TWO)
    assert list(json.loads(text)) == ["model_name", "model_version", "outputs"]


def test_an_outputs_own_choice_beats_the_requests():
    members = {
        **given_input(DType.FP32, [1], [1]),
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "OUT0", "parameters": {"binary_data": False}}, {"name": "OUT1"}],
    }
    text, chunks, length = encode_infer(response(*two_outputs()), decode(members, spec=TWO), TWO)
    first, second = json.loads(text)["outputs"]
    assert first["parameters"] == {"binary_data_size": 8}
    assert second["data"] == [1.5]
    assert b"".join(chunks) == np.array([3, 4], "<i4").tobytes()
    assert length == len(text)


def test_binary_outputs_without_bytes_need_no_header_length():
    members = {**given_input(DType.FP32, [1], [1]), "parameters": {"binary_data_output": True}}
    empty = Tensor("OUT0", DType.FP32, np.empty((0, 3), "<f4"))
    text, _, length = encode_infer(response(empty), decode(members), ONE)
    assert json.loads(text)["outputs"][0]["parameters"] == {"binary_data_size": 0}
    assert length is None


def test_classes_may_be_json_or_binary():
    for binary in (False, True):
        members = {
            **given_input(DType.FP32, [1], [1]),
            "outputs": [{"name": "OUT0", "parameters": {"classification": 2, "binary_data": binary}}],
        }
        tensor = Tensor("OUT0", DType.FP32, np.array([0.1, 0.9], "<f4"))
        text, chunks, _ = encode_infer(response(tensor), decode(members), ONE)
        output = json.loads(text)["outputs"][0]
        assert (output["datatype"], output["shape"]) == ("BYTES", [2])
        if binary:
            assert b"".join(chunks) == b"\x0a\0\0\x000.900000:1\x0a\0\0\x000.100000:0"
        else:
            assert output["data"] == ["0.900000:1", "0.100000:0"]


def test_results_that_go_to_shared_memory_are_described_without_data_or_parameters():
    regions = StubRegions()
    place = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 16}
    members = {**given_input(DType.FP32, [1], [1]), "outputs": [{"name": "OUT0", "parameters": place}]}
    decoded = decode(members, regions=regions)
    assert regions.held == 1
    tensor = Tensor("OUT0", DType.FP32, np.array([1, 2], "<f4"))
    text, chunks, length = encode_infer(response(tensor), decoded, ONE)
    assert json.loads(text)["outputs"] == [{"name": "OUT0", "datatype": "FP32", "shape": [2]}]
    assert (chunks, length) == ([], None)
    assert regions.memory[8:16] == tensor.array.tobytes()
    decoded.output_pins.release()
    assert regions.held == 0


def test_bytes_that_are_not_text_are_refused_as_json():
    array = np.array([b"\xff"], object)
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        encode_infer(response(Tensor("OUT0", DType.BYTES, array)), decode(given_input(DType.FP32, [1], [1])), ONE)


JSON_TYPES = [dtype for dtype in DType if dtype not in (DType.FP16, DType.BF16)]


@st.composite
def tensors(draw, dtypes):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    if dtype is DType.BYTES:
        array = np.empty(count, object)
        array[:] = [text.encode() for text in draw(st.lists(st.text(max_size=3), min_size=count, max_size=count))]
    elif dtype is DType.BOOL:
        array = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    else:
        size = count * dtype.itemsize
        array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype.numpy)
    return Tensor("OUT0", dtype, array.reshape(shape))


@given(tensors(JSON_TYPES))
def test_tensors_sent_as_json_read_back_the_same(tensor):
    decoded = decode(given_input(DType.FP32, [1], [1]))
    text, _, _ = encode_infer(response(tensor), decoded, ONE)
    output = json.loads(text)["outputs"][0]
    output["name"] = "IN0"
    back = decode({"inputs": [output]}).request.inputs["IN0"]
    assert back.shape == tensor.shape
    if tensor.array.dtype.kind == "f":
        np.testing.assert_array_equal(back.array, tensor.array)
    else:
        assert back.array.tolist() == tensor.array.tolist()


@given(tensors(list(DType)), st.integers(0, 8))
def test_tensors_sent_as_binary_read_back_the_same(tensor, pad):
    members = {**given_input(DType.FP32, [1], [1]), "parameters": {"binary_data_output": True}}
    text, chunks, _ = encode_infer(response(tensor), decode(members), ONE)
    header = json.loads(text)
    header["inputs"] = header.pop("outputs")
    header["id"] = " " * pad
    again = json.dumps(header).encode()
    body = again + b"".join(chunks)
    back = decode_infer(body, len(again), ONE, StubRegions()).request.inputs["OUT0"]
    assert back.shape == tensor.shape
    assert back.array.flags.aligned
    assert bytes(raw_from_tensor(back)) == bytes(raw_from_tensor(tensor))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["IN0", "OUT0"]) | VALUES,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | VALUES,
        "datatype": st.sampled_from([dtype.value for dtype in DType]) | VALUES,
        "data": st.lists(st.integers(0, 3) | st.floats() | st.text(max_size=2), max_size=4) | VALUES,
        "parameters": st.fixed_dictionaries(
            {},
            optional={
                "binary_data_size": st.integers(-1, 9) | VALUES,
                "classification": VALUES,
                "shared_memory_region": st.sampled_from(["r", "q"]) | VALUES,
                "shared_memory_offset": st.integers(-1, 65) | VALUES,
                "shared_memory_byte_size": st.integers(-1, 65) | VALUES,
            },
        )
        | VALUES,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(ITEMS, max_size=3) | VALUES,
        "outputs": st.lists(ITEMS, max_size=2) | VALUES,
        "id": VALUES,
        "parameters": VALUES,
    },
)


@given(BODIES, st.binary(max_size=12))
def test_any_json_is_decoded_or_refused_and_nothing_stays_pinned(members, payload):
    regions = StubRegions()
    try:
        decoded = decode(members, payload, regions=regions)
    except EdgeServerError:
        assert regions.held == 0
        return
    if decoded.request.release is not None:
        decoded.request.release()
    decoded.output_pins.release()
    assert regions.held == 0


@given(st.binary(max_size=200), st.none() | st.integers(-2, 210))
def test_any_bytes_are_decoded_or_refused(body, length):
    with contextlib.suppress(EdgeServerError):
        decode_infer(body, length, ONE, StubRegions())


JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}",:\\ax1 \n\u00e9', max_size=8)


@given(
    st.recursive(
        JSON_SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
        max_leaves=300,
    ),
    st.booleans(),
)
def test_any_shallow_value_is_read_as_the_standard_library_reads_it(value, is_ascii):
    text = json.dumps([value, *[[]] * 100], ensure_ascii=is_ascii)
    assert parse_json(text.encode()) == json.loads(text)


def test_brackets_within_strings_do_not_count_as_nesting():
    value = ["[" * 300, '"\\"[' * 200, "{" * 99]
    assert parse_json(json.dumps(value).encode()) == value


def test_exactly_a_hundred_levels_are_read():
    assert parse_json(b"[" * 100 + b"]" * 100)
    many = b"[" + b"[[1]]," * 200 + b"[]]"
    assert len(parse_json(many)) == 201
    with pytest.raises(InvalidRequest, match="nested deeper than 100"):
        parse_json(b"[" * 101 + b"]" * 101)


def test_an_absent_text_is_an_empty_object():
    assert parse_object(b"") == {}
