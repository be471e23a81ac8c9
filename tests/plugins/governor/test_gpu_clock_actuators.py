"""What each actuator of the clock cap promises, and what devfreq alone does: lowered, restored, refused, left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from edge_server.plugins.governor.clock_cap import ClockCap
from edge_server.plugins.governor.control_policy import PolicyDecision, ThermalLevel
from edge_server.plugins.governor.sensors.gpu_clock_actuators import DevfreqCap, NvmlCap

FOLDERS = {
    "orin_nano_jp6": "/sys/class/devfreq/17000000.gpu",
    "orin_nx_jp5": "/sys/class/devfreq/17000000.ga10b",
    "agx_orin_jp6": "/sys/class/devfreq/17000000.gpu",
    "thor_jp7": "/sys/class/devfreq/gpu-gpc-0",
}
SHORT = PolicyDecision(ThermalLevel.HOT, share=0.3)


def limit_hz(board: Any) -> int:
    return int(board.at(f"{FOLDERS[board.name]}/max_freq").read_text())


class Gpu(NamedTuple):
    """A GPU whose clock can be capped. `limits_hz` are those in effect, `refuse` takes the permission away."""

    make: Callable[[], Any]
    limits_hz: Callable[[], set[int]]
    refuse: Callable[[], object]
    steps_hz: set[int]


@pytest.fixture(params=[*FOLDERS, "nvml"])
def gpu(request: pytest.FixtureRequest, make_board: Any, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    if request.param == "nvml":
        nvidia, fake_nvml = request.getfixturevalue("nvidia"), request.getfixturevalue("fake_nvml")
        cards = [nvidia.add_gpu(), nvidia.add_gpu()]

        def locked_hz() -> set[int]:
            return {1_000_000 * (nvidia.locked_clocks(card) or (0, 1_590))[1] for card in cards}

        no_permission = fake_nvml.Error(fake_nvml.NO_PERMISSION)
        steps = {megahertz * 1_000_000 for megahertz in range(1_591)}
        return Gpu(NvmlCap, locked_hz, lambda: [nvidia.set(card, lock=no_permission) for card in cards], steps)
    board = make_board(request.param)
    offered = board.at(f"{FOLDERS[request.param]}/available_frequencies").read_text().split()

    def refuse() -> None:
        really_open = os.open

        def open_unless_max_freq(path: Path, flags: int, *more: Any) -> int:
            if flags & os.O_WRONLY and Path(path).name == "max_freq":
                raise PermissionError(13, "Permission denied", str(path))
            return really_open(path, flags, *more)

        monkeypatch.setattr(os, "open", open_unless_max_freq)

    return Gpu(lambda: DevfreqCap(board.root), lambda: {limit_hz(board)}, refuse, set(map(int, offered)))


def test_the_clock_is_lowered_to_an_available_frequency_and_restored(gpu: Gpu) -> None:
    cap, (before_hz,) = gpu.make(), gpu.limits_hz()
    assert cap.highest_hz() == before_hz
    for part in (0.8, 0.6, 0.5):
        told_hz = cap.cap(int(before_hz * part))
        assert told_hz <= before_hz * part
        assert gpu.limits_hz() == {told_hz} <= gpu.steps_hz
        assert cap.highest_hz() == before_hz
    for _ in range(2):
        cap.release()
        assert gpu.limits_hz() == {before_hz}


def test_without_permission_the_error_names_who_may_and_nothing_changes(gpu: Gpu) -> None:
    cap, before = gpu.make(), gpu.limits_hz()
    gpu.refuse()
    with pytest.raises(PermissionError, match=r"may not be written by this user .*: only root|may not set clocks"):
        cap.cap(500_000_000)
    assert {cap.highest_hz()} == gpu.limits_hz() == before


def squeeze(cap: ClockCap) -> None:
    for second in range(25):
        cap.step(SHORT, float(second))


def test_a_cap_is_in_effect_until_its_end_and_one_left_by_a_crash_until_the_next_run(gpu: Gpu, tmp_path: Path) -> None:
    before, memory = gpu.limits_hz(), tmp_path / "clock_cap.json"
    cap = ClockCap(gpu.make(), memory)
    squeeze(cap)
    assert gpu.limits_hz() == {cap.cap_hz} < gpu.steps_hz
    assert gpu.limits_hz() != before
    cap.close()
    assert (gpu.limits_hz(), memory.exists()) == (before, False)
    killed = ClockCap(gpu.make(), memory)
    squeeze(killed)
    assert gpu.limits_hz() != before
    ClockCap(gpu.make(), memory).close()
    assert (gpu.limits_hz(), memory.exists()) == (before, False)
    killed.close()


def test_a_refused_cap_is_reported_and_leaves_nothing_for_the_next_run(gpu: Gpu, tmp_path: Path) -> None:
    before, memory = gpu.limits_hz(), tmp_path / "clock_cap.json"
    gpu.refuse()
    cap = ClockCap(gpu.make(), memory)
    squeeze(cap)
    cap.close()
    assert (cap.cap_hz, gpu.limits_hz(), memory.exists()) == (None, before, False)
    assert "may" in cap.problem


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
