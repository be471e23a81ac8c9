"""Shape tensors of models that batch: request values, model inputs, and outputs per client."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.core.batch import BatchPlan
from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.device_tensor import DeviceArray, DeviceTensor
from edge_server.core.ensemble_and_sequence_spec import BatchInput, BatchInputKind
from edge_server.core.model_spec import DynamicBatching, InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.request_check import RequestCheck
from edge_server.core.request_response import Request
from edge_server.core.shape_tensors import prepend_batch_size, repeat_values_per_row, replace_batch_size
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, InvalidRequest

X = InputSpec("X", DType.FP32, (-1,))
S = InputSpec("S", DType.INT64, (2,), is_shape_tensor=True)
Y = OutputSpec("Y", DType.FP32, (-1,))
N = OutputSpec("N", DType.INT64, (2,), is_shape_tensor=True)
GROUPS = (InstanceGroup("m", InstanceKind.GPU, 1, (0,)),)


def spec_of(
    *, inputs: tuple[InputSpec, ...] = (X, S), outputs: tuple[OutputSpec, ...] = (Y, N), limit: int = 8
) -> ModelSpec:
    return ModelSpec("m", "tensorrt", "", limit, inputs, outputs, GROUPS)


def values(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


def request(count: int, sizes: np.ndarray, first: float = 0, outputs: tuple[str, ...] = ()) -> Request:
    rows = np.arange(count * 3, dtype=np.float32).reshape(count, 3) + first
    return Request("m", {"X": Tensor("X", DType.FP32, rows), "S": Tensor("S", DType.INT64, sizes)}, outputs=outputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_values_come_without_a_batch_dimension_and_take_no_part_in_the_batch_size(rows: int) -> None:
    assert RequestCheck(spec_of()).count_items(request(rows, values(4, 6))) == rows


def test_the_order_of_inputs_does_not_change_the_batch_size() -> None:
    asked = request(5, values(4, 6))
    asked = Request("m", dict(reversed(asked.inputs.items())))
    assert list(asked.inputs) == ["S", "X"]
    assert RequestCheck(spec_of(inputs=(S, X))).count_items(asked) == 5
    assert BatchPlan(spec_of()).gather([asked])["S"].tolist() == [5, 4, 6]


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        (values(2, 4, 6), "3"),  # the batch size among the values, as Triton's guide has it and its code does not
        (values(4), "1"),
        (values(4, 6).reshape(1, 2), "1,2"),
        (values(4, 6, 4, 6).reshape(2, 2), "2,2"),
        (values(), "0"),
        (np.array(4, np.int64), ""),
    ],
)
def test_another_shape_is_refused_with_the_expected_one_and_the_reason(sizes: np.ndarray, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RequestCheck(spec_of()).count_items(request(2, sizes))
    assert caught.value.message == (
        "[request id: <id_unknown>] unexpected shape for input 'S' for model 'm'. Expected [2], got "
        f"[{shown}]. NOTE: it is a shape tensor: it is sent without a batch dimension and without the batch size, "
        "which the server puts before its values."
    )


def test_the_other_inputs_are_still_refused_for_their_own_batch_size() -> None:
    with pytest.raises(InvalidRequest, match=r"Expected \[-1,-1\], got \[3\].*the first dimension of every input"):
        RequestCheck(spec_of()).count_items(
            Request("m", {"X": Tensor("X", DType.FP32, np.zeros(3, "f4")), "S": Tensor("S", DType.INT64, values(1, 2))})
        )
    with pytest.raises(InvalidRequest, match="batch-size must be <= 8 for 'm', got 9"):
        RequestCheck(spec_of()).count_items(request(9, values(4, 6)))


def test_a_request_of_shape_tensors_alone_is_one_row() -> None:
    only = spec_of(inputs=(S,))
    asked = Request("m", {"S": Tensor("S", DType.INT64, values(4, 6))})
    assert RequestCheck(only).count_items(asked) == 1
    assert BatchPlan(only).gather([asked])["S"].tolist() == [1, 4, 6]
    assert BatchPlan(only).gather([asked, asked, asked])["S"].tolist() == [3, 4, 6]


def test_a_model_that_does_not_batch_is_given_its_values_as_they_are() -> None:
    spec = spec_of(inputs=(S,), outputs=(N,), limit=0)
    sizes = values(4, 6)
    asked = Request("m", {"S": Tensor("S", DType.INT64, sizes)})
    assert RequestCheck(spec).count_items(asked) == 1
    plan = BatchPlan(spec)
    assert plan.gather_one(asked)["S"] is sizes
    assert plan.scatter_one({"N": sizes}, asked, 1)[0].array is sizes


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2), st.integers(0, 1), st.integers(1, 2**40))
def test_requests_merge_exactly_when_all_values_are_equal(sizes: list[int], place: int, change: int) -> None:
    check = RequestCheck(spec_of())
    one = values(*sizes)
    other = one.copy()
    # A change of any byte, whatever zeros lie before it.
    other[place] = np.int64(int(other[place]) ^ change)
    key = check.merge_key(request(1, one))
    assert key == check.merge_key(request(4, one.copy(), first=9))
    assert key != check.merge_key(request(1, other))


def test_equal_values_do_not_merge_requests_of_other_shapes() -> None:
    check = RequestCheck(spec_of())
    narrow = Request(
        "m", {"X": Tensor("X", DType.FP32, np.zeros((1, 2), "f4")), "S": Tensor("S", DType.INT64, values(4, 6))}
    )
    assert check.merge_key(narrow) != check.merge_key(request(1, values(4, 6)))


def test_values_in_gpu_memory_share_no_batch() -> None:
    check = RequestCheck(spec_of())
    there = DeviceTensor("S", DType.INT64, DeviceArray(np.dtype("i8"), (2,), (values(4, 6),)))
    asked = Request("m", {**request(2, values(4, 6)).inputs, "S": there})
    assert check.count_items(asked) == 2
    assert check.merge_key(asked) != check.merge_key(asked)
    plan = BatchPlan(spec_of())
    assert plan.gather([asked])["S"].tolist() == [2, 4, 6]
    told = plan.gather_on_device([asked])["S"]
    assert isinstance(told, np.ndarray)
    assert told.tolist() == [2, 4, 6]


def test_the_batcher_joins_requests_of_equal_values_and_no_others() -> None:
    check = RequestCheck(spec_of())
    queue: BatchQueue[Request] = BatchQueue(8, DynamicBatching((8,)), "m")
    waiting = [(1, (4, 6)), (2, (4, 6)), (1, (4, 4)), (1, (4, 6)), (3, (4, 6)), (5, (4, 6))]
    for count, sizes in waiting:
        asked = request(count, values(*sizes))
        queue.offer(QueueEntry(check.count_items(asked), check.merge_key(asked), 0), asked)
    batches = []
    while queue.size:
        batches.append([(len(item.inputs["X"].array), tuple(item.inputs["S"].array)) for item in queue.take(10**12)])
    assert batches == [[(1, (4, 6)), (2, (4, 6))], [(1, (4, 4))], [(1, (4, 6)), (3, (4, 6))], [(5, (4, 6))]]


def as_the_model(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Y = X, N = S: the batch size first, as a model computes with it."""
    assert batch["S"].shape == (3,)
    assert batch["S"][0] == len(batch["X"])
    return {"Y": batch["X"].copy(), "N": batch["S"].astype(np.int64)}


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.tuples(st.integers(1, 99), st.integers(1, 99)),
    st.sampled_from([np.int32, np.int64]),
)
def test_each_request_gets_its_rows_and_its_values_once_a_row(
    counts: list[int], sizes: tuple[int, int], kind: type
) -> None:
    dtype = DType.INT32 if kind is np.int32 else DType.INT64
    plan = BatchPlan(spec_of(inputs=(X, InputSpec("S", dtype, (2,), is_shape_tensor=True)), limit=32))
    requests = [request(count, np.array(sizes, kind), first=100 * i) for i, count in enumerate(counts)]
    batch = plan.gather(requests)
    assert batch["S"].dtype == kind
    assert batch["S"].tolist() == [sum(counts), *sizes]
    for asked, count, answer in zip(requests, counts, plan.scatter(as_the_model(batch), requests, counts), strict=True):
        np.testing.assert_array_equal(answer[0].array, asked.inputs["X"].array)
        assert answer[1].array.tolist() == [list(sizes)] * count
        assert answer[1].array.flags.c_contiguous
        assert asked.inputs["S"].array.tolist() == list(sizes), "a client's tensor is not written to"


