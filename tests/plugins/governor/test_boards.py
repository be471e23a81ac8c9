"""Reconstructed boards of files for the other tests: format, injected faults, changed folder numbers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

BOARDS = ["orin_nano_jp6", "orin_nx_jp5", "agx_orin_jp6", "thor_jp7", "x86_box"]


def test_every_recorded_board_is_tested(boards: Any) -> None:
    assert sorted(boards.NAMES) == sorted(BOARDS) == sorted(path.stem for path in boards.BOARDS.glob("*.txt"))


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_marked_as_reconstructed_and_written_to_a_folder(name: str, boards: Any, make_board: Any) -> None:
    board = make_board(name)
    assert f"`{name}`" in (boards.BOARDS / "README.md").read_text()
    for path, content in board.files.items():
        if content is boards.OFF:
            assert board.at(path).is_fifo()
        else:
            assert board.at(path).read_bytes() == content


def test_lines_of_the_format(boards: Any) -> None:
    files = boards.read_board("# remark\n\n/a/b = x = y\\n\\nz\n/c = one\\0two\\0\n/d ! EAGAIN\n")
    assert files == {"/a/b": b"x = y\n\nz\n", "/c": b"one\0two\0", "/d": boards.OFF}


@pytest.mark.parametrize("line", ["a = b", "/a", "/a =", "/a ! EIO", "nonsense"])
def test_an_invalid_line_is_refused(line: str, boards: Any) -> None:
    with pytest.raises(ValueError, match=f"line 1: .*{line}"):
        boards.read_board(line)


def test_a_disabled_sensor_returns_eagain_in_another_process(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    path = f"{board.zone('cpu-thermal')}/temp"
    read = f"import os; os.read(os.open({str(board.at(path))!r}, os.O_RDONLY | os.O_NONBLOCK), 9)"
    board.switch_off(path)
    off = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert "BlockingIOError" in off.stderr
    board.restore(path)
    assert subprocess.run([sys.executable, "-c", read], capture_output=True).returncode == 0


def test_a_replaced_file_is_never_seen_empty_or_incomplete(make_board: Any) -> None:
    board = make_board("thor_jp7")
    path = f"{board.zone('tj-thermal')}/temp"
    seen: set[str] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            seen.add(board.at(path).read_text())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for at_c in range(400):
        board.set_temperature("tj-thermal", 40 + at_c % 2)
    is_over.set()
    watcher.join(10)
    assert seen <= {"43750\n", "40000\n", "41000\n"}


@pytest.mark.sample
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("seed", range(3))
def test_renumbered_folders_keep_their_contents(name: str, seed: int, make_board: Callable[[str], Any]) -> None:
    board = make_board(name)
    before = sorted(content for content in board.files.values() if isinstance(content, bytes))
    zones = {path: board.files[path] for path in board.files if path.startswith("/sys/class/thermal")}
    board.shuffle(seed)
    assert sorted(content for content in board.files.values() if isinstance(content, bytes)) == before
    assert {path: board.files.get(path) for path in zones} != zones
    for path in board.files:
        assert board.at(path).exists()
    assert not list(board.root.rglob("*.aside"))


def test_the_power_of_a_rail_is_set_by_its_label(make_board: Any) -> None:
    board = make_board("agx_orin_jp6")
    board.set_rail("VDD_CPU_CV", 9.0)
    folder = board.monitor("ina3221", "VDD_CPU_CV")
    volts, amperes = (int(board.at(f"{folder}/{name}2_input").read_text()) / 1000 for name in ("in", "curr"))
    assert volts * amperes == pytest.approx(9.0, rel=1e-3)
    with pytest.raises(KeyError, match="VDD_NONE"):
        board.set_rail("VDD_NONE", 1.0)


def test_a_broken_file_can_be_restored(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    path = f"{board.zone('tj-thermal')}/temp"
    for break_ in (board.remove, board.block, board.switch_off, lambda path: board.write(path, b"\xff\0")):
        break_(path)
        board.restore(path)
        assert board.at(path).read_bytes() == board.files[path]
