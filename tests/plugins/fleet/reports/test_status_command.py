"""`edge-server fleet status`: the hosts that are given, and the rule that finds differences."""

from __future__ import annotations

import argparse
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
from edge_server.plugins.fleet.reports.served_versions import find_differences


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


@pytest.mark.parametrize("text", ["a b", "http://", "box:port", "ftp://box:1"])
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
    assert list(find_differences({str(number): item for number, item in enumerate(reports)}).values()) == expected


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


@pytest.mark.parametrize(("digests", "code"), [(("aa", "bb"), 1), (("aa", "aa"), 0)])
def test_waiting_goes_on_until_the_files_of_all_versions_are_known(
    monkeypatch: pytest.MonkeyPatch, digests: tuple[str, str], code: int
) -> None:
    class Boxes:
        looks = 0

        def read(self) -> list[BoxReport]:
            self.looks += 1
            return [
                BoxReport(name, "", {
                    "ready": True, "version": "1.0", "streams": None,
                    "models": [{"name": "m", "version": "1", "state": "READY", "reason": "",
                                "digest": f"sha256:{digest}" if self.looks >= 3 else ""}],
                    "plugins": [],
                })
                for name, digest in zip(("a", "b"), digests, strict=True)
            ]  # fmt: skip

        def close(self) -> None:
            pass

    boxes = Boxes()
    monkeypatch.setattr(status_command, "open_boxes", lambda options: boxes)
    monkeypatch.setattr(expected_versions, "POLL_S", 0.01)
    assert run(["status", "--wait=1", "a", "b"]) == code
    assert boxes.looks >= 3