@pytest.mark.parametrize("outputs", [(), ("N",), ("Y", "N")])
def test_a_single_request_is_answered_as_one_of_many(outputs: tuple[str, ...]) -> None:
    plan = BatchPlan(spec_of())
    asked = request(3, values(4, 6), outputs=outputs)
    made = as_the_model(plan.gather_one(asked))
    wanted = plan.output_names_of(asked)
    answer = {item.name: item.array for item in plan.scatter_one({name: made[name] for name in wanted}, asked, 3)}
    assert list(answer) == list(wanted)
    assert answer["N"].tolist() == [[4, 6]] * 3


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (values(2, 4, 6), r"the values \[2, 4, 6\]"),
        (values(3, 4), r"the values \[3, 4\]"),
        (values(3, 4, 6, 8), r"the values \[3, 4, 6, 8\]"),
        (values(), r"the values \[\]"),
        (np.array(3, np.int64), "the values 3"),
        (np.full((3, 2), 4, np.int64), r"the values \[\[4, 4\]"),
        (np.zeros(400, np.int64), r"the shape \[400\]"),
    ],
)
def test_an_output_that_does_not_begin_with_the_batch_size_is_the_models_fault(made: np.ndarray, said: str) -> None:
    plan = BatchPlan(spec_of())
    asked = request(3, values(4, 6))
    words = rf"model 'm' answered shape tensor 'N' with {said}.*, but its .* the batch size 3 and then values of \[2\]"
    with pytest.raises(BackendError, match=words):
        plan.scatter_one({"Y": asked.inputs["X"].array, "N": made}, asked, 3)


