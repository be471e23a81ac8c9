"""All error messages of RequestCheck, and the rows and merge keys of valid requests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest

IMAGE = InputSpec("IMAGE", DType.FP32, (16,))
SIZE = InputSpec("SIZE", DType.INT32, (-1, 2))
HINT = InputSpec("HINT", DType.BYTES, (1,), is_optional=True)
GROUPS = (InstanceGroup("m", InstanceKind.CPU, 1),)


def spec_of(*inputs: InputSpec, max_batch_size: int = 8) -> ModelSpec:
    return ModelSpec("m", "stub", "", max_batch_size, inputs, (OutputSpec("OUT", DType.FP32, (16,)),), GROUPS)


def tensor(name: str, dtype: DType, *shape: int) -> Tensor:
    return Tensor(name, dtype, np.zeros(shape, dtype.numpy))


def request(*tensors: Tensor, id: str = "r7", outputs: tuple[str, ...] = ()) -> Request:
    return Request("m", {item.name: item for item in tensors}, id=id, outputs=outputs)


IMAGE_1 = tensor("IMAGE", DType.FP32, 1, 16)
SIZE_1 = tensor("SIZE", DType.INT32, 1, 3, 2)
HINT_1 = tensor("HINT", DType.BYTES, 1, 1)

WRONG = [
    (
        (IMAGE, SIZE), request(IMAGE_1),
        "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['IMAGE'], but missing required input(s) "
        "['SIZE']. Please provide all required input(s).",
    ),
    (
        (IMAGE, SIZE), request(),
        "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
        "['IMAGE','SIZE']. Please provide all required input(s).",
    ),
    (
        (IMAGE,), request(IMAGE_1, SIZE_1),
        "expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['IMAGE','SIZE'], but missing required "
        "input(s) []. Please provide all required input(s).",
    ),
    (
        (IMAGE, SIZE, HINT), request(IMAGE_1),
        "expected number of inputs between 2 and 3 but got 1 inputs for model 'm'. Got input(s) ['IMAGE'], but "
        "missing required input(s) ['SIZE']. Please provide all required input(s).",
    ),
    (
        (IMAGE, SIZE, HINT), request(IMAGE_1, HINT_1),
        "expected number of inputs between 2 and 3 but got 2 inputs for model 'm'. Got input(s) ['HINT','IMAGE'], but "
        "missing required input(s) ['SIZE'].",
    ),
    ((IMAGE, SIZE), request(IMAGE_1, HINT_1), "unexpected inference input 'HINT' for model 'm'"),
    ((IMAGE, HINT), request(IMAGE_1, SIZE_1), "unexpected inference input 'SIZE' for model 'm'"),
    (
        (IMAGE,), request(IMAGE_1, outputs=("OUT", "NO")),
        "unexpected inference output 'NO' for model 'm', which has 'OUT'",
    ),
    (
        (IMAGE,), request(tensor("IMAGE", DType.INT32, 1, 16)),
        "inference input 'IMAGE' data-type is 'INT32', but model 'm' expects 'FP32'",
    ),
    (
        (IMAGE,), request(tensor("IMAGE", DType.FP32, 1, 8)),
        "unexpected shape for input 'IMAGE' for model 'm'. Expected [-1,16], got [1,8]. NOTE: max_batch_size is 8",
    ),
    ((IMAGE,), request(tensor("IMAGE", DType.FP32, 16)), "Expected [-1,16], got [16]."),
    ((IMAGE,), request(tensor("IMAGE", DType.FP32)), "Expected [-1,16], got []."),
    ((IMAGE,), request(tensor("IMAGE", DType.FP32, 0, 16)), "Expected [-1,16], got [0,16]."),
    ((SIZE,), request(tensor("SIZE", DType.INT32, 1, 3, 4)), "Expected [-1,-1,2], got [1,3,4]."),
    (
        (IMAGE,), request(tensor("IMAGE", DType.FP32, 9, 16)),
        "inference request batch-size must be <= 8 for 'm'",
    ),
    (
        (IMAGE, SIZE), request(tensor("IMAGE", DType.FP32, 2, 16), tensor("SIZE", DType.INT32, 3, 1, 2)),
        "input 'SIZE' batch size does not match other inputs for 'm'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "given", "words"), WRONG)
def test_a_wrong_request_is_refused_in_tritons_words(inputs: tuple[InputSpec, ...], given: Request, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestCheck(spec_of(*inputs)).count_items(given)
    assert caught.value.message.startswith("[request id: r7] ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("is_default", "end"), [(False, "got 9"), (True, "set max_batch_size in the model's config.pbtxt")]
)
def test_a_batch_limit_that_is_a_default_is_refused_with_how_to_raise_it(is_default: bool, end: str) -> None:
    spec = dataclasses.replace(spec_of(IMAGE), has_default_batch_size=is_default)
    with pytest.raises(InvalidRequest, match=r"batch-size must be <= 8 for 'm', got 9") as caught:
        RequestCheck(spec).count_items(request(tensor("IMAGE", DType.FP32, 9, 16)))
    assert caught.value.message.endswith(end)


def test_a_request_without_an_id_gets_no_id_text() -> None:
    with pytest.raises(InvalidRequest, match=r"^\[request id: <id_unknown>\] unexpected inference input"):
        RequestCheck(spec_of(IMAGE)).count_items(request(SIZE_1, id=""))


def test_a_model_that_does_not_batch_expects_its_dims_alone_and_no_note() -> None:
    check = RequestCheck(spec_of(IMAGE, max_batch_size=0))
    assert check.count_items(request(tensor("IMAGE", DType.FP32, 16))) == 1
    with pytest.raises(InvalidRequest) as caught:
        check.count_items(request(IMAGE_1))
    assert caught.value.message.endswith("Expected [16], got [1,16].")


def test_a_string_that_is_not_utf8_is_named_with_its_input() -> None:
    check = RequestCheck(spec_of(IMAGE, HINT))
    for value in (b"", "\u00e9".encode()):
        check.check_utf8(request(IMAGE_1, Tensor("HINT", DType.BYTES, np.array([[value]], object))))
    check.check_utf8(request(IMAGE_1))
    with pytest.raises(InvalidRequest, match=r"id: r7.*input 'HINT' for model 'm' has a string.*not UTF-8.*0xff"):
        check.check_utf8(request(IMAGE_1, Tensor("HINT", DType.BYTES, np.array([[b"fine"], [b"\xff"]], object))))


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_rows_of_a_request_are_its_batch_size(rows: int) -> None:
    given = request(tensor("IMAGE", DType.FP32, rows, 16), tensor("SIZE", DType.INT32, rows, 5, 2))
    assert RequestCheck(spec_of(IMAGE, SIZE)).count_items(given) == rows


def test_an_optional_input_may_be_left_out_and_given() -> None:
    check = RequestCheck(spec_of(IMAGE, HINT))
    assert check.count_items(request(IMAGE_1)) == 1
    assert check.count_items(request(IMAGE_1, HINT_1)) == 1


def test_a_model_without_inputs_takes_a_request_of_one_row() -> None:
    assert RequestCheck(spec_of()).count_items(request()) == 1


def test_requests_merge_when_shapes_and_presence_of_inputs_are_the_same() -> None:
    check = RequestCheck(spec_of(IMAGE, SIZE, HINT))
    plain = check.merge_key(request(IMAGE_1, SIZE_1))
    more_rows = check.merge_key(request(tensor("SIZE", DType.INT32, 4, 3, 2), tensor("IMAGE", DType.FP32, 4, 16)))
    other_shape = check.merge_key(request(IMAGE_1, tensor("SIZE", DType.INT32, 1, 4, 2)))
    with_hint = check.merge_key(request(IMAGE_1, SIZE_1, HINT_1))
    assert plain == more_rows
    assert len({plain, other_shape, with_hint}) == 3


def test_requests_merge_when_the_values_of_their_shape_tensors_are_the_same() -> None:
    check = RequestCheck(spec_of(IMAGE, InputSpec("SHAPE", DType.INT64, (1,), is_shape_tensor=True)))
    one = check.merge_key(request(IMAGE_1, tensor("SHAPE", DType.INT64, 1)))
    assert one == check.merge_key(request(IMAGE_1, tensor("SHAPE", DType.INT64, 1)))
    assert one != check.merge_key(request(IMAGE_1, Tensor("SHAPE", DType.INT64, np.array([1], np.int64))))


def test_a_model_of_fixed_shapes_needs_no_key() -> None:
    assert RequestCheck(spec_of(IMAGE)).merge_key(request(IMAGE_1)) is None
