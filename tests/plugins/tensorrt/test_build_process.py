"""The real build process: TensorRT for RTX builds the bundled classifier; any failure is handled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.tensorrt.builds.build_process import Bounds, BuildControl, BuildOutcome, run_child
from edge_server.plugins.tensorrt.engine_options import order_to_json
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range
from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually

pytestmark = pytest.mark.full

pytest.importorskip("tensorrt_rtx")

CLASSIFIER = Path(__file__).parents[3] / "model_repository" / "efficientnet_lite0" / "1" / "model.onnx"
PROFILE = {"input": Range((1, 3, 224, 224), (4, 3, 224, 224), (8, 3, 224, 224))}
PLENTY = Bounds(timeout_s=100.0)


def order(path: Path = CLASSIFIER, **more: Any) -> EngineOrder:
    given = {"precision": "fp32", "profiles": (PROFILE,), **more}
    return EngineOrder("classifier", 1, path, "tensorrt_rtx", "1.7", 0, **given)


def job(folder: Path, ordered: EngineOrder) -> dict[str, object]:
    return {
        "task": "build", "order": order_to_json(ordered), "folder": str(folder), "capability": [8, 6],
        "timing_cache": str(folder / "timing.cache"), "pool_bytes": 0,
    }  # fmt: skip


class BuildRecord:
    """The reports of a build, and the control values given meanwhile."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self.pauses: list[str] = []
        self.cancel = ""
        self.pause = ""

    def control(self) -> BuildControl:
        return BuildControl(
            lambda: self.cancel, lambda: self.pause, lambda *values: self.phases.append(values), self.pauses.append
        )


def children() -> list[int]:
    """Return the builders that this process started; the run of all tests has other children, of other tests."""
    return children_of(os.getpid(), "edge_server.plugins.tensorrt")


def in_background(work: Callable[[], BuildOutcome]) -> tuple[threading.Thread, list[BuildOutcome]]:
    found: list[BuildOutcome] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_an_engine_is_built_for_the_classifier_and_its_progress_reported(tmp_path: Path) -> None:
    record = BuildRecord()
    outcome = run_child(job(tmp_path, order()), PLENTY, record.control())
    assert (outcome.end, outcome.reason) == ("built", "")
    plan = tmp_path / "engine.plan"
    assert plan.stat().st_size > 10_000_000
    assert hashlib.sha256(plan.read_bytes()).hexdigest() == outcome.facts["plan_sha256"]
    percents = [percent for _, percent in record.phases]
    assert len({phase for phase, _ in record.phases}) >= 3
    assert percents == sorted(percents)
    assert [path.name for path in tmp_path.iterdir()] == ["engine.plan"]
    assert children() == []


@pytest.mark.parametrize("when", ["before it listens", "while it builds"])
def test_a_cancelled_build_ends_and_leaves_no_file(when: str, tmp_path: Path) -> None:
    record = BuildRecord()
    thread, found = in_background(lambda: run_child(job(tmp_path, order()), PLENTY, record.control()))
    assert eventually(children if when == "before it listens" else lambda: record.phases)
    record.cancel = "taken back"
    thread.join(60)
    assert [item.end for item in found] == ["cancelled"]
    assert list(tmp_path.iterdir()) == []
    assert children() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_crash_is_reported_with_its_signal(number: signal.Signals, tmp_path: Path) -> None:
    record = BuildRecord()
    thread, found = in_background(lambda: run_child(job(tmp_path, order()), PLENTY, record.control()))
    assert eventually(lambda: record.phases)
    for pid in children():
        os.kill(pid, number)
    thread.join(60)
    assert found[0].end == "failed"
    assert not found[0].is_final
    assert f"was ended by {number.name}" in found[0].reason
    assert ("memory runs out" in found[0].reason) == (number is signal.SIGKILL)


@pytest.mark.parametrize(
    ("bounds", "values"),
    [
        (Bounds(timeout_s=0.1), r"took longer than 0.1 s \(--engine-build-timeout-secs\)"),
        (Bounds(100, memory_bytes=50 << 20), r"MiB of memory, more than the 50 MiB .* \(--engine-build-memory-mb\)"),
        (Bounds(100, floor_bytes=1 << 50), "MiB of memory left, out of memory"),
    ],
)
def test_a_build_that_exceeds_its_memory_is_ended_and_reported(bounds: Bounds, values: str, tmp_path: Path) -> None:
    outcome = run_child(job(tmp_path, order()), bounds, BuildRecord().control())
    assert outcome.end == "failed"
    assert not outcome.is_final
    assert re.search(values, outcome.reason), outcome.reason
    assert children() == []


def test_a_paused_build_continues_and_its_timeout_stands_still(tmp_path: Path) -> None:
    record = BuildRecord()
    thread, found = in_background(lambda: run_child(job(tmp_path, order()), PLENTY, record.control()))
    assert eventually(lambda: record.phases)
    record.pause = "the box is HOT"
    assert eventually(lambda: record.pauses)
    (pid,) = children()
    # The kernel stops it a moment after the signal was sent.
    assert eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    record.pause = ""
    thread.join(100)
    assert record.pauses == ["the box is HOT", ""]
    assert [item.end for item in found] == ["built"]


def test_the_builder_has_the_lowest_priority_and_the_highest_oom_score(tmp_path: Path) -> None:
    record = BuildRecord()
    thread, _ = in_background(lambda: run_child(job(tmp_path, order()), PLENTY, record.control()))
    assert eventually(lambda: record.phases)
    (pid,) = children()
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    record.cancel = "seen"
    thread.join(60)


@pytest.mark.parametrize(
    ("content", "more", "values"),
    [
        (b"", {}, "the model cannot be read: cannot mmap an empty file"),
        (b"hello world\n" * 99, {}, "the model cannot be read: not a"),
        (None, {"precision": "int8"}, "precision int8 needs a model with QuantizeLinear"),
        (None, {"precision": "fp16"}, "builds the types that the file has, which are f32"),
        (None, {"profiles": ({"input": Range((1, 3, 9, 9), (1, 3, 9, 9), (1, 3, 9, 9))},)}, "profile has min=9, opt=9"),
    ],
)
def test_an_impossible_build_is_reported(content: bytes | None, more: Any, values: str, tmp_path: Path) -> None:
    path = CLASSIFIER
    if content is not None:
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
    outcome = run_child(job(tmp_path / "work", order(path, **more)), PLENTY, BuildRecord().control())
    assert outcome.end == "failed"
    assert outcome.is_final
    assert values in outcome.reason


def test_a_builder_whose_server_ended_does_not_start(tmp_path: Path) -> None:
    wrong = json.dumps({**job(tmp_path, order()), "parent": 1}).encode()
    command = [sys.executable, "-m", "edge_server.plugins.tensorrt.builds.build_process_main"]
    done = subprocess.run(command, input=wrong, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
