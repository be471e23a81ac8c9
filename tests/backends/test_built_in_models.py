"""Built-in models identity, square, repeat and stub."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, RequestSession, Session
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, BadModelConfig, EdgeServerError, InvalidRequest, LoadError, SessionLost

Job = Callable[..., Any]
LONG_MS = 3_600_000


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    return ModelFile(tmp_path / "made" / "1", tmp_path / "made", 1)


class Answers:
    """An execution that keeps what it is answered."""

    def __init__(self, **inputs: np.ndarray) -> None:
        types = {"i": DType.INT32, "u": DType.UINT32}
        tensors = {name: Tensor(name, types[array.dtype.kind], array) for name, array in inputs.items()}
        self.request = Request("made", tensors)
        self.sent: list[dict[str, list[int]]] = []
        self.first = threading.Event()
        self.closed = threading.Event()
        self.cancelled = threading.Event()
        self.closings = 0
        self.error: EdgeServerError | None = None

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def send(self, outputs: Mapping[str, np.ndarray], *, is_final: bool = False) -> None:
        self.sent.append({name: array.tolist() for name, array in outputs.items()})
        self.first.set()
        if is_final:
            self.finish()

    def fail(self, error: EdgeServerError) -> None:
        self.error = error
        self.finish()

    def finish(self) -> None:
        self.closings += 1
        self.closed.set()

    def reschedule(self) -> None:
        raise AssertionError("none of them is iterative")


def repeat_request(values: list[int], delays_ms: list[int], wait_ms: int = 0) -> Answers:
    return Answers(
        IN=np.array(values, dtype="i4"), DELAY=np.array(delays_ms, dtype="u4"), WAIT=np.array([wait_ms], dtype="u4")
    )


@pytest.fixture
def repeat(file: ModelFile, job: Job) -> Iterator[RequestSession]:
    inputs = (
        InputSpec("IN", DType.INT32, (-1,)),
        InputSpec("DELAY", DType.UINT32, (-1,)),
        InputSpec("WAIT", DType.UINT32, (1,)),
    )
    outputs = (OutputSpec("OUT", DType.INT32, (1,)), OutputSpec("IDX", DType.UINT32, (1,)))
    session = load_backend("repeat").open(job(file, inputs=inputs, outputs=outputs, is_decoupled=True))
    assert isinstance(session, RequestSession)
    yield session
    session.close()


@pytest.fixture
def square(file: ModelFile, job: Job) -> Iterator[RequestSession]:
    inputs, outputs = (InputSpec("IN", DType.INT32, (1,)),), (OutputSpec("OUT", DType.INT32, (1,)),)
    session = load_backend("square").open(job(file, inputs=inputs, outputs=outputs, is_decoupled=True))
    assert isinstance(session, RequestSession)
    yield session
    session.close()


def test_repeat_sends_each_element_in_order_and_then_closes(repeat: RequestSession) -> None:
    execution = repeat_request([7, -8, 9], [1, 0, 2])
    repeat.execute([execution])
    assert execution.closed.wait(30)
    assert execution.sent == [{"OUT": [v], "IDX": [i]} for i, v in enumerate([7, -8, 9])]
    assert (execution.error, execution.closings) == (None, 1)


def test_repeat_without_elements_closes_without_a_response(repeat: RequestSession) -> None:
    execution = repeat_request([], [])
    repeat.execute([execution])
    assert execution.closed.wait(30)
    assert (execution.sent, execution.closings) == ([], 1)


def test_repeat_streams_several_requests_at_once(repeat: RequestSession) -> None:
    slow, quick = repeat_request([1], [LONG_MS]), repeat_request([2, 3], [0, 0])
    repeat.execute([slow, quick])
    assert quick.closed.wait(30)
    assert not slow.closed.is_set()
    slow.cancelled.set()
    assert slow.closed.wait(30)
    assert slow.sent == []


def test_a_cancelled_execution_stops_waiting_and_closes_once(repeat: RequestSession) -> None:
    execution = repeat_request([1, 2, 3], [0, LONG_MS, 0], wait_ms=LONG_MS)
    caller = threading.Thread(target=repeat.execute, args=([execution],))
    caller.start()
    assert execution.first.wait(30)
    execution.cancelled.set()
    caller.join(30)
    assert not caller.is_alive()
    assert execution.closed.wait(30)
    assert execution.sent == [{"OUT": [1], "IDX": [0]}]
    assert execution.closings == 1


def test_closing_fails_open_requests_and_joins_the_thread(repeat: RequestSession) -> None:
    execution = repeat_request([1], [LONG_MS])
    repeat.execute([execution])
    repeat.close()
    assert isinstance(execution.error, SessionLost)
    assert execution.closings == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "made-responses"]


def test_repeat_refuses_inconsistent_inputs(repeat: RequestSession) -> None:
    execution = repeat_request([1, 2], [0])
    repeat.execute([execution])
    assert isinstance(execution.error, InvalidRequest)
    assert "'IN' and 'DELAY'" in execution.error.message


@pytest.mark.parametrize(("given", "count"), [(4, 4), (0, 0), (-2, 0)])
def test_square_sends_n_responses_of_n(given: int, count: int, square: RequestSession) -> None:
    execution = Answers(IN=np.array([given], dtype="i4"))
    square.execute([execution])
    assert execution.closed.wait(30)
    assert execution.sent == [{"OUT": [given]}] * count
    assert execution.closings == 1


def test_two_billion_squares_can_be_cancelled(square: RequestSession) -> None:
    execution = Answers(IN=np.array([2**31 - 1], dtype="i4"))
    square.execute([execution])
    assert execution.first.wait(30)
    execution.cancelled.set()
    assert execution.closed.wait(30)
    assert execution.closings == 1


def test_decoupled_models_require_their_tensors(file: ModelFile, job: Job) -> None:
    with pytest.raises(BadModelConfig, match="model 'made': backend square expects IN TYPE_INT32, OUT TYPE_INT32"):
        load_backend("square").open(job(file, backend="square", inputs=[InputSpec("X", DType.FP32, (1,))]))


def tensors(kind: type, names: list[str], dtype: DType = DType.FP32) -> list[Any]:
    return [kind(name, dtype, (2,)) for name in names]


def opened(name: str, file: ModelFile, job: Job, ins: list[str], outs: list[str], **options: Any) -> Session:
    inputs, outputs = tensors(InputSpec, ins), tensors(OutputSpec, outs)
    session = load_backend(name).open(job(file, inputs=inputs, outputs=outputs, max_batch_size=8, **options))
    assert isinstance(session, Session)
    return session


def test_built_in_models_need_no_file(file: ModelFile) -> None:
    for name in ("identity", "square", "repeat", "stub"):
        backend = load_backend(name)
        assert backend.default_filename == ""
        assert backend.inspect(file, {}) is None


def test_identity_pairs_tensors_by_number_and_copies(file: ModelFile, job: Job) -> None:
    session = opened("identity", file, job, ["INPUT0", "INPUT1"], ["OUTPUT1", "OUTPUT0"])
    inputs = {"INPUT0": np.ones((1, 2), dtype="f4"), "INPUT1": np.zeros((1, 2), dtype="f4")}
    found = session.run(inputs, ["OUTPUT0", "OUTPUT1"])
    for number in "01":
        np.testing.assert_array_equal(found["OUTPUT" + number], inputs["INPUT" + number])
        assert not np.shares_memory(found["OUTPUT" + number], inputs["INPUT" + number])
    session.close()


def test_identity_pairs_tensors_by_order_if_names_have_no_numbers(file: ModelFile, job: Job) -> None:
    session = opened("identity", file, job, ["a", "b"], ["x", "y"])
    inputs = {"a": np.ones((1, 2), dtype="f4"), "b": np.zeros((1, 2), dtype="f4")}
    assert session.run(inputs, ["y"])["y"].tolist() == [[0, 0]]
    session.close()


def test_identity_leaves_out_the_output_of_an_absent_input(file: ModelFile, job: Job) -> None:
    session = opened("identity", file, job, ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"])
    assert list(session.run({"INPUT1": np.ones((1, 2), dtype="f4")}, ["OUTPUT0", "OUTPUT1"])) == ["OUTPUT1"]
    session.close()


def test_identity_refuses_unpaired_or_differing_tensors(file: ModelFile, job: Job) -> None:
    with pytest.raises(BadModelConfig, match="equal input/output pairs"):
        opened("identity", file, job, ["INPUT0"], [])
    mixed = job(file, inputs=tensors(InputSpec, ["INPUT0"]), outputs=tensors(OutputSpec, ["OUTPUT0"], DType.INT8))
    with pytest.raises(BadModelConfig, match="datatype to match, got INPUT0 TYPE_FP32 and OUTPUT0 TYPE_INT8"):
        load_backend("identity").open(mixed)


@pytest.mark.parametrize(("number", "multiplier", "delay_s"), [(0, 3, 0.02), (2, 3, 0.12), (2, 0, 0.02)])
def test_identity_waits_longer_on_later_instances(
    number: int, multiplier: int, delay_s: float, file: ModelFile, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, timeout=None: waits.append(timeout))
    parameters = {"execute_delay_ms": "20", "instance_wise_delay_multiplier": str(multiplier)}
    session = opened("identity", file, job, ["INPUT0"], ["OUTPUT0"], parameters=parameters, number=number)
    session.run({"INPUT0": np.ones((1, 2), dtype="f4")}, ["OUTPUT0"])
    assert waits == [pytest.approx(delay_s)]


ONES = {"A": np.ones((2, 2), dtype="f4"), "B": np.full((2, 2), 3, dtype="f4")}


@pytest.mark.parametrize(
    ("parameters", "first", "second"),
    [
        ({}, [[2, 2], [2, 2]], [[6, 6], [6, 6]]),
        ({"stub_op": "identity"}, [[1, 1], [1, 1]], [[3, 3], [3, 3]]),
        ({"stub_op": "sum"}, [[2], [2]], [[6], [6]]),
        ({"stub_op": "add_sub"}, [[4, 4], [4, 4]], [[-2, -2], [-2, -2]]),
        ({"stub_output": "zeros"}, [[0, 0], [0, 0]], [[0, 0], [0, 0]]),
        ({"stub_output": "wrong_shape"}, [[2, 2]] * 3, [[6, 6]] * 3),
    ],
)
def test_the_stub_computes_as_configured(
    parameters: dict[str, str], first: list[Any], second: list[Any], file: ModelFile, job: Job
) -> None:
    session = opened("stub", file, job, ["A", "B"], ["X", "Y"], parameters=parameters)
    found = session.run(ONES, ["X", "Y"])
    assert (found["X"].tolist(), found["Y"].tolist()) == (first, second)
    session.close()


def test_the_stub_can_return_nan_or_no_output(file: ModelFile, job: Job) -> None:
    session = opened("stub", file, job, ["A"], ["X"], parameters={"stub_output": "nan"})
    assert np.isnan(session.run(ONES, ["X"])["X"]).all()
    session = opened("stub", file, job, ["A"], ["X"], parameters={"stub_output": "missing"})
    assert session.run(ONES, ["X"]) == {}


def test_the_stub_fails_always_or_after_some_runs(file: ModelFile, job: Job) -> None:
    session = opened("stub", file, job, ["A"], ["X"], parameters={"stub_fail": "true"})
    with pytest.raises(BackendError, match="model 'made'"):
        session.run(ONES, ["X"])
    session = opened("stub", file, job, ["A"], ["X"], parameters={"stub_fail_after": "2"})
    session.run(ONES, ["X"])
    session.run(ONES, ["X"])
    with pytest.raises(BackendError, match="run 3 failed"):
        session.run(ONES, ["X"])


def test_the_stub_fails_to_open_with_the_configured_message(file: ModelFile, job: Job) -> None:
    with pytest.raises(LoadError, match="model 'made': no such luck"):
        opened("stub", file, job, ["A"], ["X"], parameters={"stub_fail_open": "no such luck"})


def test_a_hanging_stub_is_released_by_close(file: ModelFile, job: Job) -> None:
    session = opened("stub", file, job, ["A"], ["X"], parameters={"stub_hang": "true"})
    failures: list[str] = []

    def run() -> None:
        try:
            session.run(ONES, ["X"])
        except BackendError as error:
            failures.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    assert not failures
    session.close()
    thread.join(30)
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("stub_op", "cube"), ("stub_output", "wrong"), ("stub_delay_ms", "soon"), ("stub_hang", "sometimes")],
)
def test_an_invalid_stub_parameter_is_a_load_error(key: str, value: str, file: ModelFile, job: Job) -> None:
    with pytest.raises(LoadError, match=f"{key}.*{value}"):
        opened("stub", file, job, ["A"], ["X"], parameters={key: value})
