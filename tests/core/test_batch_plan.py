"""Batch plan: gather and scatter, with and without reshape, and errors for wrong outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError

IN = InputSpec("IN", DType.FP32, (-1,))
OUT = OutputSpec("OUT", DType.FP32, (-1,))
SUM = OutputSpec("SUM", DType.FP32, (1,))
GROUPS = (InstanceGroup("m", InstanceKind.CPU, 1),)


def plan_of(*outputs: OutputSpec, inputs: tuple[InputSpec, ...] = (IN,), max_batch_size: int = 8) -> BatchPlan:
    return BatchPlan(ModelSpec("m", "stub", "", max_batch_size, inputs, outputs, GROUPS))


def request(array: np.ndarray, *outputs: str) -> Request:
    return Request("m", {"IN": Tensor("IN", DType.FP32, array)}, outputs=outputs)


def rows(count: int, width: int = 3, first: float = 0) -> np.ndarray:
    return (np.arange(count * width, dtype=np.float32) + first).reshape(count, width)


def test_a_single_request_is_gathered_and_scattered_without_a_copy() -> None:
    array = rows(2)
    plan = plan_of(OUT)
    given = request(array)
    assert plan.gather([given])["IN"] is array
    answer = plan.scatter({"OUT": array}, [given], [2])[0]
    assert answer[0].array is array


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_gathered_rows_are_scattered_to_their_requests(counts: list[int]) -> None:
    plan = plan_of(OUT)
    requests = [request(rows(count, first=100 * index)) for index, count in enumerate(counts)]
    answers = plan.scatter({"OUT": plan.gather(requests)["IN"]}, requests, counts)
    for asked, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer[0].array, asked.inputs["IN"].array)


UNSURE = OutputSpec("OUT", DType.FP32, (4,), may_differ=True)


def test_an_output_whose_shape_is_only_declared_is_answered_as_it_is_with_one_note() -> None:
    plan = plan_of(UNSURE)
    wide = rows(3, width=8)
    answers = plan.scatter({"OUT": wide}, [request(rows(1)), request(rows(2))], [1, 2])
    assert [answer[0].shape for answer in answers] == [(1, 8), (2, 8)]
    assert plan.scatter_one({"OUT": wide[:, :, None]}, request(rows(3)), 3)[0].shape == (3, 8, 1)
    (note,) = plan.output_notes.values()
    assert note.startswith("output 'OUT' was answered with shape [3, 8], where the metadata says [3, 4]")


def test_an_output_of_the_declared_shape_leaves_no_note() -> None:
    plan = plan_of(UNSURE)
    assert plan.scatter_one({"OUT": rows(2, width=4)}, request(rows(2)), 2)[0].shape == (2, 4)
    assert plan.output_notes == {}


def test_an_output_whose_shape_is_only_declared_still_needs_the_items_of_the_batch() -> None:
    for wrong in (rows(2, width=4), np.float32(0).reshape(())):
        with pytest.raises(BackendError, match="answered output 'OUT' with shape"):
            plan_of(UNSURE).scatter({"OUT": wrong}, [request(rows(1)), request(rows(2))], [1, 2])


def test_the_answers_of_a_batch_are_views_of_its_output() -> None:
    output = rows(3)
    answers = plan_of(OUT).scatter({"OUT": output}, [request(rows(1)), request(rows(2))], [1, 2])
    assert all(np.shares_memory(answer[0].array, output) for answer in answers)
    assert [answer[0].shape for answer in answers] == [(1, 3), (2, 3)]


def test_strings_of_several_requests_are_joined() -> None:
    plan = plan_of(OutputSpec("OUT", DType.BYTES, (1,)), inputs=(InputSpec("IN", DType.BYTES, (1,)),))
    requests = [
        Request("m", {"IN": Tensor("IN", DType.BYTES, np.array([[word]], dtype=object))}) for word in (b"a", b"long")
    ]
    assert plan.gather(requests)["IN"].tolist() == [[b"a"], [b"long"]]


def test_the_outputs_computed_are_the_union_of_those_asked_for() -> None:
    table = [
        ([(), ("SUM",)], ("OUT", "SUM")),
        ([("SUM",), ("SUM",)], ["SUM"]),
        ([("SUM",), ("OUT",)], ["OUT", "SUM"]),
        ([("SUM", "OUT")], ["OUT", "SUM"]),
        ([()], ("OUT", "SUM")),
    ]
    assert [
        (asked, plan_of(OUT, SUM).output_names([request(rows(1), *names) for names in asked])) for asked, _ in table
    ] == table


def test_each_request_gets_only_what_it_asked_for_in_model_order() -> None:
    outputs = {"SUM": rows(2, 1), "OUT": rows(2)}
    answers = plan_of(OUT, SUM).scatter(outputs, [request(rows(1), "SUM"), request(rows(1))], [1, 1])
    assert [[item.name for item in answer] for answer in answers] == [["SUM"], ["OUT", "SUM"]]


@pytest.mark.parametrize(
    ("dims", "reshape", "given", "seen"),
    [
        ((1,), (), (5, 1), (5,)),
        ((6,), (2, 3), (5, 6), (5, 2, 3)),
        ((-1,), (-1, 1), (5, 4), (5, 4, 1)),
        ((-1, 4, -1), (4, -1, -1, 1), (2, 3, 4, 5), (2, 4, 3, 5, 1)),
    ],
)
def test_reshape_gives_the_runtime_its_own_shape_and_clients_theirs(
    dims: tuple[int, ...], reshape: tuple[int, ...], given: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    plan = plan_of(OutputSpec("OUT", DType.FP32, dims, reshape), inputs=(InputSpec("IN", DType.FP32, dims, reshape),))
    array = np.zeros(given, np.float32)
    batch = plan.gather([request(array)])
    assert batch["IN"].shape == seen
    assert plan.scatter({"OUT": batch["IN"]}, [request(array)], [given[0]])[0][0].shape == given


def test_reshape_works_without_a_batch_dimension() -> None:
    plan = plan_of(
        OutputSpec("OUT", DType.FP32, (-1,), (1, -1)),
        inputs=(InputSpec("IN", DType.FP32, (-1,), (1, -1)),),
        max_batch_size=0,
    )
    array = np.zeros(7, np.float32)
    assert plan.gather([request(array)])["IN"].shape == (1, 7)
    assert plan.scatter({"OUT": np.zeros((1, 9), np.float32)}, [request(array)], [1])[0][0].shape == (9,)


def test_an_optional_input_that_is_left_out_is_not_reshaped() -> None:
    optional = InputSpec("HINT", DType.FP32, (1,), (), is_optional=True)
    assert list(plan_of(OUT, inputs=(IN, optional)).gather([request(rows(1))])) == ["IN"]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"OUT": rows(3)}, r"output 'OUT' with shape \[3, 3\], but its configuration promises \[2, -1\]"),
        ({"OUT": np.float32(1) * np.ones(())}, r"with elements of type float64"),
        ({"OUT": np.ones((), np.float32)}, r"with shape \[\]"),
        ({"OUT": rows(2)[:, :, None]}, r"with shape \[2, 3, 1\]"),
        ({"OUT": rows(2).astype(np.float64)}, "elements of type float64, but its configuration promises FP32"),
        ({}, "did not answer output 'OUT'"),
        ({"OUT": rows(2), "MORE": rows(2)}, "answered an output 'MORE' that it does not declare"),
    ],
)
def test_wrong_outputs_are_a_backend_error_that_names_the_configured_ones(
    outputs: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(BackendError, match=words):
        plan_of(OUT).scatter(outputs, [request(rows(1)), request(rows(1))], [1, 1])


def test_a_response_of_a_stream_may_have_any_number_of_rows_and_some_of_the_outputs() -> None:
    plan = plan_of(OUT, SUM)
    assert [item.shape for item in plan.answer({"OUT": rows(5)}, request(rows(1)))] == [(5, 3)]
    with pytest.raises(BackendError, match="does not declare"):
        plan.answer({"NO": rows(1)}, request(rows(1)))


def test_a_single_response_keeps_its_type_and_shape_but_for_an_output_with_a_reshape() -> None:
    notes: list[str] = []
    plan = BatchPlan(plan_of(OUT, OutputSpec("FLAT", DType.FP32, (2, 2), reshape=(4,))).spec, notes.append)
    for _ in range(2):
        (tensor,) = plan.answer({"OUT": rows(1, 2).astype(np.int64)[0]}, request(rows(1)))
        assert (tensor.dtype, tensor.shape) == (DType.INT64, (2,))
    assert notes == list(plan.output_notes.values())
    (note,) = notes
    assert note.startswith("output 'OUT' was answered as INT64 [2], but its configuration promises FP32 [-1, -1]")
    for wrong in (rows(1).astype(">f4"), rows(1).astype(np.complex64), np.array([["text"]])):
        with pytest.raises(BackendError, match="with elements of type"):
            plan.answer({"OUT": wrong}, request(rows(1)))
    assert plan.answer({"FLAT": rows(1, 4)}, request(rows(1)))[0].shape == (1, 2, 2)
    with pytest.raises(BackendError, match=r"answered output 'FLAT' with shape \[1, 3\], .* promises \[-1, 4\]"):
        plan.answer({"FLAT": rows(1, 3)}, request(rows(1)))
