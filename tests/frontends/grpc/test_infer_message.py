"""The parser of ModelInferRequest agrees with the generated classes on every input, and never reads beyond it."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import BY_NAME, DType
from edge_server.errors import InvalidRequest
from edge_server.frontends.grpc import infer_message as message_module
from edge_server.frontends.grpc.infer_message import InferMessage, MessageReader
from edge_server.frontends.grpc.typed_contents import FIELDS, decode_varints, tensor_from_contents
from edge_server.protocol import messages
from edge_server.protocol.protobuf_wire_format import encode_varint, read_varint
from edge_server.protocol.raw_fields import split

READER = MessageReader()

names = st.text(max_size=8)
parameter = st.one_of(
    st.booleans().map(lambda v: {"bool_param": v}),
    st.integers(-(2**63), 2**63 - 1).map(lambda v: {"int64_param": v}),
    names.map(lambda v: {"string_param": v}),
    st.floats(allow_nan=False).map(lambda v: {"double_param": v}),
    st.integers(0, 2**64 - 1).map(lambda v: {"uint64_param": v}),
)
parameters = st.dictionaries(names, parameter, max_size=3)
int64 = st.integers(-(2**63), 2**63 - 1)
contents = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=6),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
        "int64_contents": st.lists(int64, max_size=6),
        "uint_contents": st.lists(st.integers(0, 2**32 - 1), max_size=6),
        "uint64_contents": st.lists(st.integers(0, 2**64 - 1), max_size=6),
        "fp32_contents": st.lists(st.floats(width=32, allow_nan=False), max_size=6),
        "fp64_contents": st.lists(st.floats(allow_nan=False), max_size=6),
        "bytes_contents": st.lists(st.binary(max_size=9), max_size=4),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> object:
    message = messages.ModelInferRequest(model_name=draw(names), model_version=draw(names), id=draw(names))
    _fill(message.parameters, draw(parameters))
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.inputs.add(name=draw(names), datatype=draw(names), shape=draw(st.lists(int64, max_size=3)))
        _fill(tensor.parameters, draw(parameters))
        if draw(st.booleans()):
            tensor.contents.MergeFrom(messages.InferTensorContents(**draw(contents)))
    for _ in range(draw(st.integers(0, 2))):
        _fill(message.outputs.add(name=draw(names)).parameters, draw(parameters))
    message.raw_input_contents.extend(draw(st.lists(st.binary(max_size=40), max_size=3)))
    return message


def _fill(target: object, values: dict[str, dict[str, object]]) -> None:
    for key, value in values.items():
        target[key].CopyFrom(messages.InferParameter(**value))


def whole(found: InferMessage) -> object:
    """Put a message that was read in parts together again."""
    message = messages.ModelInferRequest()
    message.CopyFrom(found.message)
    if found.inputs is not found.message.inputs:
        message.inputs.extend(found.inputs)
    for position, data in found.contents.items():
        message.inputs[position].contents.ParseFromString(bytes(data))
    del message.raw_input_contents[:]
    message.raw_input_contents.extend(bytes(raw) for raw in found.raw)
    return message


@pytest.fixture(autouse=True)
def split_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the shortest message take the way of the largest."""
    monkeypatch.setattr(message_module, "MIN_SPLIT_BYTES", 0)


def generated(data: bytes) -> object | None:
    try:
        return messages.ModelInferRequest.FromString(data)
    except (DecodeError, UnicodeDecodeError):  # the latter with protobuf's implementation in Python
        return None


def scanned(data: bytes) -> object | None:
    """Return what the scan reads. Cut-out contents are validated when used, so a bad one counts as a refusal here."""
    try:
        return whole(READER.read(data))
    except (InvalidRequest, DecodeError, UnicodeDecodeError):
        return None


@given(requests())
def test_a_request_reads_as_the_generated_class_reads_it(message: object) -> None:
    data = message.SerializeToString()
    assert whole(READER.read(data)) == message


@given(st.lists(requests(), min_size=2, max_size=3))
def test_repeated_and_merged_fields_follow_protobufs_rules(parts: list[object]) -> None:
    data = b"".join(part.SerializeToString() for part in parts)
    assert scanned(data) == generated(data)


@given(requests(), st.data())
def test_damage_is_refused_exactly_when_the_generated_class_refuses_it(message: object, data: st.DataObject) -> None:
    damaged = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    # Serialized again before comparing: NaN is not equal to itself.
    ours, theirs = scanned(cut), generated(cut)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_invalid_request(garbage: bytes) -> None:
    assert (scanned(garbage) is None) == (generated(garbage) is None)


def test_a_length_beyond_the_message_allocates_nothing() -> None:
    data = b"\x3a" + encode_varint(2**31 - 1) + b"x"
    assert split(data, 7) is None
    with pytest.raises(InvalidRequest, match="not a valid ModelInferRequest"):
        READER.read(data)


@pytest.mark.parametrize("tail", [b"\x3b\x3c", b"\x00\x00", b"\xff" * 11, b"\x3d\x00\x00\x00\x00", b"\x39" + bytes(8)])
def test_odd_fields_are_judged_by_the_generated_class(tail: bytes) -> None:
    data = messages.ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString() + tail
    assert (scanned(data) is None) == (generated(data) is None)


