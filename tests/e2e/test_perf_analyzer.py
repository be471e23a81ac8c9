"""perf_analyzer, the load generator of Triton, against the installed server."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.models import BUNDLED, REPEAT
from tests.kit.server import serve

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

CLASSIFIER = "efficientnet_lite0"
MODELS = ("add_sub", CLASSIFIER)


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    shutil.copytree(BUNDLED / CLASSIFIER, module_repository.path / CLASSIFIER)
    module_repository.add_sub(
        "add_sub", 'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 100 }'
    )
    module_repository.add("repeat", REPEAT)
    with serve(module_repository.path, "--allow-client-shm") as server:
        yield server
        assert "Traceback" not in server.log(), server.log()


def analyze(server: Any, folder: Path, model: str, *flags: str, wire: str = "http") -> list[dict[str, str]]:
    """Run perf_analyzer for a moment and return the rows of its report."""
    report = folder / "report.csv"
    command = [
        PROGRAM, "-m", model, "-u", getattr(server, wire), "-i", wire, "--concurrency-range=2",
        "--measurement-mode=count_windows", "--measurement-request-count=20", "--stability-percentage=999",
        "--max-trials=20", "-p", "500", "-f", str(report), "--verbose-csv", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "LD_LIBRARY_PATH": LIBRARIES}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    # It prints this part only when it could read the server's statistics.
    assert re.search(r"Inference count: [1-9]", done.stdout), done.stdout + done.stderr
    with report.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("wire", "flags"),
    [
        ("http", []),
        ("grpc", []),
        ("grpc", ["--streaming"]),
        ("http", ["--shared-memory=system"]),
        ("grpc", ["--shared-memory=system"]),
    ],
    ids=["http", "grpc", "stream", "http-shared-memory", "grpc-shared-memory"],
)
def test_perf_analyzer_measures_client_and_server_times(
    server: Any, tmp_path: Path, wire: str, flags: list[str], model: str, batch: int
) -> None:
    if "--shared-memory=system" in flags and model == CLASSIFIER:
        flags = [*flags, "--output-shared-memory-size=65536"]
    before = server.statistics(model)
    rows = analyze(server, tmp_path, model, "-b", str(batch), *flags, wire=wire)
    after = server.statistics(model)
    assert len(rows) == 1
    assert float(rows[0]["Inferences/Second"]) > 0
    assert float(rows[0]["Server Compute Infer"]) > 0
    assert "Server Queue" in rows[0]
    requests = after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
    assert requests >= 20
    assert after["inference_count"] - before["inference_count"] == requests * batch
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"]


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_perf_analyzer_steps_through_concurrencies_asynchronously(server: Any, tmp_path: Path, wire: str) -> None:
    rows = analyze(server, tmp_path, "add_sub", "--async", "--concurrency-range=1:4:3", wire=wire)
    # Sorted by rate.
    assert sorted(row["Concurrency"] for row in rows) == ["1", "4"]


def test_perf_analyzer_sends_at_a_given_rate(server: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.csv"
    command = [
        PROGRAM, "-m", "add_sub", "-u", server.grpc, "-i", "grpc", "--request-rate-range=100", "-p", "500",
        "--stability-percentage=999", "--max-trials=20", "-f", str(report),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "LD_LIBRARY_PATH": LIBRARIES}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_perf_analyzer_reads_the_metrics_page_while_it_measures(server: Any, tmp_path: Path) -> None:
    url = f"{server.metrics}/metrics"
    analyze(server, tmp_path, "add_sub", "--collect-metrics", f"--metrics-url={url}", "--metrics-interval=100")
