"""Measurements while models are reloaded, child processes end, memory is short, and responses come out of order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.clients.client_interface import (
    MeasuredRequest,
    ModelFacts,
    RequestRefused,
    ServerCounts,
    TensorFacts,
)
from edge_server.plugins.tuning.clients.http_client import HttpWriter
from edge_server.plugins.tuning.load.input_data import InputChoice, make_inputs
from edge_server.plugins.tuning.load.measure_until_stable import Measurement, MeasurementTimes, ServerProbes
from edge_server.plugins.tuning.load.measurement_results import Answer, MeasuredPoint, MeasurementWindow, doubts
from edge_server.plugins.tuning.load.measurement_session import LoadSession
from edge_server.plugins.tuning.load.process_usage import Usage, usage_of
from edge_server.plugins.tuning.load.shared_memory import in_shared_memory


class Answering:
    """A load that is answered at every look."""

    def take_answers(self) -> list[Answer]:
        return [Answer(0.0, 0.001)]

    def dropped(self) -> dict[str, int]:
        return {}


def measured(counts: Iterator[ServerCounts], usage: Iterator[Usage]) -> MeasuredPoint:
    probes = ServerProbes(lambda: next(counts), lambda: next(usage))
    return Measurement(Answering(), probes, MeasurementTimes(0.01, 1, 0.1, 1)).run("concurrency", 1, 1)


def test_a_model_reloaded_within_a_window_has_no_negative_durations() -> None:
    before = ServerCounts(1000, 0, 1000, 1000, 9_000_000, 1_000_000)
    after = ServerCounts(5, 0, 5, 5, 100_000, 10_000)
    point = measured(iter([before, after]), iter([Usage(90.0, 1e6), Usage(0.5, 1e6)]))
    assert point.split is None
    assert point.server_cpu is None
    kept = measured(iter([after, before]), iter([Usage(0.0, 1e6), Usage(0.5, 1e6)]))
    assert kept.split is not None
    assert kept.server_cpu is not None
    assert kept.server_cpu > 0


def test_power_is_that_of_the_windows_whose_results_are_reported() -> None:
    class Slowing(Answering):
        """Each window is answered more slowly than the one before, so that none is like the last."""

        taken = 0

        def take_answers(self) -> list[Answer]:
            Slowing.taken += 1
            return [Answer(0.0, float(10**Slowing.taken))]

    seen: list[float] = []
    measurement = Measurement(
        Slowing(), ServerProbes(power_w=lambda: 1.0 if len(seen) > 1 else 1000.0), MeasurementTimes(0.01, 1, 0.1, 5),
        lambda windows: seen.append(0.0),
    )  # fmt: skip
    assert measurement.run("concurrency", 1, 1).power_w == 1.0


def test_requests_delayed_by_a_stall_are_reported_beside_latencies_without_them() -> None:
    def sent(lag_s: float) -> MeasuredPoint:
        answers = [Answer(0.0, 0.001, lag_s=lag_s if number > 94 else 0.0) for number in range(100)]
        return MeasuredPoint.of("request_rate", 1000, 1, MeasurementWindow(1.0, answers), is_steady=True)

    assert any("80.0 ms or more after it was due" in text for text in doubts(sent(0.08), 4))
    assert doubts(sent(0.004), 4) == []
    assert [text for text in doubts(sent(0.2), 4) if "due" in text] == []  # reported as late


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_broken_file_of_arrays_is_reported_by_a_message(tmp_path: Path, is_cut: bool) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, INPUT0=np.arange(10_000, dtype=np.int8) % 7)
    content = bytearray(path.read_bytes())
    if is_cut:
        del content[-40:]
    else:
        content[60:140] = bytes(80)
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        make_inputs(facts(), InputChoice(files=(("", path),)))


def test_usage_of_ended_children_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}], check=True)\n"
        "used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
        "print(sum(item.ru_utime + item.ru_stime for item in used), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told_s = float(process.stdout.readline())
        found = usage_of(process.pid)
        process.communicate()
    assert found is not None
    assert found.cpu_s > told_s - 0.2


def facts(*outputs: TensorFacts, dtype: DType = DType.INT8) -> ModelFacts:
    return ModelFacts("m", "", (TensorFacts("INPUT0", dtype, (2,)),), outputs, 0)


class Regions:
    """A server that takes every region."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def register_region(self, name: str, key: str, size_bytes: int) -> None:
        self.names.append(name)

    def unregister_region(self, name: str) -> None:
        self.names.remove(name)


def test_too_small_shared_memory_is_refused_before_it_is_written() -> None:
    disk = os.statvfs("/dev/shm")
    if not disk.f_blocks:
        pytest.skip("/dev/shm has no limit here")
    model = facts(TensorFacts("OUTPUT0", DType.BYTES, (1,)))
    tensors = (Tensor("INPUT0", DType.INT8, np.zeros(2, np.int8)),)
    control: Any = Regions()
    most = disk.f_blocks * disk.f_frsize + (1 << 20)
    with (
        pytest.raises(InvalidRequest, match="do not fit in /dev/shm"),
        in_shared_memory(model, [tensors], lambda request: b"", 1, control, most),
    ):
        pytest.fail("there is no such memory")
    assert control.names == []
    assert list(Path("/dev/shm").glob(f"edge_perf_*_{os.getpid()}_*")) == []


def test_ipv6_addresses_are_in_brackets() -> None:
    tensors = (Tensor("INPUT0", DType.INT8, np.zeros(2, np.int8)),)
    request = HttpWriter("http://[::1]:8000", ())(MeasuredRequest(facts(), tensors, {}))
    assert b"\r\nHost: [::1]:8000\r\n" in request


@pytest.mark.parametrize("values", ["[1, 300]", "[1, -129]", "[1, 1.5]", "[1, NaN]", "[1, Infinity]"])
def test_out_of_range_numbers_are_refused_and_not_wrapped(tmp_path: Path, values: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(f'{{"data": [{{"INPUT0": {values}}}]}}')
    with pytest.raises(InvalidRequest, match="'INPUT0'"):
        make_inputs(facts(), InputChoice(files=(("", path),)))
    path.write_text('{"data": [{"INPUT0": [-128, 127]}]}')
    assert make_inputs(facts(), InputChoice(files=(("", path),)))[0][0].array.tolist() == [-128, 127]


def test_measured_levels_are_reported_when_a_later_one_fails(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LoadSession.at_concurrency

    def at_concurrency(self: LoadSession, concurrency: int) -> MeasuredPoint:
        if concurrency > 1:
            raise RequestRefused("the model is gone")
        return real(self, concurrency)

    monkeypatch.setattr(LoadSession, "at_concurrency", at_concurrency)
    done = measure("slow", "--concurrency=1,2")
    assert done.code == 2
    assert "the model is gone" in done.errors
    assert [point["concurrency"] for point in done.report["points"]] == [1]
    assert "RATE/S" in done.output


def test_an_unwritable_chart_does_not_lose_the_results(measure: Any, tmp_path: Path) -> None:
    done = measure("slow", f"--svg={tmp_path}/nowhere/x.svg")
    assert done.code == 2
    assert "cannot be written" in done.errors
    assert "RATE/S" in done.output
    assert len(done.report["points"]) == 1