def test_raw_contents_are_views_of_the_received_bytes() -> None:
    message = messages.ModelInferRequest(model_name="m", raw_input_contents=[b"a" * 100, b"", b"b" * 50])
    data = message.SerializeToString()
    found = READER.read(data)
    assert [bytes(raw) for raw in found.raw] == [b"a" * 100, b"", b"b" * 50]
    assert all(isinstance(raw, memoryview) and raw.obj is data for raw in found.raw)


def test_large_typed_floats_are_views_of_the_received_bytes() -> None:
    message = messages.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP64", shape=[64]).contents.fp64_contents.extend(range(64))
    data = message.SerializeToString()
    found = READER.read(data)
    tensor = tensor_from_contents("x", DType.FP64, (64,), found.contents[0], model="m")
    assert found.contents[0].obj is data
    np.testing.assert_array_equal(tensor.array, np.arange(64.0))
    address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    if tensor.array.base is not None:  # at an odd address it is a copy
        assert 0 <= tensor.array.__array_interface__["data"][0] - address < len(data)


@given(st.integers(0, 2**64 - 1))
def test_varints_read_as_they_are_written(number: int) -> None:
    written = encode_varint(number)
    assert read_varint(memoryview(written), 0) == (number, len(written))


VALUES = {
    DType.BOOL: st.booleans(),
    DType.INT8: st.integers(-128, 127),
    DType.INT16: st.integers(-(2**15), 2**15 - 1),
    DType.INT32: st.integers(-(2**31), 2**31 - 1),
    DType.INT64: int64,
    DType.UINT8: st.integers(0, 255),
    DType.UINT16: st.integers(0, 2**16 - 1),
    DType.UINT32: st.integers(0, 2**32 - 1),
    DType.UINT64: st.integers(0, 2**64 - 1),
    DType.FP32: st.floats(width=32, allow_nan=False),
    DType.FP64: st.floats(allow_nan=False),
    DType.BYTES: st.binary(max_size=5),
}
FIELD_NAMES = {field.number: field.name for field in messages.InferTensorContents.DESCRIPTOR.fields}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", list(VALUES))
@given(data=st.data())
def test_typed_contents_of_every_type_become_their_numbers(dtype: DType, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[dtype], max_size=20))
    message = messages.InferTensorContents(**{FIELD_NAMES[FIELDS[dtype]]: values})
    tensor = tensor_from_contents("x", dtype, (len(values),), message.SerializeToString(), model="m")
    assert tensor.array.dtype == dtype.numpy
    assert tensor.array.tolist() == values


def test_unpacked_numbers_are_read_too() -> None:
    data = b"\x10\x05\x10\x07" + b"\x12\x02\x01\x02" + b"\x10\x09"
    tensor = tensor_from_contents("x", DType.INT32, (5,), data, model="m")
    assert tensor.array.tolist() == [5, 7, 1, 2, 9]


def test_numbers_across_chunks_are_all_read() -> None:
    values = np.random.default_rng(1).integers(-(2**31), 2**31 - 1, 700_000)
    data = messages.InferTensorContents(int_contents=values.tolist()).SerializeToString()
    tensor = tensor_from_contents("x", DType.INT32, (700, 1000), data, model="m")
    np.testing.assert_array_equal(tensor.array, values.reshape(700, 1000))


@pytest.mark.parametrize("value", [128, -129])
def test_a_number_too_large_for_a_small_type_is_refused_rather_than_cut(value: int) -> None:
    data = messages.InferTensorContents(int_contents=[value]).SerializeToString()
    with pytest.raises(InvalidRequest, match="do not fit into INT8"):
        tensor_from_contents("x", DType.INT8, (1,), data, model="m")


def test_contents_of_another_type_count_as_missing_bytes() -> None:
    data = messages.InferTensorContents(int_contents=[1, 2]).SerializeToString()
    with pytest.raises(InvalidRequest, match=r"byte size mismatch for input 'x' for model 'm'. Expected 8, got 0"):
        tensor_from_contents("x", DType.FP32, (2,), data, model="m")


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_half_precision_has_no_typed_contents(dtype: DType) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        tensor_from_contents("x", dtype, (1,), b"", model="m")


@given(st.sampled_from(sorted(BY_NAME)), st.lists(st.integers(0, 2**40), max_size=3), st.binary(max_size=60))
def test_garbage_as_typed_contents_raises_nothing_but_invalid_request(
    name: str, shape: list[int], garbage: bytes
) -> None:
    with contextlib.suppress(InvalidRequest):
        tensor_from_contents("x", BY_NAME[name], shape, garbage, model="m")


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30))
def test_vectorised_varints_equal_single_ones(numbers: list[int]) -> None:
    octets = np.frombuffer(b"".join(map(encode_varint, numbers)), np.uint8)
    if numbers:
        decoded = decode_varints(octets)
        assert decoded is not None
        assert decoded.tolist() == numbers


@pytest.mark.parametrize("data", [b"\xff" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_numbers_of_more_than_64_bits_are_refused(data: bytes) -> None:
    assert decode_varints(np.frombuffer(data, np.uint8)) is None
    with pytest.raises(InvalidRequest):
        tensor_from_contents("x", DType.INT64, (1,), b"\x1a" + encode_varint(len(data)) + data, model="m")


def test_a_shape_that_overflows_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(InvalidRequest, match="too many elements"):
        tensor_from_contents("x", DType.FP32, (2**62, 2**62), struct.pack("<f", 1.0), model="m")
