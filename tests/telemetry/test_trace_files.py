"""Trace files: always complete JSON, numbered as configured; only traces are lost."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edge_server.config import TraceConfig
from edge_server.core.tensor import DType, Tensor
from edge_server.core.trace_settings import parse_trace_change
from edge_server.telemetry import trace_collector, trace_record
from edge_server.telemetry.trace_collector import TraceFile
from edge_server.telemetry.trace_record import TracedRequest
from edge_server.telemetry.tracing import Traces
from tests.kit.eventually import eventually
from tests.kit.together import together


def traces_to(path: Path, *more: str) -> Traces:
    return Traces(TraceConfig(("level=TIMESTAMPS", "rate=1", f"triton,file={path}", *more)))


def begin(traces: Traces, model: str = "m") -> TracedRequest:
    trace = traces.sample(model, ())
    assert trace is not None
    return trace


def run(traces: Traces, model: str = "m", request_id: str = "") -> None:
    """Trace one request as a front end and a version do."""
    trace = begin(traces, model)
    trace.stamp("HTTP_RECV_START")
    now = time.monotonic_ns()
    trace.first.begin(model, 3, request_id, now, ())
    trace.first.record_computation(now + 1, now + 2, now + 3, now + 4)
    trace.first.end(time.monotonic_ns())
    trace.stamp("HTTP_SEND_END")
    trace.finish()


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def names_of(path: Path, number: int) -> list[str]:
    return [stamp["name"] for record in read(path) if record["id"] == number for stamp in record.get("timestamps", ())]


def heads(path: Path) -> list[dict[str, Any]]:
    return [record for record in read(path) if "model_name" in record]


def test_a_trace_has_tritons_records_in_the_order_of_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path)
    run(traces, request_id='a"b\n')
    traces.close(10)
    assert heads(path) == [{"id": 1, "model_name": "m", "model_version": 3, "request_id": 'a"b\n'}]
    assert sorted(names_of(path, 1)) == sorted(
        ["HTTP_RECV_START", "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END",
         "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", "HTTP_SEND_END"]
    )  # fmt: skip
    stamps = [stamp["ns"] for record in read(path) for stamp in record.get("timestamps", ())]
    assert stamps == sorted(stamps)
    assert caplog.messages == [], "nothing was omitted"


def test_children_name_their_parent_and_the_whole_waits_for_all(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path)
    trace = begin(traces)
    trace.first.begin("outer", 1, "", 1, ())
    child = trace.first.new_child()
    child.begin("inner", 2, "", 2, ())
    trace.first.end(3)
    trace.finish()
    assert not path.exists()
    child.end(4)
    traces.close(10)
    assert [(head["model_name"], head["id"], head.get("parent_id")) for head in heads(path)] == [
        ("outer", 1, None), ("inner", 2, 1),
    ]  # fmt: skip
    late = trace.first.new_child()
    late.begin("too late", 1, "", 5, ())
    late.end(6)
    assert len(trace.models) == 2


def test_a_request_that_is_refused_and_submitted_again_is_one_trace_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path)
    trace = begin(traces)
    trace.first.begin("m", 1, "", 1, ())
    trace.first.refuse(2)
    trace.first.begin("m", 2, "", 3, ())
    trace.first.end(4)
    trace.finish()
    trace.finish()
    traces.close(10)
    assert [head["model_version"] for head in heads(path)] == [2]
    assert names_of(path, 1).count("REQUEST_END") == 1


def test_the_file_is_whole_after_each_addition_and_not_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path)
    for count in (1, 2, 3):
        run(traces)
        # What is added last is what a whole file ends with: nothing is under way any more then.
        assert eventually(lambda number=count: path.exists() and path.read_text().count("model_name") == number)
        assert eventually(lambda: path.read_text().endswith("]"))
        assert len(heads(path)) == count
    traces.close(10)


def test_traces_of_many_threads_are_all_written_and_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path)
    together(lambda _: [run(traces) for _ in range(100)], range(4))
    traces.close(30)
    assert sorted(head["id"] for head in heads(path)) == list(range(1, 401))


def test_a_target_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        TraceFile(str(pipe)).add("{}")
    assert pipe.is_fifo()


def test_a_file_of_an_earlier_run_is_replaced_and_one_taken_away_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    file = TraceFile(str(path))
    file.add('{"id":1}')
    file.add('{"id":2}')
    assert read(path) == [{"id": 1}, {"id": 2}]
    path.unlink()
    file.add('{"id":3}')
    path.rename(tmp_path / "moved")
    file.add('{"id":4}')
    assert (read(tmp_path / "moved"), read(path)) == ([{"id": 3}], [{"id": 4}])


def test_a_log_frequency_fills_numbered_files_and_the_end_writes_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    traces = traces_to(path, "triton,log-frequency=3")
    for _ in range(7):
        run(traces)
    traces.close(10)
    assert [len(heads(tmp_path / f"t.json.{index}")) for index in range(3)] == [3, 3, 1]
    assert sorted(os.listdir(tmp_path)) == ["t.json.0", "t.json.1", "t.json.2"]


def test_a_count_ends_with_a_numbered_file_and_a_stop_before_it_with_the_file(tmp_path: Path) -> None:
    traces = traces_to(tmp_path / "done", "count=2")
    for _ in range(2):
        run(traces)
    assert eventually((tmp_path / "done.0").exists)
    assert len(heads(tmp_path / "done.0")) == 2
    traces.close(10)
    stopped = traces_to(tmp_path / "stopped", "count=3")
    run(stopped)
    stopped.close(10)
    assert len(heads(tmp_path / "stopped")) == 1


def test_new_settings_write_what_the_old_ones_collected_once_its_last_request_is_through(tmp_path: Path) -> None:
    traces = traces_to(tmp_path / "t", "triton,log-frequency=100")
    run(traces)
    open_trace = begin(traces)
    traces.update("", parse_trace_change({"log_frequency": "200"}))
    run(traces)
    open_trace.finish()
    assert eventually((tmp_path / "t.0").exists)
    assert [head["id"] for head in heads(tmp_path / "t.0")] == [1, 2]
    traces.close(10)
    assert [head["id"] for head in heads(tmp_path / "t.1")] == [3]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Have the system refuse what makes a file larger, as it does when a disk is full. Print nothing within."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_traces_that_do_not_fit_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "t"
    file = TraceFile(str(path))
    failed = 0
    numbered = False
    with file_size_limit(1000):
        for number in itertools.count():
            try:
                file.add(json.dumps({"id": number, "text": "x" * 90}))
            except OSError:
                failed += 1
                break
        try:
            file.add_numbered("1" * 2000)
        except OSError:
            numbered = True
    assert failed
    assert numbered
    kept = len(read(path))
    assert kept == number > 5
    assert os.listdir(tmp_path) == ["t"]
    file.add('{"id":0}')
    assert len(read(path)) == kept + 1


def test_a_file_that_cannot_be_written_is_one_line_and_a_problem_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "no" / "t"
    traces = traces_to(path)
    assert traces.problem() == ""
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            run(traces)
        problem = f"'{path}' cannot be written: No such file or directory; 50 trace(s) were lost"
        assert eventually(lambda: traces.problem() == problem)
        assert caplog.messages == [f"traces are lost until '{path}' can be written: No such file or directory"]
        path.parent.mkdir()
        run(traces)
        traces.close(10)
    assert len(heads(path)) == 1
    assert caplog.messages[1:] == [f"50 trace(s) were lost while '{path}' could not be written"]


def test_a_problem_of_a_file_ends_with_the_settings_that_name_it(tmp_path: Path) -> None:
    traces = traces_to(tmp_path / "no" / "t")
    run(traces)
    assert eventually(lambda: traces.problem() != "")
    traces.update("", parse_trace_change({"trace_level": ["OFF"]}))
    assert eventually(lambda: traces.problem() == "")
    traces.close(10)


def test_a_full_disk_keeps_the_bracket_of_the_records_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    file = TraceFile(str(path))
    file.add('"first"')

    def has_no_pages(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", has_no_pages)
        with pytest.raises(OSError, match="No space"):
            file.add("1")
    assert json.loads(path.read_text()) == ["first"]
    file.add("2")
    assert json.loads(path.read_text()) == ["first", 2]


def test_what_comes_faster_than_it_is_written_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_collector, "MAX_TRACES", 5)
    path = tmp_path / "t"
    hold = threading.Event()
    monkeypatch.setattr(trace_collector, "trace_records", _held(trace_collector.trace_records, hold))
    traces = traces_to(path, "count=50")
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            run(traces)
        hold.set()
        traces.close(10)
    lost = 50 - len(heads(tmp_path / "t.0"))
    assert 43 <= lost <= 45
    assert f"{lost} trace(s) were lost: they came faster" in caplog.text


def test_a_stream_that_never_ends_fills_no_memory_with_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_record, "MAX_TENSOR_BYTES", 1000)
    monkeypatch.setattr(trace_record, "MAX_MODELS", 10)
    traces = traces_to(tmp_path / "t", "level=TENSORS")
    trace = begin(traces)
    trace.first.begin("stream", 1, "", 1, ())
    for _ in range(500):
        trace.first.record_outputs([Tensor("numbers", DType.INT32, np.zeros(25, np.int32))])
        step = trace.first.new_child()
        step.begin("step", 1, "", 2, [Tensor("texts", DType.BYTES, np.array([b""] * 9, object))])
        step.record_computation(3, 4, 5, 6)
        step.end(7)
    assert (len(trace.models), trace.byte_count) == (10, 932)
    trace.first.end(8)
    trace.finish()
    traces.close(10)
    records = read(tmp_path / "t")
    assert len(heads(tmp_path / "t")) == 10
    assert sum("activity" in record for record in records) == 6
    assert "no room for 1485 tensor(s) or runs of models" in caplog.text


def _held(work: Any, hold: threading.Event) -> Any:
    def wait(trace: TracedRequest) -> str:
        hold.wait(30)
        text: str = work(trace)
        return text

    return wait


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("dtype", "array", "text"),
    [
        (DType.FP32, np.array([[0.1, 2.0], [1e9, -3.25]], np.float32), "0.1,2,1e+09,-3.25"),
        (DType.FP64, np.array([[np.inf, np.nan]]), "inf,nan"),
        (DType.FP16, np.array([[0.5]], np.float16), "0.5"),
        (DType.BF16, np.array([[1.5, -2]], ml_dtypes.bfloat16).view(np.uint16), "1.5,-2"),
        (DType.BOOL, np.array([[True, False]]), "1,0"),
        (DType.INT8, np.array([[-1, 65]], np.int8), "-1,65"),
        (DType.UINT64, np.array([[2**64 - 1]], np.uint64), "18446744073709551615"),
        (DType.BYTES, np.array([[b"a,b", b'q"\xff']], object), '"a,b","q"\\xff"'),
        (DType.FP32, np.zeros((0, 4), np.float32), ""),
        (DType.INT32, np.array(7, np.int32), "7"),
    ],
)
def test_tensors_are_written_as_text_whatever_their_type(
    tmp_path: Path, dtype: DType, array: np.ndarray[Any, Any], text: str
) -> None:
    path = tmp_path / "t"
    traces = traces_to(path, "level=TENSORS")
    trace = begin(traces)
    given = array.copy()
    trace.first.begin("m", 1, "", 1, [Tensor("x", dtype, given)])
    given.fill(0)
    trace.first.end(2)
    trace.finish()
    traces.close(10)
    (record,) = [record for record in read(path) if "activity" in record]
    shape = ",".join(map(str, array.shape))
    assert record["activity"] == "TENSOR_QUEUE_INPUT"
    assert record["tensor"] == {"name": "x", "data": text, "shape": shape, "dtype": dtype.value}
