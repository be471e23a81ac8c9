"""Rates, wrapping counters, moving averages, and files that appear and disappear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.governor.sensors.counter_rates import EnergyMeter, EventRate, MovingAverage
from edge_server.telemetry.sysfs import FIND_AGAIN_S, FoundPaths, MissingReason, SysfsFiles


def test_a_rate_needs_two_readings_and_a_minute_to_be_sustained() -> None:
    rate = EventRate()
    assert rate.feed(100, 0.0) == (None, None)
    assert rate.feed(110, 0.5) == (20.0, None)
    for second in range(1, 62):
        per_s, sustained = rate.feed(110 + 3 * second, 0.5 + second)
    assert per_s == 3.0
    assert sustained == pytest.approx(3.0, abs=0.2)


def test_a_counter_that_went_back_is_started_again() -> None:
    rate = EventRate()
    rate.feed(100, 0.0)
    rate.feed(200, 1.0)
    assert rate.feed(3, 2.0) == (None, None)
    assert rate.feed(5, 3.0) == (2.0, None)


def test_two_readings_at_the_same_time_give_no_rate() -> None:
    rate = EventRate()
    rate.feed(100, 1.0)
    rate.feed(110, 2.0)
    assert rate.feed(111, 2.0) == (10.0, None)
    assert rate.feed(130, 3.0) == (20.0, None)


@given(
    range_=st.integers(10**6, 10**12),
    start=st.integers(0, 10**12),
    steps=st.lists(st.floats(0.0, 0.999), min_size=1, max_size=50),
)
def test_energy_is_the_same_whether_the_counter_wraps_or_not(range_: int, start: int, steps: list[float]) -> None:
    meter = EnergyMeter(range_)
    true = start % range_
    assert meter.feed(true, 0.0) == (true, None)
    for second, part in enumerate(steps, 1):
        step = int(part * range_)
        true += step
        assert meter.feed(true % range_, float(second)) == (true, float(step))


@given(counts=st.lists(st.integers(0, 10**12), min_size=1, max_size=50), range_=st.none() | st.integers(1, 10**12))
def test_energy_never_decreases_whatever_the_counter_does(counts: list[int], range_: int | None) -> None:
    meter = EnergyMeter(range_)
    sums = [meter.feed(count, float(second))[0] for second, count in enumerate(counts)]
    assert sums == sorted(sums)


def test_a_reset_counter_without_a_range_continues_from_its_value() -> None:
    meter = EnergyMeter()
    meter.feed(1000, 0.0)
    assert meter.feed(40, 1.0) == (1040, 40.0)


def test_power_over_a_gap_with_a_possible_wrap_is_not_reported() -> None:
    meter = EnergyMeter(1000)
    meter.feed(100, 0.0)
    assert meter.feed(200, 100.0, 30.0) == (200, None)
    assert meter.feed(260, 101.0, 30.0) == (260, 60.0)


@given(values=st.lists(st.floats(0, 1), min_size=1), gaps=st.lists(st.floats(0, 100), min_size=1))
def test_a_mean_stays_between_the_values(values: list[float], gaps: list[float]) -> None:
    smooth, now_s = MovingAverage(2.0), 0.0
    for value, gap_s in zip(values, gaps, strict=False):
        now_s += gap_s
        assert min(values) - 1e-9 <= smooth.feed(value, now_s) <= max(values) + 1e-9


def test_paths_are_searched_at_once_if_none_is_known_and_periodically_afterwards() -> None:
    there: list[str] = []
    looks = []

    def find() -> list[str]:
        looks.append(1)
        return list(there)

    found = FoundPaths(find)
    assert found.items(0.0) == []
    assert found.items(0.1) == []
    there.append("late driver")
    assert found.items(0.2) == ["late driver"]
    there.append("later driver")
    assert found.items(0.3) == ["late driver"]
    assert found.items(0.2 + FIND_AGAIN_S) == ["late driver", "later driver"]
    assert len(looks) == 4
    found.forget()
    found.items(0.3 + FIND_AGAIN_S)
    assert len(looks) == 5


def test_the_reason_why_a_file_has_no_value(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1 2\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    files = SysfsFiles(tmp_path)
    assert files.number("/none") == MissingReason("/none is not there")
    assert files.number("/text/below") == MissingReason("/text/below is not there")
    text = files.number("/text")
    assert isinstance(text, MissingReason)
    assert text.reason.endswith("given '1 2'")
    assert files.number("/folder") == MissingReason("/folder: Is a directory")
    assert files.number("/pipe") == MissingReason("/pipe: switched off for now (the kernel says to try again)", True)
    os.close(descriptor)


def test_an_unreadable_file_is_reported_as_permission_denied(tmp_path: Path) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    assert SysfsFiles(tmp_path, read=refuse).number("/x") == MissingReason("/x may not be read by this user")


def test_names_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        (tmp_path / f"zone{number}").mkdir()
    assert SysfsFiles(tmp_path).names("/", r"zone\d+") == ["zone1", "zone2", "zone10"]
    assert SysfsFiles(tmp_path).names("/none") == []
