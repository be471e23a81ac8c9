"""`edge-server analyze` on models whose best configuration is known, and the state of the machine after it."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.console import LiveView
from edge_server.errors import ServingFault
from edge_server.plugins.tuning import analyze
from edge_server.plugins.tuning.clients.client_interface import Unreachable
from edge_server.plugins.tuning.load import server_trials
from edge_server.plugins.tuning.load.configuration_search import Search, SearchLimits, TrialOutcome
from edge_server.plugins.tuning.load.measurement_results import Answer, MeasuredPoint, MeasurementWindow
from edge_server.plugins.tuning.load.model_config_candidates import ServerCandidate
from edge_server.plugins.tuning.load.server_trials import ModelFolder
from edge_server.plugins.tuning.result_files import write_variant
from edge_server.repository.model_config.pbtxt import new_config, read_file

COMMAND = Path(sys.executable).parent / "edge-server"
BRIEF = ("--measurement-interval=100", "--measurement-request-count=10", "--max-trials=3")


@pytest.fixture
def repository(tmp_path: Path, stub_config: Any) -> Path:
    """One model whose every run takes 40 ms, for any batch size."""
    folder = tmp_path / "models" / "runs"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(stub_config(delay_ms=40))
    return tmp_path / "models"


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own for temporary files, so that only those of this test are found."""
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


def test_a_model_that_gains_from_batching_gets_it_configured(command: Any, repository: Path, tmp_path: Path) -> None:
    before = (repository / "runs" / "config.pbtxt").read_text()
    picture = tmp_path / "analyze.svg"
    done = command(
        "analyze", "runs", f"--model-repository={repository}", "--instances=1", "--concurrency=8", *BRIEF,
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


@pytest.mark.full
def test_limits_that_no_configuration_meets_are_reported_and_nothing_is_written(command: Any, repository: Path) -> None:
    done = command(
        "analyze", "runs", f"--model-repository={repository}", "--instances=1", "--batch-sizes=1",
        "--concurrency=1", *BRIEF, "--latency-limit-ms=20", "--write=never",
    )  # fmt: skip
    assert done.code == 1
    assert done.report["recommended"] is None
    assert all("p99" in item["reasons"][0] for item in done.report["configurations"])
    assert "no configuration keeps the limits" in done.output
    assert not (repository / "runs" / "configs").exists()


@pytest.mark.full
def test_a_failing_configuration_has_its_reason_and_an_impossible_one_is_not_tried(
    command: Any, repository: Path
) -> None:
    done = command(
        "analyze", "runs", f"--model-repository={repository}", "--runtimes=nonsense,python", "--instances=1",
        "--batch-sizes=1", "--concurrency=1", *BRIEF,
    )  # fmt: skip
    assert done.code == 0, done.errors
    assert done.report["recommended"] == "as configured"
    broken, *_ = (item for item in done.report["configurations"] if item["backend"] is not None)
    assert (broken["backend"], broken["allowed"]) == ("python", False)
    assert "model.py" in broken["reasons"][0]
    (left_out,) = done.report["left_out"]
    assert left_out.startswith("nonsense: no backend is called 'nonsense'")
    assert "not tried: nonsense: " in done.output
    assert "nonsense" not in done.errors


def test_the_time_estimate_counts_the_remaining_rounds() -> None:
    now = [100.0]
    search = Search(lambda candidate, number: TrialOutcome(candidate), SearchLimits())
    progress = analyze._Progress(LiveView(io.StringIO()), search, clock=lambda: now[0])
    search.candidates_in_round = 8
    progress(ServerCandidate(), 0)
    assert progress.share() == 0
    now[0] += 20
    progress(ServerCandidate(instances=2), 0)
    # One of 8 trials of 20 s has ended; 7 are left, then 4 of 40 s, then 3 of 80 s.
    assert progress.share() == pytest.approx(20 / (20 + 7 * 20 + 4 * 40 + 3 * 80))
    now[0] += 280
    search.candidates_in_round = 3
    progress(ServerCandidate(), 2)
    now[0] += 40
    progress(ServerCandidate(instances=2), 2)
    assert progress.share() == pytest.approx(340 / (340 + 2 * 40))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("nope",), "there is no model 'nope'"),
        (("../runs",), "there is no model"),
        (("runs", "--write=../x"), "expected letters"),
        (("runs", "--threads=2"), "has no threads to set"),
    ],
)
def test_a_model_that_cannot_be_analyzed_is_reported(
    command: Any, repository: Path, flags: tuple[str, ...], message: str
) -> None:
    done = command("analyze", f"--model-repository={repository}", *flags)
    assert done.code == 2
    assert message in done.errors


def test_an_existing_variant_is_replaced_only_on_request(command: Any, repository: Path) -> None:
    (repository / "runs" / "configs").mkdir()
    (repository / "runs" / "configs" / "mine.pbtxt").write_text("max_batch_size: 1")
    done = command("analyze", f"--model-repository={repository}", "runs", "--write=mine")
    assert done.code == 2
    assert "--overwrite" in done.errors
    assert (repository / "runs" / "configs" / "mine.pbtxt").read_text() == "max_batch_size: 1"


