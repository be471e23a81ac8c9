"""The same results as perf_analyzer's, for the same server and load."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAM = os.environ.get("EDGE_TEST_PERF_ANALYZER", "")
LIBRARIES = os.environ.get("EDGE_TEST_PERF_ANALYZER_LIBS", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not PROGRAM,
        reason="EDGE_TEST_PERF_ANALYZER names no perf_analyzer; "
        'get one with: eval "$(tests/e2e/fetch_perf_analyzer.sh DEST)"',
    ),
]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_throughput_latency_and_server_times_agree_with_perf_analyzer(
    measure: Any, server: Any, tmp_path: Path, protocol: str
) -> None:
    """Of a model whose runs take a known time. The bounds are wide, because other programs run beside the tests."""
    path = tmp_path / "theirs.csv"
    done = subprocess.run(
        [
            PROGRAM, "-m", "slow", "-u", getattr(server, protocol), "-i", protocol, "--concurrency-range=2",
            "-p", "1000", "--stability-percentage=50", "--max-trials=4", "-f", str(path), "--verbose-csv",
        ],
        capture_output=True, text=True, timeout=100, env={**os.environ, "LD_LIBRARY_PATH": LIBRARIES},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with path.open() as lines:
        theirs = next(csv.DictReader(lines))
    ours = measure("slow", "--concurrency=2", "-i", protocol, "--measurement-interval=500").report["points"][0]
    assert 0.7 < ours["throughput"] / float(theirs["Inferences/Second"]) < 1.4
    assert 0.7 < ours["latency_ms"]["p50"] / (float(theirs["p50 latency"]) / 1000) < 1.4
    assert 0.7 < ours["server"]["queue_us"] / float(theirs["Server Queue"]) < 1.4
    assert 0.7 < ours["server"]["compute_infer_us"] / float(theirs["Server Compute Infer"]) < 1.4
