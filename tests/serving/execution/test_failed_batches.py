"""One request of a batch cannot fail the others, where a run has no side effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import DynamicBatching, InputSpec, OutputSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, EdgeServerError, InvalidRequest, OutOfMemory, SessionLost, WrongOutput

BAD = 13.0
PAIRS = DynamicBatching((2,), max_queue_delay_us=60_000_000)


@pytest.fixture
def errors() -> list[EdgeServerError]:
    """The errors of runs that have a row with BAD: the first of these runs gets the first one. The last one stays."""
    return [BackendError("indices element out of data bounds, idx=13")]


@pytest.fixture
def batches(core: Any, errors: list[EdgeServerError]) -> Any:
    """Load a model whose runs fail if a row is BAD. Return a function that runs a batch of two requests, of which the
    first is BAD, and returns their errors."""

    def run(name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if (inputs["IN"] == BAD).any():
            raise errors.pop(0) if len(errors) > 1 else errors[0]
        return {"OUT": np.array(inputs["IN"])}

    core.script.on_run = run
    core.script.is_repeatable = True
    version = core.load(core.spec(dynamic_batching=PAIRS))

    def run_batch() -> list[EdgeServerError | None]:
        mailboxes = [core.submit(value)[1] for value in (BAD, 2.0)]
        return [mailbox.final().error for mailbox in mailboxes]

    run_batch.version = version  # type: ignore[attr-defined]
    return run_batch


def test_the_requests_of_a_failed_batch_run_singly(core: Any, batches: Any) -> None:
    bad, good = batches()
    assert isinstance(bad, BackendError)
    assert good is None
    assert [rows for _, _, rows in core.script.ran] == [2, 1, 1]
    told = batches.version.statistics()
    assert (told.batch_rerun_count, told.failures["BACKEND"], told.success.count) == (1, 1, 1)


def test_a_string_that_is_not_utf8_is_refused_before_it_joins_a_batch(core: Any, new_mailbox: Any) -> None:
    core.script.info = dataclasses.replace(core.script.info, needs_utf8=True)
    text = InputSpec("IN", DType.BYTES, (1,)), OutputSpec("OUT", DType.BYTES, (1,))
    core.load(core.spec(dynamic_batching=PAIRS, inputs=text[:1], outputs=text[1:]))

    def submit(value: bytes) -> Any:
        tensor = Tensor("IN", DType.BYTES, np.array([[value]], object))
        mailbox = new_mailbox()
        core.service.submit(Request("m", {"IN": tensor}), mailbox)
        return mailbox

    fine = submit(b"one")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        submit(b"\xff")
    assert submit(b"two").final().error is fine.final().error is None
    assert [rows for _, _, rows in core.script.ran] == [2]


def test_a_run_with_side_effects_is_not_repeated(core: Any, batches: Any) -> None:
    core.script.is_repeatable = False
    assert None not in batches()
    assert len(core.script.ran) == 1
    assert batches.version.statistics().batch_rerun_count == 0


@pytest.mark.parametrize(
    "error",
    [
        SessionLost("the GPU is lost"),
        BackendError("CUDA failure 719: unspecified launch failure ; GPU=0"),
        OutOfMemory("no memory"),
        BackendError("onnxruntime failed: std::bad_alloc"),
        WrongOutput("it answered an output that it does not declare"),
        MemoryError("an error that no backend reports"),
    ],
)
def test_an_error_that_is_not_of_one_request_fails_the_whole_batch(
    core: Any, batches: Any, errors: list[Any], error: Exception
) -> None:
    errors[:] = [error]
    assert None not in batches()
    assert len(core.script.ran) == 1


def test_a_session_that_is_lost_while_requests_run_singly_runs_no_more_of_them(
    core: Any, batches: Any, errors: list[EdgeServerError]
) -> None:
    errors.append(SessionLost("the GPU is lost"))
    assert [type(error) for error in batches()] == [SessionLost, SessionLost]
    assert [rows for _, _, rows in core.script.ran] == [2, 1]


def test_three_batches_a_minute_run_singly(batches: Any) -> None:
    assert [batches()[1] is None for _ in range(4)] == [True, True, True, False]
    assert batches.version.statistics().batch_rerun_count == 3
    counters = batches.version._counters
    counters._reruns_ns[:] = [at_ns - 60_000_000_000 for at_ns in counters._reruns_ns]
    assert batches()[1] is None


def test_a_request_that_was_cancelled_meanwhile_does_not_run_singly(core: Any, batches: Any, blocker: Any) -> None:
    released: list[str] = []
    (first, one), (_, two) = (
        core.submit(BAD, release=lambda: released.append("bad")),
        core.submit(2.0, release=lambda: released.append("good")),
    )
    blocker.wait_blocked()
    first.cancel()
    blocker.release(2)
    assert one.final().error is not None
    assert two.final().error is None
    batches.version.stop_accepting()
    batches.version.drain()
    assert [rows for _, _, rows in core.script.ran] == [2, 1]
    assert sorted(released) == ["bad", "good"]
