"""Clock cap of the GPU: when it changes, how it is applied, and that it is always removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.governor.clock_cap import ClockCap, ClockRule
from edge_server.plugins.governor.control_policy import PolicyDecision, ThermalLevel
from edge_server.plugins.governor.sensors.gpu_clock_actuators import DevfreqCap

SHORT = PolicyDecision(ThermalLevel.HOT, share=0.3)


def test_the_clock_is_lowered_in_steps_and_never_below_its_minimum() -> None:
    rule = ClockRule()
    parts = [rule.step(SHORT, second / 2) for second in range(400)]
    assert parts[0] == 1.0
    assert sorted(set(parts), reverse=True) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_the_clock_is_raised_slowly_and_completely() -> None:
    rule = ClockRule()
    for second in range(100):
        rule.step(SHORT, float(second))
    assert [rule.step(PolicyDecision(), 100.0 + second) for second in range(59)][-1] == 0.5
    assert [rule.step(PolicyDecision(), 159.0 + second) for second in range(400)][-1] == 1.0


def test_a_lost_sensor_does_not_change_the_clock() -> None:
    rule = ClockRule()
    lost = SHORT._replace(lost=frozenset({"temperature"}))
    assert [rule.step(lost, float(second)) for second in range(100)][-1] == 1.0


def squeeze(cap: ClockCap, begin_s: float = 0.0) -> None:
    for second in range(25):
        cap.step(SHORT, begin_s + second)


class Refusing(DevfreqCap):
    asked = 0

    def cap(self, at_hz: int) -> int:
        self.asked += 1
        raise PermissionError("max_freq: Permission denied")


def test_a_refused_cap_is_tried_once_and_leaves_nothing_for_the_next_run(
    make_board: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = make_board("orin_nano_jp6")
    memory = tmp_path / "clock_cap.json"
    actuator = Refusing(board.root)
    cap = ClockCap(actuator, memory)
    squeeze(cap)
    squeeze(cap, 100.0)
    cap.close()
    assert actuator.asked == 1
    # What the operator sets after this is theirs.
    path = next(board.root.glob("sys/class/devfreq/*gpu*/max_freq"))
    path.write_text("510000000\n")
    ClockCap(DevfreqCap(board.root), memory).close()
    assert int(path.read_text()) == 510_000_000
    assert not memory.exists()
    assert "left behind" not in caplog.text


def test_a_leftover_cap_that_cannot_be_removed_is_remembered(make_board: Any, tmp_path: Path) -> None:
    board = make_board("orin_nano_jp6")
    memory = tmp_path / "clock_cap.json"
    path = next(board.root.glob("sys/class/devfreq/*gpu*/max_freq"))
    before_hz = int(path.read_text())
    killed = ClockCap(DevfreqCap(board.root), memory)
    squeeze(killed)
    without_the_right = Refusing(board.root)
    without_the_right.restore = without_the_right.cap  # type: ignore[assignment, method-assign]
    squeeze(ClockCap(without_the_right, memory))
    ClockCap(DevfreqCap(board.root), memory).close()
    assert int(path.read_text()) == before_hz
    killed.close()
