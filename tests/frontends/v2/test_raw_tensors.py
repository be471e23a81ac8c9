"""Raw tensor bytes in inference bodies."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.protocol.raw_tensors import raw_from_tensor, raw_size, tensor_from_raw

NUMBERS = [dtype for dtype in DType if dtype not in (DType.BYTES, DType.BOOL)]


def parse(dtype, shape, data):
    return tensor_from_raw("x", dtype, shape, data, model="m")


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_are_read_only_views_and_go_back_without_a_copy(dtype):
    data = bytes(range(6 * dtype.itemsize))
    tensor = parse(dtype, [2, 3], data)
    assert tensor.shape == (2, 3)
    assert tensor.array.dtype == dtype.numpy
    assert not tensor.array.flags.owndata
    assert not tensor.array.flags.writeable
    raw = raw_from_tensor(tensor)
    assert isinstance(raw, memoryview)
    assert np.shares_memory(np.frombuffer(raw, np.uint8), tensor.array)
    assert raw == data
    assert raw_size(tensor) == len(data)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [dtype for dtype in NUMBERS if dtype.itemsize > 1])
def test_an_odd_offset_is_copied_into_an_aligned_array(dtype):
    data = memoryview(b"?" + bytes(range(4 * dtype.itemsize)))[1:]
    array = parse(dtype, [4], data).array
    assert array.flags.aligned
    assert array.tobytes() == bytes(data)


def test_a_view_of_writable_memory_cannot_be_written_through():
    memory = bytearray(8)
    assert not parse(DType.FP32, [2], memory).array.flags.writeable


def test_bool_bytes_other_than_one_are_true():
    array = parse(DType.BOOL, [4], bytes([0, 1, 2, 255])).array
    assert array.tolist() == [False, True, True, True]
    assert array.view(np.uint8).tolist() == [0, 1, 1, 1]
    assert not parse(DType.BOOL, [2], bytes([0, 1])).array.flags.owndata


def test_a_wrong_byte_count_is_refused_in_tritons_words():
    with pytest.raises(InvalidRequest) as caught:
        parse(DType.INT32, [16], bytes(128))
    assert caught.value.message == "input byte size mismatch for input 'x' for model 'm'. Expected 64, got 128"


@pytest.mark.sample
@pytest.mark.parametrize(
    "shape",
    [[-1], [2, -3], [2**63], [2**32, 2**32], [0, 2**62, 4], [10**400], [1] * 33, [2**62, 0], [2**40, 2**20, 0]],
)
@pytest.mark.parametrize("dtype", [DType.FP64, DType.BYTES, DType.BOOL])
def test_impossible_shapes_are_refused_before_anything_is_allocated(shape, dtype):
    with pytest.raises(InvalidRequest, match="'x' for model 'm'"):
        parse(dtype, shape, b"")


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DType)
def test_empty_tensors_keep_their_shape(dtype):
    tensor = parse(dtype, [3, 0, 2], b"")
    assert tensor.shape == (3, 0, 2)
    assert tensor.array.dtype == dtype.numpy
    assert bytes(raw_from_tensor(tensor)) == b""
    assert raw_size(tensor) == 0


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BYTES])
def test_a_shape_without_dimensions_is_one_element(dtype):
    data = raw_from_tensor(Tensor("x", dtype, np.array(b"ab" if dtype is DType.BYTES else 1.5, dtype.numpy)))
    tensor = parse(dtype, [], data)
    assert tensor.shape == ()
    assert bytes(raw_from_tensor(tensor)) == bytes(data)


def test_strings_are_split_by_their_prefixes():
    data = b"\x02\0\0\0ab\x00\0\0\0\x03\0\0\0\xff\0c"
    tensor = parse(DType.BYTES, [3, 1], memoryview(data))
    assert tensor.array.tolist() == [[b"ab"], [b""], [b"\xff\0c"]]
    assert raw_from_tensor(tensor) == data
    assert raw_size(tensor) == len(data)


@pytest.mark.parametrize(
    ("count", "data", "words"),
    [
        (2, struct.pack("<I", 3) + b"abc" + b"\0", "incomplete string length indicator"),
        (
            2,
            struct.pack("<I", 8) + b"abcdefgh",
            "expected 2 string elements for inference input 'x' for model 'm', got 1",
        ),
        (1, struct.pack("<I", 2**32 - 1) + b"abc", "expecting string of length 4294967295 but only 3"),
        (1, struct.pack("<I", 1) + b"abc", "expected 1 string elements"),
        (0, b"\0\0\0\0", "expected 0 string elements"),
        (2**40, b"", "expected 1099511627776 string elements"),
        (1, b"", "expected 1 string elements"),
    ],
)
def test_broken_strings_are_refused(count, data, words):
    with pytest.raises(InvalidRequest, match=words):
        parse(DType.BYTES, [count], data)


@given(st.lists(st.binary(max_size=9), max_size=20))
def test_any_strings_survive_the_way_out_and_back(elements):
    array = np.empty(len(elements), object)
    array[:] = elements
    raw = raw_from_tensor(Tensor("x", DType.BYTES, array))
    assert parse(DType.BYTES, [len(elements)], raw).array.tolist() == elements


@given(
    st.sampled_from(list(DType)),
    st.lists(st.integers(-2, 2**64) | st.integers(0, 4), max_size=5),
    st.binary(max_size=64),
)
def test_arbitrary_bytes_and_shapes_parse_or_are_refused(dtype, shape, data):
    try:
        tensor = parse(dtype, shape, data)
    except InvalidRequest:
        return
    assert tensor.shape == tuple(shape)
    if dtype is not DType.BOOL:
        assert bytes(raw_from_tensor(tensor)) == data


def test_a_transposed_array_leaves_in_row_major_order():
    array = np.arange(6, dtype="<i4").reshape(2, 3).T
    raw = raw_from_tensor(Tensor("x", DType.INT32, array))
    assert bytes(raw) == np.ascontiguousarray(array).tobytes()