def test_an_output_of_another_type_is_refused() -> None:
    plan = BatchPlan(spec_of())
    asked = request(1, values(4, 6))
    with pytest.raises(BackendError, match="elements of type int32, but its configuration promises INT64"):
        plan.scatter_one({"Y": asked.inputs["X"].array, "N": np.array([1, 4, 6], np.int32)}, asked, 1)


def test_values_go_beside_ragged_inputs_and_those_made_from_the_batch() -> None:
    flat = InputSpec("X", DType.FP32, (-1,), allow_ragged_batch=True)
    ends = BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, ("ENDS",), DType.INT32, ("X",))
    spec = ModelSpec("m", "tensorrt", "", 8, (flat, S), (Y,), GROUPS, batch_inputs=(ends,))
    batch = BatchPlan(spec).gather([request(1, values(4, 6)), request(2, values(4, 6))])
    assert {name: array.shape for name, array in batch.items()} == {"X": (9,), "S": (3,), "ENDS": (2,)}
    assert batch["S"].tolist() == [3, 4, 6]


def test_no_client_memory_on_a_gpu_is_offered_for_values() -> None:
    plan = BatchPlan(spec_of())
    asked = Request("m", request(1, values(4, 6)).inputs, targets={"Y": object(), "N": object()})  # type: ignore[dict-item]
    assert list(plan.targets([asked])) == ["Y"]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8))
def test_values_survive_being_counted_again(sizes: list[int], rows: int, others: int) -> None:
    whole = prepend_batch_size(values(*sizes), rows)
    moved = replace_batch_size(whole, rows, others)
    assert moved.tolist() == [others, *sizes]
    assert replace_batch_size(moved, others + 1, rows) is moved, (
        "what does not tell that batch size stays to be refused"
    )
    found = repeat_values_per_row(moved, (len(sizes),), others)
    assert found is not None
    assert found.tolist() == [sizes] * others
    free = repeat_values_per_row(moved, (-1,), others)
    assert free is not None
    assert free.tolist() == found.tolist()
    assert repeat_values_per_row(moved, (len(sizes) + 1,), others) is None
