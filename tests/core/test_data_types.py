"""Data types: names, sizes and numbers as in Triton's model_config.proto."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.core.tensor import BY_CONFIG_NAME, BY_NAME, DType, Tensor

TABLE = [
    ("BOOL", "TYPE_BOOL", 1, 1), ("UINT8", "TYPE_UINT8", 2, 1), ("UINT16", "TYPE_UINT16", 3, 2),
    ("UINT32", "TYPE_UINT32", 4, 4), ("UINT64", "TYPE_UINT64", 5, 8), ("INT8", "TYPE_INT8", 6, 1),
    ("INT16", "TYPE_INT16", 7, 2), ("INT32", "TYPE_INT32", 8, 4), ("INT64", "TYPE_INT64", 9, 8),
    ("FP16", "TYPE_FP16", 10, 2), ("FP32", "TYPE_FP32", 11, 4), ("FP64", "TYPE_FP64", 12, 8),
    ("BYTES", "TYPE_STRING", 13, 0), ("BF16", "TYPE_BF16", 14, 2),
]  # fmt: skip


def test_every_data_type_has_tritons_names_number_and_size() -> None:
    assert [(dtype.value, dtype.config_name, dtype.number, dtype.itemsize) for dtype in DType] == TABLE
    assert {name: BY_NAME[name] for name, *_ in TABLE} == {dtype.value: dtype for dtype in DType}
    assert {name: BY_CONFIG_NAME[name] for _, name, *_ in TABLE} == {dtype.config_name: dtype for dtype in DType}
    sized = [dtype for dtype in DType if dtype is not DType.BYTES]
    assert [dtype.numpy.itemsize for dtype in sized] == [dtype.itemsize for dtype in sized]


def test_every_numpy_type_is_found_again_in_either_byte_order() -> None:
    numbers = [dtype for dtype in DType if dtype not in (DType.BYTES, DType.BF16)]
    assert [DType.from_numpy(dtype.numpy) for dtype in numbers] == numbers
    assert [DType.from_numpy(dtype.numpy.newbyteorder(">")) for dtype in numbers] == numbers


@pytest.mark.parametrize("dtype", ["S5", "U3", "O"])
def test_strings_and_objects_are_bytes(dtype: str) -> None:
    assert DType.from_numpy(dtype) is DType.BYTES


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 2 has strings of any length")
def test_numpys_strings_of_any_length_are_bytes() -> None:
    assert DType.from_numpy(np.dtypes.StringDType()) is DType.BYTES


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "V3"])
def test_a_numpy_type_that_no_tensor_has_is_a_key_error(dtype: str) -> None:
    with pytest.raises(KeyError):
        DType.from_numpy(dtype)


def test_a_tensors_shape_is_its_arrays() -> None:
    assert Tensor("x", DType.FP32, np.zeros((2, 3), np.float32)).shape == (2, 3)
