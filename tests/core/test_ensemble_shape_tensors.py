"""Shape tensors in ensembles: allowed and rejected sources, and the inputs that a step gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_server.core.ensemble_and_sequence_spec import Ensemble, EnsembleStep
from edge_server.core.ensemble_check import build_step_graph
from edge_server.core.ensemble_graph import StepGraph, StepInput
from edge_server.core.ensemble_run import step_input_tensor
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, BadModelConfig

X, Y = InputSpec("X", DType.FP32, (-1,)), OutputSpec("Y", DType.FP32, (-1,))
S = InputSpec("S", DType.INT64, (2,), is_shape_tensor=True)
N = OutputSpec("N", DType.INT64, (2,), is_shape_tensor=True)


def model(name: str, inputs: Any = (X, S), outputs: Any = (Y, N), *, batch: int = 8, **more: Any) -> ModelSpec:
    return ModelSpec(name, "stub", "", batch, inputs, outputs, (), **more)


def ensemble(inputs: Any, outputs: Any, *steps: Any, batch: int = 8) -> ModelSpec:
    """Steps are (model, {input: tensor}, {output: tensor})."""
    made = tuple(EnsembleStep(name, None, feeds, makes) for name, feeds, makes in steps)
    return model("e", inputs, outputs, batch=batch, ensemble=Ensemble(made))


def graph_of(spec: ModelSpec, *members: ModelSpec) -> StepGraph:
    known = {member.name: member for member in members}
    assert spec.ensemble is not None
    return build_step_graph(spec, [known[step.model] for step in spec.ensemble.steps])


RESIZE = model("resize")
PLAIN = model("plain", (InputSpec("X", DType.INT64, (2,)),), (OutputSpec("Y", DType.INT64, (2,)),))
ALONE = model("alone", (InputSpec("X", DType.INT64, (2,)),), (OutputSpec("Y", DType.INT64, (2,)),), batch=0)


def values_input(dims: tuple[int, ...] = (2,), *, is_marked: bool = False, dtype: DType = DType.INT64) -> InputSpec:
    return InputSpec("S", dtype, dims, is_shape_tensor=is_marked)


def resizing(size: InputSpec, *, batch: int) -> ModelSpec:
    """An ensemble of one step, the size an input of it."""
    frame = InputSpec("X", DType.FP32, (-1,) if batch else (-1, -1))
    made = OutputSpec("Y", DType.FP32, (-1,) if batch else (-1, -1))
    return ensemble((frame, size), (made,), ("resize", {"X": "X", "S": "S"}, {"Y": "Y"}), batch=batch)


def size_of(graph: StepGraph, step: int = 0) -> StepInput:
    return next(feed for feed in graph.steps[step].inputs if feed.input == "S")


@pytest.mark.parametrize(
    ("size", "batch"),
    [
        (values_input(is_marked=True), 8),
        (values_input(), 0),
        (values_input(is_marked=True), 0),
        (values_input((-1,)), 0),
    ],
    ids=["marked by an ensemble that batches", "of one that does not", "marked there", "of any number"],
)
def test_values_without_a_batch_dimension_are_taken_as_they_are(size: InputSpec, batch: int) -> None:
    feed = size_of(graph_of(resizing(size, batch=batch), RESIZE))
    assert (feed.is_values, feed.rank) == (True, 1)
    sent = Tensor("S", DType.INT64, np.array([4, 6]))
    assert step_input_tensor(sent, feed) is sent
    assert step_input_tensor(Tensor("other", DType.INT64, sent.array), feed).array is sent.array


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_what_a_step_is_given_is_what_its_model_takes_from_a_client(rows: int) -> None:
    spec = ensemble(
        (X, values_input(is_marked=True)),
        (Y,),
        ("resize", {"X": "X", "S": "S"}, {"N": "made"}),
        ("resize", {"X": "X", "S": "made"}, {"Y": "Y"}),
    )
    graph = graph_of(spec, RESIZE)
    given = Request(
        "e",
        {
            "X": Tensor("X", DType.FP32, np.zeros((rows, 3), np.float32)),
            "S": Tensor("S", DType.INT64, np.array([4, 6])),
        },
    )
    assert RequestCheck(spec).count_items(given) == rows
    tensors = {**given.inputs, "made": Tensor("N", DType.INT64, np.array([[4, 6]] * rows))}
    for step in graph.steps:
        asked = Request(step.model, {feed.input: step_input_tensor(tensors[feed.tensor], feed) for feed in step.inputs})
        assert RequestCheck(RESIZE).count_items(asked) == rows
        assert asked.inputs["S"].array.tolist() == [4, 6]


def test_a_member_that_does_not_batch_may_make_the_values() -> None:
    spec = ensemble(
        (InputSpec("X", DType.FP32, (-1, -1)), values_input()),
        (OutputSpec("Y", DType.FP32, (-1, -1)),),
        ("alone", {"X": "S"}, {"Y": "size"}),
        ("resize", {"X": "X", "S": "size"}, {"Y": "Y"}),
        batch=0,
    )
    feed = size_of(graph_of(spec, RESIZE, ALONE), 1)
    assert step_input_tensor(Tensor("Y", DType.INT64, np.array([4, 6])), feed).array.tolist() == [4, 6]


def test_a_model_that_does_not_batch_takes_its_shape_tensors_as_any_tensor() -> None:
    spec = ensemble((X, values_input()), (Y,), ("resize", {"X": "X", "S": "S"}, {"Y": "Y"}))
    feed = size_of(graph_of(spec, model("resize", batch=0)))
    assert (feed.is_values, feed.rank) == (False, 1)
    assert step_input_tensor(Tensor("S", DType.INT64, np.array([[4, 6]])), feed).array.tolist() == [4, 6]


def refusal(spec: ModelSpec, *members: ModelSpec) -> str:
    with pytest.raises(BadModelConfig) as caught:
        graph_of(spec, *members)
    return caught.value.message


def test_rows_that_may_differ_are_refused_with_what_may_come_instead() -> None:
    assert refusal(resizing(values_input(), batch=8), RESIZE) == (
        "ensemble 'e': step 1 (model 'resize'): input 'S' takes tensor 'S' of shape [-1, 2] (input 'S' of the "
        "ensemble), whose rows may differ, but it is a shape tensor of a model that batches: expected values of [2] "
        "without a batch dimension, from a model that does not batch, a shape tensor of another model, or an input of "
        "the ensemble with is_shape_tensor: true"
    )
    spec = ensemble(
        (X, values_input()),
        (Y,),
        ("plain", {"X": "S"}, {"Y": "size"}),
        ("resize", {"X": "X", "S": "size"}, {"Y": "Y"}),
    )
    words = refusal(spec, RESIZE, PLAIN)
    assert "step 2 (model 'resize'): input 'S' takes tensor 'size' of shape [-1, 2] (output 'Y' of step 1" in words
    assert "whose rows may differ" in words


@pytest.mark.parametrize(
    ("size", "batch", "said"),
    [
        (values_input((3,), is_marked=True), 8, "of shape [3] (input 'S' of the ensemble), but the model expects val"),
        (values_input((3,)), 0, "of shape [3] (input 'S' of the ensemble), but the model expects values of its shape"),
        (values_input((-1, 2)), 0, "of shape [-1, 2] (input 'S' of the ensemble), but the model expects values of"),
        (values_input((1, 2)), 0, "of shape [1, 2] (input 'S' of the ensemble), but the model expects values of its"),
        (values_input(is_marked=True, dtype=DType.INT32), 8, "a TYPE_INT32 (input 'S' of the ensemble), but the model"),
    ],
    ids=["too many", "too many without rows", "with a batch dimension", "with one row", "another type"],
)
def test_other_shapes_and_types_are_refused_with_both(size: InputSpec, batch: int, said: str) -> None:
    words = refusal(resizing(size, batch=batch), RESIZE)
    assert "step 1 (model 'resize'): input 'S' takes tensor 'S'" in words
    assert said in words


def test_rows_of_another_models_values_are_refused_where_these_are_not_as_many() -> None:
    longer = model("longer", (X, S), (Y, OutputSpec("N", DType.INT64, (3,), is_shape_tensor=True)))
    spec = ensemble(
        (X, values_input(is_marked=True)),
        (Y,),
        ("longer", {"X": "X", "S": "S"}, {"N": "made"}),
        ("resize", {"X": "X", "S": "made"}, {"Y": "Y"}),
    )
    words = refusal(spec, RESIZE, longer)
    assert "of shape [-1, 3] (output 'N' of step 1" in words
    assert "but the model expects rows of the values of its shape tensor, [2]" in words


def test_an_output_is_marked_only_where_a_member_makes_a_shape_tensor() -> None:
    steps = ("resize", {"X": "X", "S": "S"}, {"Y": "Y", "N": "N"})
    graph_of(ensemble((X, values_input(is_marked=True)), (Y, N), steps), RESIZE)
    plain = ensemble(
        (X, values_input(is_marked=True), InputSpec("P", DType.INT64, (2,))),
        (Y, N),
        ("resize", {"X": "X", "S": "S"}, {"Y": "Y"}),
        ("plain", {"X": "P"}, {"Y": "N"}),
    )
    words = refusal(plain, RESIZE, PLAIN)
    assert "output 'N' is_shape_tensor: expected false, for output 'Y' of step 2 (model 'plain') is no shape" in words


def test_an_ensemble_of_an_ensemble_hands_the_values_on() -> None:
    inner = model("inner", (X, S), (Y, N))
    spec = ensemble((X, values_input(is_marked=True)), (Y,), ("inner", {"X": "X", "S": "S"}, {"Y": "Y"}))
    assert size_of(graph_of(spec, inner)).is_values


@pytest.mark.parametrize("rows", [[[4, 6], [4, 7]], [[4, 6], [4, 6], [5, 6]], []], ids=["two", "three", "none"])
def test_rows_without_values_in_common_fail_the_request(rows: list[list[int]]) -> None:
    """As a decoupled member can answer them, whose responses have any number of rows."""
    given = Tensor("N", DType.INT64, np.array(rows, np.int64).reshape(-1, 2))
    with pytest.raises(BackendError) as caught:
        step_input_tensor(given, StepInput("S", "made", rank=1, is_values=True))
    assert caught.value.message == (
        "input 'S' is a shape tensor of a model that batches: expected rows of equal values in tensor 'made', "
        f"given {rows}"
    )
