"""Compares ratios that were measured in one run, of CPU time mostly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "short.py"
# A benchmark: it needs the machine for itself.
pytestmark = [pytest.mark.soak, pytest.mark.serial]

CLASSIFIER = "classifier over gRPC beside the bare runtime"
STORED = {
    "identity over gRPC beside a bare echo": 0.34,
    "eight at once over gRPC beside a bare echo": 0.27,
    "identity over HTTP beside a bare echo": 0.68,
}
"""CPU time of a request relative to an echo, when this was last measured: medians of runs on an idle
machine. Update them when the server has become cheaper: a later regression is measured from there."""
MAX_GROWTH = 4 / 3
TRIES = 3


def measure(folder: Path) -> dict[str, dict[str, float]]:
    command = [sys.executable, str(PROGRAM), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "short.json").read_text())["ratios"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    return [measure(tmp_path_factory.mktemp("bench"))]


def test_the_server_reaches_most_of_the_runtimes_throughput(runs: list[dict[str, dict[str, float]]]) -> None:
    # 0.8 and 1.2 when this was written.
    assert runs[0][CLASSIFIER]["throughput_ratio"] > 0.3, runs
    assert runs[0][CLASSIFIER]["cpu_ratio"] < 2.5, runs


@pytest.mark.parametrize("wire", STORED)
def test_cpu_time_of_a_request_relative_to_an_echo_has_not_risen_by_a_third(
    runs: list[dict[str, dict[str, float]]], wire: str, tmp_path: Path
) -> None:
    """A run whose ratio was moved by what else the machine did is repeated; a regression is in each run."""
    most = STORED[wire] * MAX_GROWTH
    while min(run[wire]["cpu_ratio"] for run in runs) >= most and len(runs) < TRIES:
        runs.append(measure(tmp_path))
    assert min(run[wire]["cpu_ratio"] for run in runs) < most, [run[wire] for run in runs]
