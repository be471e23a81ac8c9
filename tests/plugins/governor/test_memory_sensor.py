"""Memory sensor: memory and pressure files of the kernel, also invalid ones."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from edge_server.plugins.governor.readings import MachineReading, MemoryState
from edge_server.plugins.governor.sensors.memory import MemorySensor
from edge_server.telemetry.sysfs import SysfsFiles

MEMINFO, PRESSURE = "/proc/meminfo", "/proc/pressure/memory"

KNOWN = {
    "orin_nano_jp6": MemoryState(7802936 * 1024, 4311220 * 1024, 1.25, 0.5),
    "orin_nx_jp5": MemoryState(15638356 * 1024, 12874632 * 1024, None, None),
    "thor_jp7": MemoryState(128785300 * 1024, 98213024 * 1024, 1.25, 0.5),
    "x86_box": MemoryState(16106412 * 1024, 9123456 * 1024, 1.25, 0.5),
}


def read(board: Any, **options: Any) -> MachineReading:
    return MemorySensor(SysfsFiles(board.root, **options)).read(7.0)


@pytest.mark.parametrize("name", KNOWN)
def test_memory_of_each_board(name: str, make_board: Any) -> None:
    reading = read(make_board(name))
    assert (reading.at_s, reading.memory) == (7.0, KNOWN[name])


def test_available_memory_is_not_free_memory(make_board: Any) -> None:
    board = make_board("")
    board.write(MEMINFO, "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\nHugePages_Total: 0")
    assert read(board).memory == MemoryState(1_024_000, 921_600)


@pytest.mark.parametrize(
    ("text", "some", "full"),
    [
        ("some avg10=12.34 avg60=1.00 avg300=0.50 total=9\nfull avg10=3 avg60=0.00 avg300=0.00 total=1", 12.34, 3.0),
        ("some avg10=100.00 avg60=1.00 avg300=0.50 total=9", 100.0, None),
        ("some avg60=1.00", None, None),
        ("some avg10=nan", None, None),
        ("", None, None),
        ("full avg10=0.50", None, 0.5),
    ],
)
def test_pressure_of_the_last_ten_seconds(text: str, some: float | None, full: float | None, make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    board.write(PRESSURE, text)
    memory = read(board).memory
    assert (memory.some_percent, memory.full_percent) == (some, full)
    assert memory.total_bytes == KNOWN["orin_nano_jp6"].total_bytes


@pytest.mark.sample
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EACCES, errno.ENOENT, errno.EIO, errno.EAGAIN])
@pytest.mark.parametrize(("path", "metric"), [(MEMINFO, "memory"), (PRESSURE, "memory_pressure")])
def test_one_failing_file_is_reported_by_name(path: str, metric: str, code: int, make_board: Any, boards: Any) -> None:
    board = make_board("x86_box")
    faults = boards.Faults(board)
    faults.errors = {path: code}
    reading = read(board, read=faults)
    assert path in reading.missing[metric]
    assert len(reading.missing) == len(reading.sources) == 1
    other = (reading.memory.total_bytes is None, reading.memory.some_percent is None)
    assert other == (path == MEMINFO, path == PRESSURE)


@pytest.mark.parametrize("text", ["", "garbage \xff", "MemTotal: many kB", "MemTotal:      12 pages"])
def test_invalid_content_gives_no_memory_reading(text: str, make_board: Any) -> None:
    board = make_board("x86_box")
    board.write(MEMINFO, text.encode("latin-1"))
    reading = read(board)
    assert (reading.memory.total_bytes, reading.memory.available_bytes) == (None, None)
    assert "memory" in reading.missing


def test_a_change_is_seen_by_the_next_reading(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    sensor = MemorySensor(SysfsFiles(board.root))
    assert sensor.read(0.0).memory == KNOWN["orin_nano_jp6"]
    board.write(MEMINFO, "MemTotal: 8 kB\nMemAvailable: 4 kB")
    board.remove(PRESSURE)
    assert sensor.read(0.0).memory == MemoryState(8192, 4096)
    board.restore(PRESSURE)
    assert sensor.read(0.0).memory == MemoryState(8192, 4096, 1.25, 0.5)
