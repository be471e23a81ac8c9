"""Iterative Python models, which reschedule requests: responses, flags and errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import Cancelled

COUNTDOWN = """
class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            id, flags = request.correlation_id(), request.flags()
            begins = flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            left = self.left[id] = int(given(request)[0, 0]) if begins else self.left[id] - 1
            sender = request.get_response_sender()
            sender.send(answer([[left, len(requests)]]))
            if left > 1:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                del self.left[id]
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PROCESS = 'parameters { key: "isolation" value { string_value: "process" } }\n'
TENSORS = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
ITERATIVE = TENSORS + "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 8 } }\n"
DECOUPLED = ITERATIVE + "model_transaction_policy { decoupled: true }\n"


def seen(responses: list[Any]) -> list[float]:
    assert responses[-1].error is None, responses[-1].error
    return [float(response.outputs[0].array[0, 0]) for response in responses if response.outputs]


@pytest.mark.parametrize("code", [COUNTDOWN, COUNTDOWN.replace("def execute", "async def execute")])
@pytest.mark.parametrize("place", ["", PROCESS])
def test_a_request_is_rescheduled_until_the_model_releases_it(python_core: Any, place: str, code: str) -> None:
    python_core.add("m", code, DECOUPLED + place)
    started = [python_core.start("m", [[float(value)]]) for value in (40, 3, 25, 1, 30)]
    for _, final, _ in started:
        assert final.wait(20)
    counts = [[float(value) for value in range(most, 0, -1)] for most in (40, 3, 25, 1, 30)]
    assert [seen(responses) for responses, _, _ in started] == counts
    (statistics,) = python_core.service.statistics("m", None)
    assert statistics.success.count == statistics.inference_count == 5
    assert 40 <= statistics.execution_count <= 99


@pytest.mark.parametrize("place", ["", PROCESS])
def test_a_cancelled_request_is_not_rescheduled(
    python_core: Any, place: str, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    python_core.add("m", COUNTDOWN, DECOUPLED + place)
    responses, final, ticket = python_core.start("m", [[1e6]])
    assert eventually(lambda: len(responses) > 2)
    ticket.cancel()
    assert final.wait(20)
    assert isinstance(responses[-1].error, Cancelled)
    assert eventually(lambda: python_core.service.statistics("m", None)[0].pending_count == 0)
    assert seen(python_core.ask("m", [[2.0]])) == [2, 1]


def test_without_streams_a_model_responds_once_after_any_number_of_runs(python_core: Any) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.sums = {}

        def execute(self, requests):
            return [self.one(request) for request in requests]

        def one(self, request):
            id, value = request.correlation_id(), given(request)
            self.sums[id] = self.sums.get(id, 0) + value
            if self.sums[id][0, 0] < 100:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return None
            return answer(self.sums.pop(id))
    """
    python_core.add("m", code, ITERATIVE)
    assert python_core.value("m", [[30.0]]) == [[120]]
    assert python_core.value("m", [[200.0]]) == [[200]]


def test_a_model_may_undo_its_reschedule_and_a_failing_run_ends_the_request(python_core: Any) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                if given(request)[0, 0] < 0:
                    raise ValueError("below zero")
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
            return [answer([[1]]) for request in requests]
    """
    python_core.add("m", code, ITERATIVE)
    assert python_core.value("m", [[1.0]]) == [[1]]
    assert "below zero" in python_core.error("m", [[-1.0]])
    assert python_core.value("m", [[1.0]]) == [[1]]


@pytest.mark.parametrize(
    ("config", "flags", "returned", "message"),
    [
        (TENSORS, 2, "None", "model 'm' cannot reschedule, its configuration has no sequence_batching { iterative_seq"),
        (ITERATIVE, 3, "None", "expected TRITONSERVER_REQUEST_RELEASE_ALL or .*_RESCHEDULE, got 3"),
        (ITERATIVE, 2, "answer([[1]])", "execute must return None for a request that it reschedules"),
    ],
)
def test_errors_of_a_model_are_reported(python_core: Any, config: str, flags: int, returned: str, message: str) -> None:
    code = f"""
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].set_release_flags({flags})
            return [{returned}]
    """
    python_core.add("m", code, config + 'parameters { key: "warmup_probe" value { string_value: "false" } }')
    assert re.search(message, python_core.error("m", [[1.0]]))


def test_an_answered_request_is_not_rescheduled_and_its_sender_is_closed(
    python_core: Any, caplog: pytest.LogCaptureFixture, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.old = None

        def execute(self, requests):
            (request,) = requests
            sender = request.get_response_sender()
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.old is None:
                self.old = sender
                return
            try:
                self.old.send(answer([[1]]))
            except pb_utils.TritonModelException:
                sender.send(answer([[7]]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    python_core.add("m", code, DECOUPLED + 'parameters { key: "warmup_probe" value { string_value: "false" } }')
    with caplog.at_level(logging.WARNING):
        assert seen(python_core.ask("m", [[1.0]])) == [7]
        # It is reported once execute has returned, after the response.
        assert eventually(lambda: "reschedules a request that it has answered" in caplog.text)


def test_an_ensemble_passes_the_stream_of_an_iterative_member_on(python_core: Any) -> None:
    python_core.add("m", COUNTDOWN, DECOUPLED)
    folder = python_core.path / "whole"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'platform: "ensemble"\nmax_batch_size: 8\ninput { name: "A" data_type: TYPE_FP32 dims: [-1] }\n'
        'output { name: "B" data_type: TYPE_FP32 dims: [-1] }\nensemble_scheduling { step { model_name: "m" '
        'input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" } } }\n'
    )
    python_core.service.load_model("whole")
    inputs = {"A": Tensor("A", DType.FP32, np.array([[3.0]], np.float32))}
    responses = python_core.ask("whole", inputs=inputs)
    assert seen(responses) == [3, 2, 1]
    assert [dict(response.parameters) for response in responses] == [{}] * 4
