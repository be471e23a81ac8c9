"""The short form of the curves as a test: what a further model or connection costs beside the first one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "scaling.py"
# A benchmark: it needs the machine for itself.
pytestmark = [pytest.mark.soak, pytest.mark.serial]

MAX_GROWTH = 2.0
"""CPU time of a request among 60 models or over 200 connections, relative to one of them; 1.0 to 1.4 when this was
written, because memory that was not used for long has left the processor's caches. To decode each anew makes 2.4."""
MAX_CONNECTION_KB = 20.0
"""Memory of an open connection; 3 and 5 kB when this was written."""
TRIES = 3


def measure(folder: Path) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, str(PROGRAM), "models", "connections", "--short", "--rounds=1"]
    command += [f"--pictures={folder}", f"--json={folder / 'scaling.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for curve in ("models", "connections"):
        assert (folder / f"scaling_{curve}.svg").read_text().startswith("<svg")
    return json.loads((folder / "scaling.json").read_text())["curves"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    return [measure(tmp_path_factory.mktemp("curves"))]


def growth(run: dict[str, list[dict[str, Any]]], curve: str, way: str, figure: str) -> float:
    first, *_, last = (point["figures"][figure] for point in run[curve] if point["way"] == way)
    return last / first


def thread_growth(run: dict[str, list[dict[str, Any]]], curve: str, way: str) -> int:
    first, *_, last = (point["figures"]["threads"] for point in run[curve] if point["way"] == way)
    return last - first


@pytest.mark.parametrize(
    ("curve", "way", "figure"),
    [
        ("models", "builtin", "gRPC_us"),
        ("models", "builtin", "HTTP_us"),
        ("models", "ONNX Runtime", "gRPC_us"),
        ("connections", "gRPC", "request_us"),
        ("connections", "HTTP", "request_us"),
    ],
)
def test_the_cost_of_a_request_does_not_grow_with_models_or_connections(
    runs: list[dict[str, list[dict[str, Any]]]], curve: str, way: str, figure: str, tmp_path: Path
) -> None:
    while min(growth(run, curve, way, figure) for run in runs) >= MAX_GROWTH and len(runs) < TRIES:
        runs.append(measure(tmp_path))
    assert min(growth(run, curve, way, figure) for run in runs) < MAX_GROWTH, [run[curve] for run in runs]


def test_an_open_connection_takes_little_memory(runs: list[dict[str, list[dict[str, Any]]]]) -> None:
    for way in ("gRPC", "HTTP"):
        first, last = (point["figures"] for point in runs[0]["connections"] if point["way"] == way)
        assert (last["memory_kb"] - first["memory_kb"]) / 199 < MAX_CONNECTION_KB, way


@pytest.mark.parametrize(("curve", "way"), [("models", "builtin"), ("connections", "gRPC"), ("connections", "HTTP")])
def test_a_model_of_the_builtin_backend_or_a_connection_takes_no_thread(
    runs: list[dict[str, list[dict[str, Any]]]], curve: str, way: str, tmp_path: Path
) -> None:
    # On a busy machine a pool of the process may start a thread meanwhile, but not in each run.
    while 0 not in (found := [thread_growth(run, curve, way) for run in runs]) and len(runs) < TRIES:
        runs.append(measure(tmp_path))
    assert 0 in found
