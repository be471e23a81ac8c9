"""Batch of a single request: the short path gives the same result as the general one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.batch import BatchPlan
from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.model_spec import (
    DynamicBatching,
    InputSpec,
    InstanceGroup,
    InstanceKind,
    ModelSpec,
    OutputSpec,
    QueuePolicy,
)
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, EdgeServerError

IN = InputSpec("IN", DType.FP32, (-1,))
OUTPUTS = {
    "OUT": OutputSpec("OUT", DType.FP32, (-1,)),
    "SUM": OutputSpec("SUM", DType.FP32, (1,)),
    "BENT": OutputSpec("BENT", DType.FP32, (3,), reshape=(3, 1)),
}
GROUPS = (InstanceGroup("m", InstanceKind.CPU, 1),)


def outcome(plan: BatchPlan, answers: dict[str, np.ndarray], asked: Request, rows: int, *, is_lone: bool) -> object:
    try:
        if is_lone:
            found = plan.scatter_one(answers, asked, rows)
        else:
            found = plan.scatter(answers, [asked], [rows])[0]
    except EdgeServerError as error:
        return type(error), error.message
    return [(tensor.name, tensor.dtype, tensor.array.shape, id(tensor.array.base)) for tensor in found]


shapes = {
    "OUT": st.sampled_from([(2, 3), (1, 3), (2, 3, 1), (3,)]),
    "SUM": st.sampled_from([(2, 1), (2, 2), (1, 1)]),
    "BENT": st.sampled_from([(2, 3, 1), (2, 3)]),
    "ELSE": st.just((2, 3)),
}


@given(
    declared=st.lists(st.sampled_from(sorted(OUTPUTS)), min_size=1, unique=True),
    answered=st.lists(st.sampled_from(sorted(shapes)), max_size=4, unique=True),
    asked=st.lists(st.sampled_from(sorted(OUTPUTS)), max_size=2, unique=True),
    data=st.data(),
)
def test_the_answer_to_a_single_request_is_that_of_a_batch_of_one(
    declared: list[str], answered: list[str], asked: list[str], data: st.DataObject
) -> None:
    plan = BatchPlan(ModelSpec("m", "stub", "", 8, (IN,), tuple(OUTPUTS[name] for name in declared), GROUPS))
    request = Request("m", {"IN": Tensor("IN", DType.FP32, np.zeros((2, 3), np.float32))}, outputs=tuple(asked))
    kinds = st.sampled_from([np.float32, np.float32, np.float32, np.int32])
    backing = {name: np.zeros(data.draw(shapes[name]), data.draw(kinds)) for name in answered}
    answers = {name: array[:] for name, array in backing.items()}
    one, several = (outcome(plan, answers, request, 2, is_lone=is_lone) for is_lone in (True, False))
    assert one == several
    assert plan.output_names_of(request) == plan.output_names([request])


@pytest.mark.parametrize(
    "item",
    [
        IN,
        InputSpec("IN", DType.FP32, (3,), reshape=(3, 1)),
        InputSpec("IN", DType.FP32, (-1,), allow_ragged_batch=True),
    ],
)
def test_the_inputs_of_a_single_request_are_those_of_a_batch_of_one(item: InputSpec) -> None:
    plan = BatchPlan(ModelSpec("m", "stub", "", 8, (item,), (OUTPUTS["OUT"],), GROUPS))
    request = Request("m", {"IN": Tensor("IN", DType.FP32, np.ones((1, 3), np.float32))})
    one, several = plan.gather_one(request), plan.gather([request])
    assert one.keys() == several.keys()
    np.testing.assert_array_equal(one["IN"], several["IN"])
    assert one["IN"].shape == several["IN"].shape


def test_a_single_answer_with_too_few_rows_is_refused() -> None:
    plan = BatchPlan(ModelSpec("m", "stub", "", 8, (IN,), (OUTPUTS["OUT"],), GROUPS))
    request = Request("m", {"IN": Tensor("IN", DType.FP32, np.ones((2, 3), np.float32))})
    with pytest.raises(BackendError, match=r"shape \[1, 3\]"):
        plan.scatter_one({"OUT": np.ones((1, 3), np.float32)}, request, 2)


batchings = st.one_of(
    st.none(),
    st.builds(
        DynamicBatching,
        st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True).map(lambda sizes: tuple(sorted(sizes))),
        max_queue_delay_us=st.sampled_from([0, 0, 0, 50]),
        priority_levels=st.sampled_from([0, 3]),
        default_priority_level=st.just(2),
        default_queue_policy=st.builds(
            QueuePolicy, default_timeout_us=st.sampled_from([0, 0, 7]), max_queue_size=st.sampled_from([0, 1])
        ),
    ),
)


@given(batching=batchings, rows=st.integers(1, 8), late_ns=st.integers(0, 20_000), priority=st.integers(0, 4))
def test_what_may_pass_an_empty_queue_would_be_taken_from_it_at_once(
    batching: DynamicBatching | None, rows: int, late_ns: int, priority: int
) -> None:
    queue: BatchQueue[str] = BatchQueue(8, batching, "m")
    queue.offer(QueueEntry(rows, None, 1_000_000, priority), "it")
    now_ns = 1_000_000 + late_ns
    taken = [] if queue.expire(now_ns) else queue.take(now_ns)
    assert taken == ["it"] or not queue.runs_single_requests
    if batching is None or not (batching.max_queue_delay_us or batching.default_queue_policy.default_timeout_us):
        assert queue.runs_single_requests
