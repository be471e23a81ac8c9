"""`edge-server fleet status`: the hosts that are given, and the rule that finds differences."""

from __future__ import annotations

import argparse
import json
import os
import pty
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli import expected_versions
from edge_server.plugins.fleet.command import run
from edge_server.plugins.fleet.reports import status_command
from edge_server.plugins.fleet.reports.box_report import BoxReport
from edge_server.plugins.fleet.reports.http_boxes import read_hosts
from edge_server.plugins.fleet.reports.version_differences import (
    find_differences,
    find_other_runtimes,
    find_unknown,
    served_versions,
)


def report(version: str = "1.0", **served: str) -> dict[str, Any]:
    models = [
        {"name": name, "version": number, "state": "READY" if number.isdigit() else "UNAVAILABLE"}
        for name, numbers in served.items()
        for number in numbers.split()
    ]
    return {"version": version, "models": models}


def test_hosts_are_names_addresses_urls_or_files_with_one_per_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the yard\ncamera-1\n\ncamera-2:8100  # new\nhttps://camera-3:8443\n")
    assert read_hosts(["box", "[::1]", "camera-1", str(tmp_path / "hosts")]) == [
        "http://box:8000", "http://[::1]:8000", "http://camera-1:8000", "http://camera-2:8100", "https://camera-3:8443",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["a b", "http://", "box:port", "ftp://box:1", "http://me:secret@box:1"])
def test_an_invalid_host_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected http://HOST:PORT, got"):
        read_hosts([text])


def test_a_file_without_hosts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(argparse.ArgumentTypeError, match="expected 1 to 1000 hosts, got 0"):
        read_hosts([str(tmp_path / "hosts")])


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(a="1"), report(a="1")], [[], []]),
        ([report(a="1"), report(a="2"), report(a="2")], [["a: version 1, most others: version 2"], [], []]),
        ([report(a="1"), report(a="10")], [["a: version 1, most others: version 10"], []]),
        ([report(a="1"), report()], [[], ["a: not served, most others: version 1"]]),
        ([report(), report(), report(a="1")], [[], [], ["a: version 1, most others: not served"]]),
        ([report(a="1 2"), report(a="2 1"), report(a="failed")],
         [[], [], ["a: not served, most others: version 1, version 2"]]),
        ([report("1.0"), report("1.1"), report("1.1")],
         [["edge-server: version 1.0, most others: version 1.1"], [], []]),
    ],
)  # fmt: skip
def test_a_server_differs_if_it_serves_other_versions_than_most(
    reports: list[dict[str, Any]], expected: list[list[str]]
) -> None:
    served = {str(number): served_versions(item) for number, item in enumerate(reports)}
    assert list(find_differences(served).values()) == expected


def files(**digests: str) -> dict[str, str]:
    """Return what a server serves: version 1 of each model; "": the digest of its files is not known."""
    models = [
        {"name": name, "version": "1", "state": "READY", "digest": digest and f"sha256:{digest}"}
        for name, digest in digests.items()
    ]
    return served_versions({"version": "1.0", "models": models})


def test_a_server_that_does_not_know_its_files_hides_no_difference_between_the_others() -> None:
    reports = {"a": files(m="aaaaaaaa"), "b": files(m="bbbbbbbb"), "c": files(m=""), "d": files(m="bbbbbbbb")}
    assert find_differences(reports) == {
        "a": ["m: version 1 (aaaaaaaa), most others: version 1 (bbbbbbbb)"], "b": [], "c": [], "d": [],
    }  # fmt: skip
    assert find_unknown(reports) == {
        "a": [], "b": [], "c": ["m: version 1, without the SHA-256 of its files"], "d": [],
    }  # fmt: skip


def test_a_server_that_runs_a_model_by_another_runtime_is_named_and_differs_in_nothing() -> None:
    reports = {
        url: {"version": "1.0", "models": [{"name": "m", "version": "1", "state": "READY", "runtime": runtime}]}
        for url, runtime in (("a", "onnxruntime 1.32.0"), ("b", "openvino 2026.4.1"), ("c", "onnxruntime 1.32.0"))
    }
    reports["d"] = {"version": "1.0", "models": [{"name": "m", "version": "1", "state": "READY"}]}
    expected = ["m: version 1 by openvino 2026.4.1, on most others by onnxruntime 1.32.0"]
    assert find_other_runtimes(reports) == {"a": [], "b": expected, "c": [], "d": []}
    assert not any(find_differences({url: served_versions(report) for url, report in reports.items()}).values())


def test_the_files_of_a_model_that_one_server_alone_has_need_no_comparison() -> None:
    assert find_unknown({"a": files(m="aaaaaaaa", own=""), "b": files(m="aaaaaaaa")}) == {"a": [], "b": []}


def test_on_a_terminal_long_reasons_are_wrapped_and_in_a_pipe_they_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    assert run(["status", url]) == 1
    reason = capsys.readouterr().out.splitlines()[-1]
    assert reason.startswith(f"{url}: ")
    assert len(reason) > 24
    main, side = pty.openpty()
    with monkeypatch.context() as patch, os.fdopen(side, "w", encoding="utf-8") as terminal:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "24")
        patch.setattr(sys, "stdout", terminal)
        assert run(["status", url]) == 1
        terminal.flush()
        text = os.read(main, 65536).decode()
    os.close(main)
    written = text.replace("\r\n", "\n").rstrip()
    assert f"{url}:\n  " in written
    assert reason not in written


class Clock:
    """In place of the module `time`: sleeping takes no time."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class Boxes:
    """Two boxes with version 1 of one model. They know the digests of its files from the third look on."""

    def __init__(self, *digests: str) -> None:
        self._digests = digests
        self.looks = 0

    def read(self) -> list[BoxReport]:
        self.looks += 1
        return [
            BoxReport(name, "", {
                "ready": True, "version": "1.0", "streams": None,
                "models": [{"name": "m", "version": "1", "state": "READY", "reason": "",
                            "digest": f"sha256:{digest}" if self.looks >= 3 else ""}],
                "plugins": [],
            })
            for name, digest in zip(("a", "b"), self._digests, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("digests", "code"), [(("aa", "bb"), 1), (("aa", "aa"), 0)])
def test_waiting_goes_on_until_the_files_of_all_versions_are_known(
    monkeypatch: pytest.MonkeyPatch, digests: tuple[str, str], code: int
) -> None:
    boxes = Boxes(*digests)
    monkeypatch.setattr(status_command, "open_boxes", lambda options: boxes)
    monkeypatch.setattr(expected_versions, "time", Clock())
    assert run(["status", "--wait=60", "a", "b"]) == code
    assert boxes.looks == (3 if code == 0 else boxes.looks)
    assert boxes.looks >= 3


@pytest.mark.parametrize("wait", [[], ["--wait=0.01"]], ids=["at_once", "waited"])
def test_servers_whose_files_nobody_can_compare_do_not_count_as_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wait: list[str]
) -> None:
    monkeypatch.setattr(status_command, "open_boxes", lambda options: Boxes("aa", "aa"))
    assert run(["status", *wait, "a", "b"]) == 75
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        f"{name} is not known to be equal: m: version 1, without the SHA-256 of its files" for name in ("a", "b")
    ]
    assert run(["status", *wait, "--json", "a", "b"]) == 75
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [(host["differs"], host["unknown"]) for host in hosts] == [
        ([], ["m: version 1, without the SHA-256 of its files"])
    ] * 2
    assert run(["status", *wait, "--expect=m=2", "a", "b"]) == 1, "what is wrong counts for more"
