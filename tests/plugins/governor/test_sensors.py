"""What each sensor of a board's files promises: files that fail alone or all, come late, or change their numbers."""

from __future__ import annotations

import errno
import re
from typing import Any

import pytest

from edge_server.plugins.governor.readings import MachineReading
from edge_server.plugins.governor.sensors.jetson_sensor import TegraSensor
from edge_server.plugins.governor.sensors.non_jetson_sensor import X86Sensor
from edge_server.telemetry.sysfs import FIND_AGAIN_S, SysfsFiles

JETSONS = ["orin_nano_jp6", "orin_nx_jp5", "agx_orin_jp6", "thor_jp7"]
BOARDS = [*JETSONS, "x86_box"]
IDENTITY = ("board", "soc", "l4t", "jetpack", "power_mode", "power_limit_mw")
CPU = "/sys/devices/system/cpu"
HANGS_ON = {
    "/proc/device-tree/model": {"board"},
    "/sys/class/dmi/id/product_name": {"board"},
    "/proc/device-tree/compatible": {"soc"},
    "/etc/nv_tegra_release": {"l4t", "jetpack"},
    "/etc/nvpmodel.conf": {"power_mode", "power_limit_mw"},
    "/var/lib/nvpmodel/status": {"power_mode", "power_limit_mw"},
}
"""File -> the readings that come from it alone."""

KINDS = {
    "/sys/class/hwmon/hwmon2": {"zone"}, "/sys/class/hwmon/hwmon3": {"fan"}, "/sys/class/powercap": {"rail", "energy"},
    f"{CPU}/cpufreq": {"clock"}, f"{CPU}/cpu": {"throttle"}, "/sys/class/drm": {"gpu"},
}  # fmt: skip
"""Begin of a path on the x86 machine -> the kinds of readings that come from there."""


def make_sensor(board: Any, **options: Any) -> TegraSensor | X86Sensor:
    return (TegraSensor if board.name in JETSONS else X86Sensor)(SysfsFiles(board.root, **options))


def metrics(reading: MachineReading) -> dict[str, tuple[Any, str]]:
    """Return metric -> (value, where it came from), for what depends neither on the time nor on numbers of folders."""
    found: dict[str, tuple[Any, str]] = {name: (getattr(reading, name), "") for name in IDENTITY}
    is_jetson = reading.soc is not None or bool(reading.coolers)
    parts: list[tuple[str, Any, tuple[str, ...]]] = [
        ("zone", reading.zones, ("temperature_c", "trips")),
        # The power of RAPL follows from two readings.
        ("rail", reading.rails, ("is_counted", "is_alarmed", "limit_mw", *(["power_mw"] if is_jetson else []))),
        ("cooler", reading.coolers, ("state", "max_state")),
        ("clock", reading.clocks, ("current_hz", "floor_hz", "cap_hz", "highest_hz", "governor")),
        ("over-current", reading.over_current, ("count",)),
        ("throttle", reading.throttles, ("count",)),
        ("energy", reading.energy, ("energy_mj", "is_counted")),
        ("fan", reading.fans, ("duty", "rpm")),
    ]
    for kind, items, names in parts:
        for item in items:
            source = getattr(item, "source", "")
            found[f"{kind} {item.name}"] = (tuple(getattr(item, name) for name in names), source)
    for gpu in reading.gpus:
        for name in ("utilization", "temperature_c", "clock_hz", "reasons"):
            found[f"gpu {gpu.key} {name}"] = (getattr(gpu, name), gpu.sources.get(name, ""))
    return found


def values(reading: MachineReading) -> dict[str, Any]:
    return {name: value for name, (value, _) in metrics(reading).items()}


def owned(board: Any, path: str, known: dict[str, tuple[Any, str]]) -> set[str]:
    """Return the metrics that may change when that file is gone: of its own folder, and those that follow from it."""
    if path in HANGS_ON:
        return HANGS_ON[path]
    if board.name == "x86_box":
        kinds = next((kinds for prefix, kinds in KINDS.items() if path.startswith(prefix)), set())
        return {name for name in known if name.partition(" ")[0] in kinds}
    folder = re.sub(r"/(device/of_node/)?[^/]+$", "", path)
    names = {name for name, (_, source) in known.items() if source.startswith(f"sysfs:{folder}/")}
    if any(name.startswith("rail ") for name in names):
        # Which rails make up the total follows from all labels.
        names |= {name for name in known if name.startswith("rail ")}
    if "hwmon" in path:
        names.add("fan fan")
    return names


