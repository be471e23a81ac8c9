"""Detection of files open for writing by a query to the kernel, while other processes open and close them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_server.repository.disk import files_being_written
from edge_server.repository.disk.files_being_written import is_open_for_writing

CALLS = 2000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    if is_open_for_writing(str(path)) is None:
        pytest.skip("the file system of the temporary folder knows no leases")
    return path


@pytest.fixture
def writer(file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has it open for writing, until its input ends."""
    code = "import sys; f = open(sys.argv[1], 'ab'); print('open', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process
    process.communicate()


def test_a_file_is_open_for_writing_until_its_last_writer_in_any_process_closed_it(
    file: Path, writer: subprocess.Popen[str]
) -> None:
    with open(file, "r+b"):
        assert is_open_for_writing(str(file)) is True
    assert is_open_for_writing(str(file)) is True
    writer.communicate()
    assert is_open_for_writing(str(file)) is False


def test_readers_are_no_writers_and_links_are_followed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    with open(file, "rb"):
        assert is_open_for_writing(str(file)) is False
    with open(file, "ab"):
        assert is_open_for_writing(str(tmp_path / "link")) is True


def test_entries_that_are_no_files_or_another_users_are_not_reported_and_not_opened(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for a writer
    for name in ("fifo", "nowhere", "."):
        assert is_open_for_writing(str(tmp_path / name)) is None
    monkeypatch.setattr(files_being_written, "_may_lease_all", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with open(file, "ab"):
        assert is_open_for_writing(str(file)) is None


def test_a_query_while_others_open_the_file_repeatedly_disturbs_no_process(file: Path) -> None:
    code = f"import sys\nfor _ in range({CALLS}): open(sys.argv[1], 'ab').close()\nprint('done')"
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True)
    answers = set()
    while process.poll() is None:
        answers.add(is_open_for_writing(str(file)))
    assert process.communicate()[0] == "done\n"
    assert answers <= {True, False}
    assert is_open_for_writing(str(file)) is False
