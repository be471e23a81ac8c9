"""`edge-server status`: its name, JSON, watching, and a table that fits the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edge_server.cli import expected_versions, status
from tests.kit.server import COMMAND
from tests.kit.site import Handler, Site

MODEL = "efficientnet_lite0"
TENSOR = {"datatype": "FP32", "shape": [-1, 3, 224, 224]}
STATS = {key: {"count": 2, "ns": 18_000_000} for key in ("success", "fail", "compute_infer")}
REPORT = {
    "name": MODEL, "version": 1, "backend": "openvino", "precision": "f32", "load_s": 0.268, "load_rss_bytes": 92e6,
    "warnings": ["it looks doubtful"], "notes": ["in the usual order", "it can batch"],
    "routine_notes": ["in the usual order"],
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "/v2": {"name": "triton", "version": "0.1.0"},
    "/v2/health/ready": {},
    "/v2/repository/index": [
        {"name": MODEL, "version": "1", "state": "READY"},
        {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "no such runtime"},
    ],
    "/edge/v1/models": {"models": [REPORT]},
    f"/v2/models/{MODEL}/versions/1": {
        "inputs": [{"name": "input", **TENSOR}],
        "outputs": [{"name": "probabilities", **TENSOR}],
    },
    f"/v2/models/{MODEL}/versions/1/stats": {"model_stats": [{"inference_stats": STATS}]},
}


class Answering(Handler):
    def do_GET(self) -> None:
        found = ANSWERS.get(self.path)
        self.body()
        self.answer(json.dumps(found).encode(), 404 if found is None else 200)

    do_POST = do_GET


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Site(Answering) as site:
        yield site.url


def at_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int) -> str:
    """Run the command on a terminal of that width and return what it wrote there."""
    main, side = pty.openpty()
    with monkeypatch.context() as patch, os.fdopen(side, "w", encoding="utf-8") as terminal:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", terminal)
        # The server is ready, but one of its models failed to load.
        assert status.run(arguments) == 1
        terminal.flush()
        text = ""
        # A terminal hands on what was written piece by piece.
        while "it can batch" not in text:
            text += os.read(main, 65536).decode()
    os.close(main)
    return text.replace("\r\n", "\n")


def visible(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n").split("\n")


def test_without_a_terminal_the_table_is_plain_text(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert status.run(["--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"edge-server 0.1.0 at {url} is ready"
    assert re.split(r"\s{2,}", lines[3]) == ["MODEL", "VERSION", "STATE", "BACKEND", "MS", "MB", "REQUESTS", "FAILED"]
    assert max(map(len, lines)) <= 80
    assert status.run(["--url", url, "-v"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert tuple(re.split(r"\s{2,}", lines[3])) == status.COLUMN_TITLES
    assert "probabilities FP32[-1,3,224,224]" in lines[6]


def test_memory_that_was_not_measured_is_no_number(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory() -> str:
        status.run(["--url", url])
        (row,) = (
            line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{MODEL} ") and "READY" in line
        )
        return re.split(r"\s{2,}", row)[5]

    assert memory() == "92"
    monkeypatch.setitem(REPORT, "load_rss_bytes", 0)
    assert memory() == "-"


def test_problems_come_first_and_notes_last(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(REPORT, "live_sequences", 4)
    assert status.run(["--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["FAILED bad version 1: no such runtime", f"WARNING {MODEL} version 1: it looks doubtful"]
    assert [line.split()[0] for line in lines[5:7]] == ["bad", MODEL]
    assert sorted(lines[7:]) == [
        f"{MODEL} version 1: it can batch",
        f"{MODEL} version 1: sequences: 4 live, 0 waiting for a slot",
    ]


def test_routine_notes_and_unloaded_versions_are_shown_only_with_verbose(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unloaded = {"name": "gone", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    idle = {"name": "idle", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded: idle; loads again on request"}
    index = [*ANSWERS["/v2/repository/index"], unloaded, idle]
    monkeypatch.setitem(ANSWERS, "/v2/repository/index", index)
    assert status.run(["--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[5:8]] == ["bad", MODEL, "idle"]
    assert lines[8:] == [
        f"{MODEL} version 1: it can batch",
        "idle version 1: unloaded: idle; loads again on request",
        "not shown: unloaded versions (1); -v shows them",
    ]
    assert status.run(["--url", url, "-v"]) == 1
    text = capsys.readouterr().out
    assert f"{MODEL} version 1: in the usual order\n" in text
    assert "gone version 1: unloaded\n" in text
    assert "not shown" not in text


GOVERNOR = {
    "name": "governor",
    "error": "",
    "rows": [
        {"title": "governor", "state": "ok", "text": "HOT - a\x1b[31mfan stands"},
        {"title": "", "state": "ok", "text": "98 °C"},
        {"columns": ["MODEL", "J"], "cells": [["m", "0.1"]], "optional": []},
        {"title": "fan", "state": "warning", "text": "stands"},
    ],
    "reports": {"governor": {"enabled": True}},
}


def test_lines_tables_and_errors_of_plugins_are_printed(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"name": "broken", "error": "KeyError: 'x'", "rows": [], "reports": {}}
    monkeypatch.setitem(ANSWERS, "/edge/v1/plugins", {"plugins": [GOVERNOR, broken]})
    assert status.run(["--url", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["FAILED plugin broken: KeyError: 'x'", "WARNING fan: stands"]
    assert lines[-7:-1] == [
        "governor: HOT - a [31mfan stands",
        "  98 °C",
        "",
        "MODEL  J",
        "-----  ---",
        "m      0.1",
    ]
    assert status.run(["--url", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["governor"] == {"enabled": True}
    assert [plugin["name"] for plugin in report["plugins"]] == ["governor", "broken"]


def test_json_contains_everything_in_the_table_and_more(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.run(["--url", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["server"], report["version"], report["ready"]) == ("edge-server", "0.1.0", True)
    good, bad = report["models"]
    assert (good["state"], good["backend"], good["inputs"][0]["shape"]) == ("READY", "openvino", [-1, 3, 224, 224])
    assert good["inference_stats"]["success"]["count"] == 2
    assert (bad["state"], bad["reason"]) == ("UNAVAILABLE", "no such runtime")


@pytest.mark.parametrize("has_colours", [False, True])
def test_on_a_terminal_the_table_fits_and_has_colours_unless_no_color_is_set(
    url: str, has_colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not has_colours:
        monkeypatch.setenv("NO_COLOR", "1")
    drawn = [at_terminal(monkeypatch, "--url", url, "-v", columns=columns) for columns in (200, 72)]
    assert all(("\x1b[32mREADY" in text) is has_colours for text in drawn)
    wide, narrow = map(visible, drawn)
    assert "INPUTS" in wide[3]
    assert all(len(line) <= 72 for line in narrow), narrow
    assert "INPUTS" not in narrow[3]
    row = next(number for number, line in enumerate(narrow) if line.startswith(MODEL))
    assert {"  INPUTS     input FP32[-1,3,224,224]", "  OUTPUTS    probabilities FP32[-1,3,224,224]"} < set(
        narrow[row:]
    )
    for lines in (wide, narrow):
        assert re.search(rf"^{MODEL}\s+1\s+READY\b", "\n".join(lines), re.MULTILINE), lines


def test_on_a_narrow_terminal_the_columns_that_do_not_fit_are_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, verbose = (visible(at_terminal(monkeypatch, "--url", url, *more, columns=60)) for more in ((), ("-v",)))
    assert "columns that do not fit: BACKEND, MB, REQUESTS" in narrow
    assert not [line for line in verbose if "do not fit" in line]
    assert "  BACKEND    openvino" in verbose
    assert "  MB         92" in verbose


def test_the_exit_code_follows_expectations_and_waiting(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = ANSWERS["/v2/repository/index"]
    monkeypatch.setattr(expected_versions, "POLL_S", 0.001)
    monkeypatch.setitem(ANSWERS, "/v2/repository/index", [{**good, "digest": "sha256:" + 64 * "a"}])
    for expected, code, problem in (
        ("1", 0, ""),
        ("1@aaaaaaaa", 0, ""),
        ("2", 1, f"{MODEL}: version 2 is expected, version 1 serves"),
        ("1@bbbbbbbb", 1, f"{MODEL} version 1: files with the SHA-256 bbbbbbbb are expected, {64 * 'a'} serves"),
    ):
        arguments = ["--url", url, f"--expect={MODEL}={expected}", "--wait=0.01"]
        assert status.run(arguments) == code
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG ")] == (
            [f"WRONG {problem}"] if problem else []
        )
        assert status.run([*arguments, "--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["unmet"] == ([problem] if problem else [])
        assert report["models"][0]["digest"] == "sha256:" + 64 * "a"
    # A failed version is asked about again until the time is over, or until it is gone.
    looks: list[dict[str, Any]] = []

    def recover_at_the_third_poll(options: Any) -> dict[str, Any]:
        looks.append(read_report(options))
        if len(looks) == 2:
            ANSWERS["/v2/repository/index"] = [good]
        return looks[-1]

    read_report = status.read_report
    monkeypatch.setattr(status, "read_report", recover_at_the_third_poll)
    monkeypatch.setitem(ANSWERS, "/v2/repository/index", [good, bad])
    assert status.run(["--url", url, "--wait=60"]) == 0
    assert len(looks) == 3
    # A version that is being loaded is nothing wrong, and is waited for.
    looks.clear()
    ANSWERS["/v2/repository/index"] = [good, {**bad, "state": "LOADING", "reason": ""}]
    assert status.run(["--url", url]) == 0
    assert len(looks) == 1
    looks.clear()
    assert status.run(["--url", url, "--wait=60"]) == 0
    assert len(looks) == 3


def test_watching_with_an_expectation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (f"--expect={MODEL}=1", "--wait=3"):
        with pytest.raises(SystemExit) as ended:
            status.run(["--url=http://127.0.0.1:1", "--watch", flag])
        assert ended.value.code == 2
        assert "--expect and --wait end with an exit code" in capsys.readouterr().err


def test_watching_repeats_until_ctrl_c_and_exits_zero(url: str) -> None:
    with subprocess.Popen(
        [str(COMMAND), "status", "--url", url, "--watch=0.1", "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        reports = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert [report["ready"] for report in reports] == [True] * 3
    assert process.returncode == 0


def test_watching_continues_while_the_server_is_away() -> None:
    with subprocess.Popen(
        [str(COMMAND), "status", "--url=http://127.0.0.1:1", "--watch=0.1"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert all("no answer from http://127.0.0.1:1" in line for line in lines)
    assert process.returncode == 0