def test_each_recorded_board_is_here_and_marked_as_reconstructed(boards: Any) -> None:
    assert sorted(boards.NAMES) == sorted(BOARDS) == sorted(path.stem for path in boards.BOARDS.glob("*.txt"))
    assert all(f"`{name}`" in (boards.BOARDS / "README.md").read_text() for name in BOARDS)


WAYS = {
    "removed": lambda board, path: board.remove(path),
    "a folder": lambda board, path: board.block(path),
    "switched off": lambda board, path: board.switch_off(path),
    "garbage": lambda board, path: board.write(path, b"\xff\xfe -- 9" * 40),
    "empty": lambda board, path: board.write(path, b""),
}
SAMPLED = [*zip(WAYS, [*JETSONS, "thor_jp7"], strict=True), *((way, "x86_box") for way in WAYS)]


# All pairs of a Jetson cost 1.3 s of the processor each; the fast part has each way and each board once.
@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[] if (way, name) in SAMPLED else pytest.mark.full)
        for way in WAYS
        for name in BOARDS
    ],
)
def test_a_failing_file_affects_only_its_own_readings(name: str, way: str, make_board: Any) -> None:
    board = make_board(name)
    sensor = make_sensor(board)
    now_s = 100.0
    known = metrics(sensor.read(now_s))
    for path in board.files:
        may_change = owned(board, path, known)
        WAYS[way](board, path)
        for later_s in (1.0, FIND_AGAIN_S) if way == "removed" else (1.0,):
            now_s += later_s
            seen = values(sensor.read(now_s))
            for metric, (value, _) in known.items():
                assert metric in may_change or seen.get(metric) == value, f"{metric} changed with {path}"
        board.restore(path)
        now_s += FIND_AGAIN_S
        assert values(sensor.read(now_s)) == {metric: value for metric, (value, _) in known.items()}, path


@pytest.mark.sample
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EIO, errno.EACCES, errno.ENODEV, errno.ETIMEDOUT, errno.ENODATA])
def test_a_machine_whose_files_all_fail_has_reasons_and_recovers(
    name: str, code: int, make_board: Any, boards: Any
) -> None:
    board = make_board(name)
    faults = boards.Faults(board)
    sensor = make_sensor(board, read=faults)
    known = values(sensor.read(100.0))
    faults.errors = dict.fromkeys(board.files, code)
    reading = sensor.read(101.0)
    assert all(zone.temperature_c is None for zone in reading.zones)
    assert all(rail.power_mw is None for rail in reading.rails)
    assert (reading.over_current, reading.coolers, reading.energy, reading.throttles) == ((), (), (), ())
    if name in JETSONS:
        assert reading.clocks == ()
        assert {"zones", "rails", "clocks", "over_current"} <= reading.missing.keys()
    faults.errors = {}
    assert values(sensor.read(101.0 + FIND_AGAIN_S)) == known


@pytest.mark.parametrize("name", BOARDS)
def test_drivers_loaded_after_the_start_are_found(name: str, make_board: Any) -> None:
    board = make_board(name)
    known = values(make_sensor(board).read(0.0))
    late = [path for path in board.files if path.startswith(("/sys/", "/var/"))]
    for path in late:
        board.remove(path)
    sensor = make_sensor(board)
    empty = sensor.read(100.0)
    assert (empty.zones, empty.rails) == ((), ())
    assert {"zones", "rails"} <= empty.missing.keys()
    for path in late:
        board.restore(path)
    assert values(sensor.read(100.0 + FIND_AGAIN_S)) == known


@pytest.mark.sample
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("seed", range(6))
def test_renumbered_devices_give_the_same_readings(name: str, seed: int, make_board: Any) -> None:
    board = make_board(name)
    sensor = make_sensor(board)
    known, before = values(sensor.read(100.0)), set(board.files)
    board.shuffle(seed)
    assert set(board.files) != before
    assert values(sensor.read(100.5)) == known
    assert values(make_sensor(board).read(0.0)) == known
