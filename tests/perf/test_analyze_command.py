"""`edge-server analyze` on models whose best configuration is known, and how it leaves the box."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from edge_server.repository.pbtxt import read_file

COMMAND = Path(sys.executable).parent / "edge-server"
BRIEF = ("--measurement-interval=100", "--measurement-request-count=10", "--max-trials=3")


@pytest.fixture
def repository(tmp_path: Path, stub_config: Any) -> Path:
    """One model whose every run takes 40 ms, whatever the batch."""
    folder = tmp_path / "models" / "runs"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(stub_config(delay_ms=40))
    return tmp_path / "models"


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own for what is temporary, so that only what this test leaves is found."""
    folder = str(tmp_path_factory.mktemp("scratch"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


def left_behind() -> list[str]:
    """Return the private servers that still run, and their folders."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob("edge-analyze-*")]
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(f"{tempfile.gettempdir()}/edge-analyze-".encode() in word for word in words):
                found.append(process.name)
    return found


def test_a_model_that_gains_from_batches_gets_them_written_down(command: Any, repository: Path, tmp_path: Path) -> None:
    before = (repository / "runs" / "config.pbtxt").read_text()
    picture = tmp_path / "analyze.svg"
    done = command(
        "analyze", "-m", "runs", f"--model-repository={repository}", "--instances=1", "--concurrency=8", *BRIEF,
        "--write=batched", f"--svg={picture}", "--power-limit-watts=1000",
    )  # fmt: skip
    assert done.code == 0, done.errors
    assert done.report["recommended"] == "1 instance, batches to 8"
    rates = {item["name"]: item["points"][0]["throughput"] for item in done.report["configurations"]}
    assert rates["1 instance, batches to 8"] > 2 * rates["as configured"]
    assert all(item["difference"] == 0 for item in done.report["configurations"])
    assert all(item["memory_mb"] > 10 for item in done.report["configurations"])
    variant = read_file(repository / "runs" / "configs" / "batched.pbtxt", "runs")
    assert variant.HasField("dynamic_batching")
    assert variant.parameters["stub_delay_ms"].string_value == "40"
    assert (repository / "runs" / "config.pbtxt").read_text() == before
    assert ET.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "--model-config-name=batched" in done.output
    assert left_behind() == []


def test_limits_that_nothing_keeps_are_told_and_nothing_is_written(command: Any, repository: Path) -> None:
    done = command(
        "analyze", "-m", "runs", f"--model-repository={repository}", "--instances=1", "--batch-sizes=1",
        "--concurrency=1", *BRIEF, "--latency-limit-ms=20", "--write=never",
    )  # fmt: skip
    assert done.code == 1
    assert done.report["recommended"] is None
    assert all("p99" in item["reasons"][0] for item in done.report["configurations"])
    assert "no configuration keeps the limits" in done.output
    assert not (repository / "runs" / "configs").exists()


def test_a_configuration_that_does_not_load_is_refused_with_its_reason(command: Any, repository: Path) -> None:
    done = command(
        "analyze", "-m", "runs", f"--model-repository={repository}", "--backends=nonsense", "--instances=1",
        "--batch-sizes=1", "--concurrency=1", *BRIEF,
    )  # fmt: skip
    assert done.code == 0, done.errors
    assert done.report["recommended"] == "as configured"
    broken = next(item for item in done.report["configurations"] if item["backend"] == "nonsense")
    assert not broken["allowed"]
    assert "nonsense" in broken["reasons"][0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-m", "nope"), "there is no model 'nope'"),
        (("-m", "../runs"), "there is no model"),
        (("-m", "runs", "--write=../x"), "expected letters"),
        (("-m", "runs", "--threads=2"), "has no threads to set"),
    ],
)
def test_what_cannot_be_analyzed_is_said(command: Any, repository: Path, flags: tuple[str, ...], said: str) -> None:
    done = command("analyze", f"--model-repository={repository}", *flags)
    assert done.code == 2
    assert said in done.errors


def test_a_variant_that_is_there_is_not_replaced_unasked(command: Any, repository: Path) -> None:
    (repository / "runs" / "configs").mkdir()
    (repository / "runs" / "configs" / "mine.pbtxt").write_text("max_batch_size: 1")
    done = command("analyze", f"--model-repository={repository}", "-m", "runs", "--write=mine")
    assert done.code == 2
    assert "--force" in done.errors
    assert (repository / "runs" / "configs" / "mine.pbtxt").read_text() == "max_batch_size: 1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_server_and_no_folder(repository: Path, number: int) -> None:
    process = subprocess.Popen(
        [str(COMMAND), "analyze", "-m", "runs", f"--model-repository={repository}", "--instances=1", *BRIEF],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 1"):
            break
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert left_behind() == []
