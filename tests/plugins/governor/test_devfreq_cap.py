"""Clock limit of a Jetson's GPU: lowered, restored, and left alone if another program changes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.governor.sensors.clock_actuators import DevfreqCap

FOLDERS = {
    "orin_nano_jp6": "/sys/class/devfreq/17000000.gpu",
    "orin_nx_jp5": "/sys/class/devfreq/17000000.ga10b",
    "agx_orin_jp6": "/sys/class/devfreq/17000000.gpu",
    "thor_jp7": "/sys/class/devfreq/gpu-gpc-0",
}


def limit_hz(board: Any) -> int:
    return int(board.at(f"{FOLDERS[board.name]}/max_freq").read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_clock_is_lowered_to_an_available_frequency_and_restored(name: str, make_board: Any) -> None:
    board = make_board(name)
    before_hz = limit_hz(board)
    steps = {int(word) for word in board.at(f"{FOLDERS[name]}/available_frequencies").read_text().split()}
    cap = DevfreqCap(board.root)
    assert cap.highest_hz() == before_hz
    for part in (0.8, 0.6, 0.5):
        told_hz = cap.cap(int(before_hz * part))
        assert told_hz == limit_hz(board) <= before_hz * part
        assert told_hz in steps
        assert (cap.highest_hz(), cap.memo()) == (before_hz, {"max_freq": before_hz})
    cap.release()
    assert limit_hz(board) == before_hz
    cap.release()
    assert limit_hz(board) == before_hz


def test_a_limit_set_by_another_program_is_kept(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    path = f"{FOLDERS['orin_nano_jp6']}/max_freq"
    cap = DevfreqCap(board.root)
    cap.cap(700_000_000)
    board.write(path, 408_000_000)
    assert cap.highest_hz() == 408_000_000
    cap.release()
    assert limit_hz(board) == 408_000_000
    cap.cap(700_000_000)
    board.write(path, 1_020_000_000)
    cap.cap(510_000_000)
    cap.release()
    assert limit_hz(board) == 1_020_000_000


def test_without_write_permission_the_error_names_who_may(make_board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board("orin_nano_jp6")
    before_hz = limit_hz(board)
    cap = DevfreqCap(board.root)

    def refuse(path: Path, flags: int, *more: Any) -> int:
        if flags & os.O_WRONLY and path.name == "max_freq":
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, flags, *more)

    really_open = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=r"17000000.gpu/max_freq may not be written by this user .*: only root"):
        cap.cap(500_000_000)
    cap.release()
    assert (limit_hz(board), cap.highest_hz()) == (before_hz, before_hz)


def test_a_machine_without_devfreq_has_no_cap(make_board: Any) -> None:
    board = make_board("x86_box")
    cap = DevfreqCap(board.root)
    assert (cap.highest_hz(), cap.memo()) == (None, {})
    with pytest.raises(OSError, match="is not there"):
        cap.cap(1_000_000_000)
    assert not (board.root / "sys/class/devfreq").exists()
    cap.release()


def test_a_removed_driver_is_an_error_and_creates_no_file(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    cap = DevfreqCap(board.root)
    cap.cap(500_000_000)
    board.remove(f"{FOLDERS['orin_nano_jp6']}/max_freq")
    with pytest.raises(FileNotFoundError):
        cap.cap(400_000_000)
    with pytest.raises(FileNotFoundError):
        cap.release()
    assert not board.at(f"{FOLDERS['orin_nano_jp6']}/max_freq").exists()


def test_a_limit_that_is_temporarily_unreadable_is_still_restored(
    make_board: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = make_board("orin_nano_jp6")
    before_hz = limit_hz(board)
    cap = DevfreqCap(board.root)
    answers = iter([before_hz, None])
    with monkeypatch.context() as patched:
        patched.setattr(cap, "_limit_hz", lambda: next(answers))
        told_hz = cap.cap(700_000_000)
    assert told_hz == limit_hz(board) < before_hz
    cap.release()
    assert limit_hz(board) == before_hz


def test_an_unknown_limit_is_not_changed(make_board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board("orin_nano_jp6")
    before_hz = limit_hz(board)
    cap = DevfreqCap(board.root)
    with monkeypatch.context() as patched:
        patched.setattr(cap, "_limit_hz", lambda: None)
        with pytest.raises(OSError, match="cannot be read"):
            cap.cap(700_000_000)
    assert limit_hz(board) == before_hz
