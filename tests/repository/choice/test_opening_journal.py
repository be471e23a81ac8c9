"""The journal of versions that are being opened: what the next start makes of an entry that the last one left."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_server.errors import LoadError
from edge_server.repository.choice import opening_journal
from edge_server.repository.choice.opening_journal import FILE_NAME, OpeningJournal


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


Leave = Callable[..., None]


@pytest.fixture
def leave() -> Leave:
    """`leave(journal, (name, number, fingerprint), ...)`: begin to open versions, and end without a word."""
    kept = []

    def run(journal: OpeningJournal, *versions: tuple[str, int, str]) -> None:
        for version in versions:
            kept.append(journal.opening(*version))
            kept[-1].__enter__()

    return run


def end_as(folder: Path, pid: int, boot: str | None = None) -> None:
    """Let the entries be of another process."""
    content = json.loads((folder / FILE_NAME).read_text())
    for entry in content["open"]:
        entry |= {"pid": pid, "boot": boot or entry["boot"]}
    (folder / FILE_NAME).write_text(json.dumps(content))


def test_a_version_that_ended_the_server_twice_is_refused_until_its_files_change(
    tmp_path: Path, leave: Leave, dead: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        leave(OpeningJournal(tmp_path), ("m", 1, "a"))
        end_as(tmp_path, dead)
    for _ in range(2):  # further starts know it as well
        journal = OpeningJournal(tmp_path)
        with pytest.raises(LoadError, match="model 'm' version 1: the server ended 2 times without an error message"):
            journal.opening("m", 1, "a").__enter__()
    assert "the server ended when it opened model 'm' version 1" in caplog.text
    with journal.opening("m", 1, "b"), journal.opening("m", 2, "a"), journal.opening("other", 1, "a"):
        pass


def test_a_server_that_was_killed_once_while_it_opened_a_version_opens_it_again(
    tmp_path: Path, leave: Leave, dead: int
) -> None:
    for _ in range(3):
        leave(OpeningJournal(tmp_path), ("m", 1, "a"))
        end_as(tmp_path, dead)
        with OpeningJournal(tmp_path).opening("m", 1, "a"):
            pass


def test_a_server_in_a_container_has_the_number_of_the_one_before(tmp_path: Path, leave: Leave) -> None:
    for _ in range(2):
        leave(OpeningJournal(tmp_path), ("m", 1, "a"))
    with pytest.raises(LoadError):
        OpeningJournal(tmp_path).opening("m", 1, "a").__enter__()


def test_a_version_that_was_opened_or_refused_is_opened_again(tmp_path: Path, dead: int) -> None:
    journal = OpeningJournal(tmp_path)
    with journal.opening("m", 1, "a"):
        pass
    with pytest.raises(LoadError, match="broken"), journal.opening("m", 2, "a"):
        raise LoadError("broken")
    end_as(tmp_path, dead)
    again = OpeningJournal(tmp_path)
    with again.opening("m", 1, "a"), again.opening("m", 2, "a"):
        pass


@pytest.mark.parametrize("reason", ["it was told to stop", "the machine lost power", "it still runs"])
def test_no_version_is_blamed_for_an_end_of_another_kind(tmp_path: Path, leave: Leave, dead: int, reason: str) -> None:
    journal = OpeningJournal(tmp_path)
    leave(journal, ("m", 1, "a"))
    if reason == "it was told to stop":
        journal.close()
        leave(journal, ("m", 2, "a"))
    end_as(tmp_path, os.getppid() if reason == "it still runs" else dead, "x" if "power" in reason else None)
    again = OpeningJournal(tmp_path)
    with again.opening("m", 1, "a"), again.opening("m", 2, "a"):
        pass


@pytest.mark.parametrize("versions", [[("a", 1, ""), ("b", 1, "")], [("b", 1, "")]])
def test_after_an_end_each_version_is_opened_alone_until_all_are_known(
    tmp_path: Path, leave: Leave, dead: int, versions: list[tuple[str, int, str]]
) -> None:
    leave(OpeningJournal(tmp_path), *versions)
    end_as(tmp_path, dead)
    journal = OpeningJournal(tmp_path)
    events: list[str] = []

    def open_b() -> None:
        with journal.opening("b", 1, ""):
            events.append("b")

    with journal.opening("a", 1, ""):
        other = threading.Thread(target=open_b)
        other.start()
        other.join(0.2)
        events.append("a")
        entries = json.loads((tmp_path / FILE_NAME).read_text())["open"]
        assert [entry["version"][0] for entry in entries] == ["a"]
    other.join(60)
    assert events == ["a", "b"]
    # Neither ended the server: both are opened at once again.
    with journal.opening("a", 1, ""), journal.opening("b", 1, ""):
        pass


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"open": [3], "ended": []}',
        '{"open": [], "ended": [[1]]}',
        '{"open": [{"version": [[], [], []], "pid": 1, "boot": ""}], "ended": []}',
        "[" * 10**5,
    ],
)
def test_a_damaged_journal_counts_as_empty_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with caplog.at_level(logging.WARNING), OpeningJournal(tmp_path).opening("m", 1, "a"):
        pass
    assert "is not used" in caplog.text
    (tmp_path / FILE_NAME).write_bytes(b" " * (opening_journal.MAX_FILE_BYTES + 1))
    OpeningJournal(tmp_path)
    assert "larger than" in caplog.text


def test_without_a_folder_that_can_be_written_versions_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for journal in (OpeningJournal(None), OpeningJournal(tmp_path / "file/below")):
        with journal.opening("m", 1, "a"):
            pass
        journal.close()
