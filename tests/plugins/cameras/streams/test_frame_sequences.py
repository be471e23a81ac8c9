"""Frame streams as sequences: the end of one and the start of the next with the same id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.service import Handle

COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        return [self.count(request.correlation_id(), request.flags()) for request in requests]

    def count(self, id, flags):
        begins = flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        self.counts[id] = 1 if begins else self.counts[id] + 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", np.full((1, 1), self.counts[id], np.float32))])
"""
BATCHING = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
}
"""


NUMBER = BATCHING.replace(
    "oldest", 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } } oldest'
)


@pytest.fixture(params=[BATCHING, NUMBER], ids=["text_id", "number_id"])
def counted(stream_server: Any, tools: Any, request: pytest.FixtureRequest) -> Any:
    """A house whose model answers how many frames of its sequence it has seen."""
    config = tools.config(rows=4, more=request.param).replace('"stub"', '"python"').replace("dynamic_batching { }", "")
    stream_server.add("sum", config)
    (stream_server.path / "sum" / "1" / "model.py").write_text(COUNTER)
    stream_server.start()
    return stream_server


class PausedSubmit:
    """Stops the `place`-th request just before the server gets it."""

    def __init__(self, submit: Callable[..., Any], place: int) -> None:
        self.stopped = threading.Event()
        self.resume = threading.Event()
        self._submit = submit
        self._left = place

    def __call__(self, *given: Any, **more: Any) -> Any:
        self._left -= 1
        if not self._left:
            self.stopped.set()
            assert self.resume.wait(20)
        return self._submit(*given, **more)


@pytest.mark.parametrize("ends_first", [False, True])
@pytest.mark.parametrize("place", [1, 3])
def test_a_frame_of_an_earlier_stream_never_joins_the_next_sequence(
    counted: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, place: int, ends_first: bool
) -> None:
    turnstile = PausedSubmit(Handle.submit, place)
    monkeypatch.setattr(Handle, "submit", lambda *given, **more: turnstile(*given, **more))
    before = counted.camera(stream_id="front")
    for number in range(1, place):
        before.send(tools.frame(number))
        assert tools.values(before.wait(number))[-1] == number
    before.send(tools.frame(place))
    assert turnstile.stopped.wait(20)
    if ends_first:
        before.stream.end()
    after = counted.camera(stream_id="front")
    other = counted.camera(stream_id="back")
    after.send(tools.frame(1))
    other.send(tools.frame(1))
    assert tools.values(other.wait(1)) == [1]
    assert (after.results, after.stream.report().waiting_count, after.stream.is_eligible) == ([], 1, False)
    turnstile.resume.set()
    for number in range(1, 4):
        assert tools.values(after.wait(number))[-1] == number
        after.send(tools.frame(number + 1))
    scheduler = counted.core.service.router.route("sum", None)._scheduler
    assert scheduler.live_count == 2
    for camera in (after, other):
        camera.finish()
    assert tools.wait_until(lambda: scheduler.live_count == 0)


def test_streams_of_a_model_without_sequences_wait_for_no_older_frame(
    served: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turnstile = PausedSubmit(Handle.submit, 1)
    monkeypatch.setattr(Handle, "submit", lambda *given, **more: turnstile(*given, **more))
    served.camera(stream_id="front").send(tools.frame(1))
    assert turnstile.stopped.wait(20)
    after = served.camera(stream_id="front")
    after.send(tools.frame(2))
    assert tools.values(after.wait(1)) == [tools.sum_of(2)]
    turnstile.resume.set()


def test_a_camera_begins_anew_in_a_newer_version_and_after_a_reload(counted: Any, tools: Any) -> None:
    camera, sent = counted.camera(stream_id="front"), 0

    def count() -> float:
        nonlocal sent
        sent += 1
        camera.send(tools.frame(1))
        return float(tools.values(camera.wait(sent))[-1])

    def add(version: int, more: str) -> None:
        config = (counted.path / "sum/config.pbtxt").read_text()
        counted.add("sum", config + more, version)
        (counted.path / "sum" / str(version) / "model.py").write_text(COUNTER)
        counted.service.load_model("sum")

    assert [count(), count()] == [1, 2]
    add(2, "version_policy { all {} }")
    assert [count(), count()] == [1, 2], "in the newer version, while the older one serves beside it"
    assert counted.service.is_model_ready("sum", 1)
    add(2, "# changed")
    assert [count(), count()] == [1, 2], "in the next generation"
    camera.finish()
