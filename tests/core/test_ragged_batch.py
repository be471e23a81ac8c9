"""Ragged batches: flattened inputs, batch inputs, and outputs split per request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.batch import BatchPlan
from edge_server.core.ensemble_and_sequence_spec import BatchInput, BatchInputKind, BatchOutput
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.ragged_batch import join_flat, make_batch_input, ragged_output_shape, split_by_shapes
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, InvalidRequest

Kind = BatchInputKind
SHAPES = [(1, 3), (2, 4), (1, 1)]
GROUPS = (InstanceGroup("m", InstanceKind.CPU, 1),)

shapes_of_a_batch = st.integers(1, 3).flatmap(
    lambda rank: st.lists(st.tuples(*[st.integers(1, 4)] * (rank + 1)), min_size=1, max_size=6)
)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Kind.ELEMENT_COUNT, [3, 8, 1]),
        (Kind.ACCUMULATED_ELEMENT_COUNT, [3, 11, 12]),
        (Kind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, [0, 3, 11, 12]),
        (Kind.ITEM_SHAPE, [[3], [4], [4], [1]]),
        (Kind.ITEM_SHAPE_FLATTEN, [3, 4, 4, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [DType.INT32, DType.FP32])
def test_an_input_made_from_the_batch_holds_what_its_kind_says(kind: Kind, wanted: list[int], dtype: DType) -> None:
    made = make_batch_input(kind, dtype, SHAPES)
    assert made.dtype == dtype.numpy
    assert made.tolist() == wanted


def test_the_largest_count_is_reported_by_a_shape() -> None:
    assert make_batch_input(Kind.MAX_ELEMENT_COUNT_AS_SHAPE, DType.FP32, SHAPES).shape == (8,)


def test_the_example_of_the_protocol_definition_comes_out_as_written_there() -> None:
    shapes = [(2, 3, 1), (1, 2, 2)]
    assert make_batch_input(Kind.ITEM_SHAPE, DType.INT32, shapes).tolist() == [[3, 1], [3, 1], [2, 2]]
    assert make_batch_input(Kind.ITEM_SHAPE_FLATTEN, DType.INT32, shapes).tolist() == [3, 1, 3, 1, 2, 2]


def test_more_elements_than_int32_holds_are_refused_rather_than_wrapped() -> None:
    with pytest.raises(BackendError, match="INT32"):
        make_batch_input(Kind.ACCUMULATED_ELEMENT_COUNT, DType.INT32, [(1, 2**30), (1, 2**30)])
    assert make_batch_input(Kind.ELEMENT_COUNT, DType.INT32, [(1, 2**31 - 1)]).tolist() == [2**31 - 1]


@given(shapes_of_a_batch)
def test_flattened_arrays_are_split_into_the_same_arrays_again(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.random.default_rng(place).integers(0, 99, shape) for place, shape in enumerate(shapes)]
    flat = join_flat(arrays)
    assert flat.ndim == 1
    parts = split_by_shapes(flat, shapes)
    assert parts is not None
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part, array)


@given(shapes_of_a_batch)
def test_the_accumulated_counts_are_the_ends_of_the_requests_in_the_flat_input(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.full(shape, place) for place, shape in enumerate(shapes)]
    flat = join_flat(arrays)
    bounds = make_batch_input(Kind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, DType.INT32, shapes)
    counts = make_batch_input(Kind.ELEMENT_COUNT, DType.INT32, shapes)
    ends = make_batch_input(Kind.ACCUMULATED_ELEMENT_COUNT, DType.INT32, shapes)
    np.testing.assert_array_equal(np.diff(bounds), counts)
    np.testing.assert_array_equal(bounds[1:], ends)
    assert ends[-1] == len(flat)
    for place in range(len(shapes)):
        assert set(flat[bounds[place] : bounds[place + 1]].tolist()) == {place}


@given(shapes_of_a_batch, st.integers(-3, 3).filter(bool))
def test_a_flat_output_of_another_size_is_not_cut(shapes: list[tuple[int, ...]], excess: int) -> None:
    total = sum(int(np.prod(shape)) for shape in shapes)
    assert split_by_shapes(np.zeros(max(0, total + excess)), shapes) is None or total + excess < 0


def test_a_single_array_is_laid_flat_without_a_copy() -> None:
    array = np.arange(6).reshape(2, 3)
    assert np.shares_memory(join_flat([array]), array)


def test_an_output_takes_the_free_dimensions_and_the_rows_from_its_source() -> None:
    assert ragged_output_shape((-1, 7), (2, 5, 9)) == (2, 5, 7)
    assert ragged_output_shape((3,), (2, 5, 9)) == (2, 3)


def ragged_spec(*outputs: OutputSpec, cuts: tuple[str, ...] = ("EACH",)) -> ModelSpec:
    inputs = (
        InputSpec("VALUES", DType.FP32, (-1,), allow_ragged_batch=True),
        InputSpec("BIAS", DType.FP32, (1,)),
    )
    made = (
        BatchInput(Kind.ACCUMULATED_ELEMENT_COUNT, ("ENDS", "ENDS_AGAIN"), DType.INT32, ("VALUES",)),
        BatchInput(Kind.ELEMENT_COUNT, ("BIASES",), DType.FP32, ("BIAS",)),
    )
    cut_by = (BatchOutput(cuts, ("VALUES",)),) if cuts else ()
    return ModelSpec("m", "stub", "", 8, inputs, outputs, GROUPS, batch_inputs=made, batch_outputs=cut_by)


EACH = OutputSpec("EACH", DType.FP32, (-1,))
SUM = OutputSpec("SUM", DType.FP32, (1,))


def request(rows: int, width: int, bias: float, *outputs: str) -> Request:
    values = np.full((rows, width), bias, np.float32) + np.arange(width, dtype=np.float32)
    tensors = (
        Tensor("VALUES", DType.FP32, values),
        Tensor("BIAS", DType.FP32, np.full((rows, 1), bias, np.float32)),
    )
    return Request("m", {tensor.name: tensor for tensor in tensors}, outputs=outputs)


def test_a_batch_of_ragged_requests_has_flat_and_stacked_and_made_inputs() -> None:
    batch = BatchPlan(ragged_spec(EACH)).gather([request(1, 2, 10), request(2, 3, 20)])
    assert batch["VALUES"].tolist() == [10, 11, 20, 21, 22, 20, 21, 22]
    assert batch["BIAS"].tolist() == [[10], [20], [20]]
    assert batch["ENDS"].tolist() == batch["ENDS_AGAIN"].tolist() == [2, 8]
    assert batch["BIASES"].tolist() == [1, 2]


def test_a_single_ragged_request_is_laid_flat_as_well() -> None:
    batch = BatchPlan(ragged_spec(EACH)).gather([request(2, 3, 0)])
    assert batch["VALUES"].shape == (6,)
    assert batch["BIAS"].shape == (2, 1)
    assert batch["ENDS"].tolist() == [6]


def test_outputs_are_cut_by_their_source_and_the_others_by_rows() -> None:
    plan = BatchPlan(ragged_spec(EACH, SUM))
    requests = [request(1, 2, 10), request(2, 3, 20, "EACH"), request(1, 1, 30, "SUM")]
    batch = plan.gather(requests)
    sums = np.array([[1], [2], [3], [4]], np.float32)
    answers = plan.scatter({"EACH": batch["VALUES"], "SUM": sums}, requests, [1, 2, 1])
    assert [[tensor.name for tensor in answer] for answer in answers] == [["EACH", "SUM"], ["EACH"], ["SUM"]]
    assert answers[0][0].array.tolist() == [[10, 11]]
    assert answers[1][0].array.tolist() == [[20, 21, 22], [20, 21, 22]]
    assert answers[2][0].array.tolist() == [[4]]
    assert np.shares_memory(answers[1][0].array, batch["VALUES"])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"EACH": np.zeros(7, np.float32)}, "output 'EACH' with 7 elements, but by the shapes of input 'VALUES'"),
        ({"EACH": np.zeros(8, np.float64)}, "float64, but its configuration promises FP32"),
        ({"OTHER": np.zeros(8, np.float32)}, "an output 'OTHER' that it does not declare"),
        ({}, "did not answer output 'EACH'"),
    ],
)
def test_a_cut_that_does_not_fit_is_the_backends_fault(outputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        BatchPlan(ragged_spec(EACH)).scatter(outputs, [request(1, 2, 0), request(2, 3, 0)], [1, 2])


def test_requests_merge_whatever_the_shape_of_their_ragged_inputs() -> None:
    check = RequestCheck(ragged_spec(EACH))
    assert check.merge_key(request(1, 2, 0)) == check.merge_key(request(2, 9, 0))


def test_requests_that_differ_in_an_input_that_is_not_ragged_do_not_merge() -> None:
    inputs = (InputSpec("A", DType.INT32, (-1,), allow_ragged_batch=True), InputSpec("B", DType.INT32, (-1,)))
    check = RequestCheck(ModelSpec("m", "stub", "", 8, inputs, (EACH,), GROUPS))

    def key(a: int, b: int) -> object:
        tensors = {
            name: Tensor(name, DType.INT32, np.zeros((1, size), np.int32)) for name, size in (("A", a), ("B", b))
        }
        return check.merge_key(Request("m", tensors))

    assert key(1, 5) == key(2, 5)
    assert key(1, 5) != key(1, 6)


def test_ragged_inputs_of_a_model_without_batches_stay_as_they_are() -> None:
    inputs = (InputSpec("A", DType.INT32, (-1, -1), allow_ragged_batch=True),)
    spec = ModelSpec("m", "stub", "", 0, inputs, (EACH,), GROUPS)
    array = np.zeros((2, 3), np.int32)
    given_request = Request("m", {"A": Tensor("A", DType.INT32, array)})
    assert BatchPlan(spec).gather([given_request])["A"] is array


@pytest.mark.parametrize("shape", [(1, 2**31, 0), (1, 0, 2**40), (1, 2**62, 0)])
def test_sizes_that_int32_does_not_hold_are_refused_before_they_cost_a_batch(shape: tuple[int, ...]) -> None:
    """Without elements such a shape takes no memory, so any client may send it."""
    ragged = InputSpec("X", DType.INT8, (-1, -1), allow_ragged_batch=True)
    told = BatchInput(Kind.ITEM_SHAPE, ("SHAPES",), DType.INT32, ("X",))
    spec = ModelSpec("m", "stub", "", 8, (ragged,), (OutputSpec("Y", DType.INT8, (-1,)),), GROUPS, batch_inputs=(told,))
    request = Request("m", {"X": Tensor("X", DType.INT8, np.zeros(shape, np.int8))})
    with pytest.raises(InvalidRequest, match=rf"input 'X' for model 'm' has the shape \[1, .* at most {2**31 - 1}"):
        RequestCheck(spec).count_items(request)
    request.inputs = {"X": Tensor("X", DType.INT8, np.zeros((1, 2**31 - 1, 0), np.int8))}
    assert RequestCheck(spec).count_items(request) == 1