def test_a_model_of_sequences_is_refused_and_keeps_its_sequences(
    command: Any, repository: Path, stub_config: Any
) -> None:
    (repository / "runs" / "config.pbtxt").write_text(stub_config(more="sequence_batching { }"))
    done = command("analyze", "runs", f"--model-repository={repository}", *BRIEF, "--write=lost")
    assert done.code == 2
    assert "is a model of sequences" in done.errors
    assert not (repository / "runs" / "configs").exists()


@pytest.mark.full
def test_an_unwritable_report_does_not_lose_the_recommendation(command: Any, repository: Path, tmp_path: Path) -> None:
    done = command(
        "analyze", "runs", f"--model-repository={repository}", "--instances=1", "--batch-sizes=1",
        "--concurrency=1", *BRIEF, "--write=found", f"--svg={tmp_path}/nowhere/x.svg",
    )  # fmt: skip
    assert done.code == 2
    assert "cannot be written" in done.errors
    assert "recommended: " in done.output
    assert read_file(repository / "runs" / "configs" / "found.pbtxt", "runs").backend == "stub"


def test_a_difference_without_bounds_is_null_in_the_report(tmp_path: Path) -> None:
    point = MeasuredPoint.of("concurrency", 1, 1, MeasurementWindow(1.0, [Answer(0.0, 0.1)]), is_steady=True)
    search = Search(lambda candidate, number: TrialOutcome(candidate, [point], math.inf), SearchLimits())
    search.run([ServerCandidate()])
    options = argparse.Namespace(
        objective="throughput", latency_limit_ms=None, memory_limit_mb=None, power_limit_watts=None,
        difference_limit=0.01, json=tmp_path / "report.json", svg=None,
    )  # fmt: skip
    analyze._write_reports(options, ModelFolder(tmp_path, new_config()), search, None, [])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    report = json.loads(options.json.read_text(), parse_constant=refuse)
    assert report["configurations"][0]["difference"] is None


def test_bars_of_all_rounds_are_drawn_to_scale(tmp_path: Path) -> None:
    rates = {
        ServerCandidate(instances=number): rate for number, rate in enumerate((30, 90, 10, 70, 50, 20, 80, 40, 60))
    }

    def trial(candidate: ServerCandidate, number: int) -> TrialOutcome:
        # A later round measures less than the one before promised.
        answers = [Answer(0.0, 0.01)] * (rates[candidate] // (number + 1))
        return TrialOutcome(
            candidate,
            [MeasuredPoint.of("concurrency", 1, 1, MeasurementWindow(1.0, answers), is_steady=True)],
            round=number,
        )

    search = Search(trial, SearchLimits())
    best = search.run(list(rates))
    options = argparse.Namespace(objective="throughput")
    picture = analyze._chart(options, ModelFolder(tmp_path, new_config()), search, best)
    told = [float(rate) for rate in re.findall(r">([0-9.]+)/s, p99", picture)]
    assert len(told) == len(rates)
    assert told == sorted(told, reverse=True)


def test_a_variant_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "mine.pbtxt"
    path.mkdir(parents=True)
    with pytest.raises(ServingFault, match="cannot be written"):
        write_variant(path, new_config(), "mine")
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.pbtxt"]


def test_a_variant_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "mine.pbtxt"
    code = (
        "import sys; from edge_server.plugins.tuning import result_files as a; "
        "from edge_server.repository.model_config.pbtxt import new_config; "
        "a.write_variant(a.Path(sys.argv[1]), new_config(), 'mine', ['\\xf6'])"
    )
    plain = {**os.environ, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == "# ö\n\n".encode()


def left_by_a_server(folder: Path, end: str) -> subprocess.Popen[str]:
    """Start a process in place of a server: it starts another one, and then runs `end`."""
    code = f"(sleep 100; touch {folder}/survived) & echo started; {end}"
    process = subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_dead_server_is_not_waited_for_while_its_children_live(tmp_path: Path) -> None:
    process = left_by_a_server(tmp_path, "kill -KILL $$")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "log").touch()
    with pytest.raises(Unreachable, match="did not start"):
        server_trials._wait_until_ready(server_trials.PrivateServer(process, tmp_path / "log"), 0.1)
    assert not (tmp_path / "survived").exists()


def test_children_of_a_server_end_with_it(tmp_path: Path) -> None:
    process = left_by_a_server(tmp_path, "exec sleep 3000")
    server_trials._stop_server(process)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.read() == ""
    assert not (tmp_path / "survived").exists()


# SIGTERM is handled as SIGINT is: it is `full`.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupt_leaves_no_server_and_no_temporary_folder(repository: Path, number: int) -> None:
    process = subprocess.Popen(
        [str(COMMAND), "analyze", "runs", f"--model-repository={repository}", "--instances=1", *BRIEF],
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
