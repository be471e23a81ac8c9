"""Jetson sensor with faults: files that fail one by one, appear late, or change their numbers."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.plugins.governor.readings import MachineReading, TripPoints
from edge_server.plugins.governor.sensors.jetson_sensor import TegraSensor
from edge_server.plugins.governor.sensors.sysfs import FIND_AGAIN_S, SysfsFiles

JETSONS = ["orin_nano_jp6", "orin_nx_jp5", "agx_orin_jp6", "thor_jp7"]

IDENTITY = ("board", "soc", "l4t", "jetpack", "power_mode", "power_limit_mw")

HANGS_ON = {
    "/proc/device-tree/model": {"board"},
    "/proc/device-tree/compatible": {"soc"},
    "/etc/nv_tegra_release": {"l4t", "jetpack"},
    "/etc/nvpmodel.conf": {"power_mode", "power_limit_mw"},
    "/var/lib/nvpmodel/status": {"power_mode", "power_limit_mw"},
}
"""File -> the readings that come from it alone."""


def metrics(reading: MachineReading) -> dict[str, tuple[Any, str]]:
    """Return metric -> (value, where it came from), for everything that does not depend on the time."""
    found: dict[str, tuple[Any, str]] = {name: (getattr(reading, name), "") for name in IDENTITY}
    for zone in reading.zones:
        found[f"zone {zone.name}"] = ((zone.temperature_c, zone.trips), zone.source)
    for rail in reading.rails:
        value = (rail.power_mw, rail.is_counted, rail.is_alarmed)
        found[f"rail {rail.name}"] = (value, rail.source)
    for cooler in reading.coolers:
        found[f"cooler {cooler.name}"] = ((cooler.state, cooler.max_state), cooler.source)
    for clock in reading.clocks:
        value = (clock.current_hz, clock.floor_hz, clock.cap_hz, clock.highest_hz, clock.governor)
        found[f"clock {clock.name}"] = (value, clock.source)
    for counter in reading.over_current:
        found[f"over-current {counter.name}"] = (counter.count, counter.source)
    for fan in reading.fans:
        found[f"fan {fan.name}"] = ((fan.duty, fan.rpm), fan.source)
    for gpu in reading.gpus:
        for name in ("utilization", "temperature_c", "clock_hz"):
            found[f"gpu {name}"] = (getattr(gpu, name), gpu.sources.get(name, ""))
    return found


def values(reading: MachineReading) -> dict[str, Any]:
    return {name: value for name, (value, _) in metrics(reading).items()}


def owned(path: str, known: dict[str, tuple[Any, str]]) -> set[str]:
    """Return the metrics that may change when that file is gone: of its own folder, and those that follow from it."""
    if path in HANGS_ON:
        return HANGS_ON[path]
    folder = re.sub(r"/(device/of_node/)?[^/]+$", "", path)
    names = {name for name, (_, source) in known.items() if source.startswith(f"sysfs:{folder}/")}
    if any(name.startswith("rail ") for name in names):
        # Which rails make up the total follows from all labels.
        names |= {name for name in known if name.startswith("rail ")}
    if "hwmon" in path:
        names.add("fan fan")
    return names


def broken(board: Any, path: str, way: str) -> None:
    if way == "garbage":
        board.write(path, b"\xff\xfe -- 9" * 40)
    elif way == "empty":
        board.write(path, b"")
    else:
        {"removed": board.remove, "a folder": board.block, "switched off": board.switch_off}[way](path)


WAYS = ["removed", "a folder", "switched off", "garbage", "empty"]
SAMPLED = list(zip(WAYS, [*JETSONS, "thor_jp7"], strict=True))


# All 20 pairs cost 1.3 s of the processor each; the fast part has each way and each board once.
@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[] if (way, name) in SAMPLED else pytest.mark.full)
        for way in WAYS
        for name in JETSONS
    ],
)
def test_a_failing_file_affects_only_its_own_readings(name: str, way: str, make_board: Any) -> None:
    board = make_board(name)
    sensor = TegraSensor(SysfsFiles(board.root))
    now_s = 100.0
    known = metrics(sensor.read(now_s))
    for path in board.files:
        may_change = owned(path, known)
        broken(board, path, way)
        for later_s in (1.0, FIND_AGAIN_S) if way == "removed" else (1.0,):
            now_s += later_s
            seen = values(sensor.read(now_s))
            for metric, (value, _) in known.items():
                assert metric in may_change or seen.get(metric) == value, f"{metric} changed with {path}"
        board.restore(path)
        now_s += FIND_AGAIN_S
        assert values(sensor.read(now_s)) == {metric: value for metric, (value, _) in known.items()}, path


@pytest.mark.sample
@pytest.mark.parametrize("name", JETSONS)
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EIO, errno.EACCES, errno.ENODEV, errno.ETIMEDOUT, errno.ENODATA])
def test_a_machine_whose_files_all_fail_reports_the_reason(name: str, code: int, make_board: Any, boards: Any) -> None:
    board = make_board(name)
    faults = boards.Faults(board)
    sensor = TegraSensor(SysfsFiles(board.root, read=faults))
    known = values(sensor.read(100.0))
    faults.errors = dict.fromkeys(board.files, code)
    reading = sensor.read(101.0)
    assert all(zone.temperature_c is None for zone in reading.zones)
    assert all(rail.power_mw is None for rail in reading.rails)
    assert (reading.clocks, reading.over_current, reading.coolers) == ((), (), ())
    assert {"zones", "rails", "clocks", "over_current"} <= reading.missing.keys()
    faults.errors = {}
    assert values(sensor.read(102.0)) == known


@pytest.mark.parametrize("name", JETSONS)
def test_drivers_loaded_after_the_start_are_found(name: str, make_board: Any) -> None:
    board = make_board(name)
    known = values(TegraSensor(SysfsFiles(board.root)).read(0.0))
    late = [path for path in board.files if path.startswith(("/sys/", "/var/"))]
    for path in late:
        board.remove(path)
    sensor = TegraSensor(SysfsFiles(board.root))
    assert sensor.read(100.0).zones == ()
    for path in late:
        board.restore(path)
        now_s = 100.0 + FIND_AGAIN_S
    assert values(sensor.read(now_s)) == known


@pytest.mark.sample
@pytest.mark.parametrize("name", JETSONS)
@pytest.mark.parametrize("seed", range(6))
def test_renumbered_devices_give_the_same_readings(name: str, seed: int, make_board: Any) -> None:
    board = make_board(name)
    sensor = TegraSensor(SysfsFiles(board.root))
    known = values(sensor.read(100.0))
    board.shuffle(seed)
    assert values(sensor.read(100.5)) == known
    assert values(TegraSensor(SysfsFiles(board.root)).read(0.0)) == known


@pytest.mark.parametrize(
    ("path", "after_s"),
    [("/proc/device-tree/compatible", 4.0), ("/proc/device-tree/model", 60.0), ("/etc/nv_tegra_release", 60.0)],
)
def test_the_identity_of_the_machine_is_read_until_it_is_known(path: str, after_s: float, make_board: Any) -> None:
    board = make_board("thor_jp7")
    known = values(TegraSensor(SysfsFiles(board.root)).read(0.0))
    board.remove(path)
    sensor = TegraSensor(SysfsFiles(board.root))
    assert values(sensor.read(100.0)) != known
    board.restore(path)
    assert values(sensor.read(100.0 + after_s)) == known


def test_a_failing_junction_sensor_is_read_twice_and_a_disabled_one_once(make_board: Any, boards: Any) -> None:
    board = make_board("orin_nano_jp6")
    faults = boards.Faults(board)
    sensor = TegraSensor(SysfsFiles(board.root, read=faults))
    junction, processor = (f"{board.zone(kind)}/temp" for kind in ("tj-thermal", "cpu-thermal"))
    faults.once = {junction: errno.EAGAIN, processor: errno.EAGAIN}
    zones = {zone.name: zone for zone in sensor.read(100.0).zones}
    assert (zones["tj"].temperature_c, zones["tj"].problem) == (51.812, "")
    assert zones["cpu"].temperature_c is None
    assert "try again" in zones["cpu"].problem
    assert (faults.reads[junction], faults.reads[processor]) == (2, 1)
    faults.errors = {junction: errno.EIO}
    assert sensor.read(101.0).zones[0].problem == f"{junction}: Input/output error"
    assert faults.reads[junction] == 3


def test_temperatures_are_read_twice_a_second_at_most(make_board: Any, boards: Any) -> None:
    board = make_board("agx_orin_jp6")
    faults = boards.Faults(board)
    sensor = TegraSensor(SysfsFiles(board.root, read=faults))
    readings = [sensor.read(100.0 + step / 10) for step in range(100)]
    junction = f"{board.zone('tj-thermal')}/temp"
    assert 18 <= faults.reads[junction] <= 23
    assert all(reading.zones[0].temperature_c == 99.125 for reading in readings)
    # In step with two looks a second, each look is a fresh one.
    faults.reads.clear()
    for step in range(20):
        sensor.read(200.0 + step / 2)
    assert faults.reads[junction] == 20


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text", ["-256000", "-274000", "200000", "2147483647", "9" * 400, "nan", "", "51.8", "0x33", "1_000", "٥٠٠٠٠"]
)
def test_an_impossible_temperature_is_none_with_a_reason(text: str, make_board: Any) -> None:
    board = make_board("thor_jp7")
    path = f"{board.zone('tj-thermal')}/temp"
    board.write(path, text)
    zone = TegraSensor(SysfsFiles(board.root)).read(100.0).zones[0]
    assert (zone.name, zone.temperature_c) == ("tj", None)
    assert zone.problem.startswith(path)
    assert zone.trips.critical_c == 114.5


@pytest.mark.parametrize(("text", "at_c"), [("-40000", -40.0), ("0", 0.0), ("127500", 127.5), ("+51812", 51.812)])
def test_very_low_and_very_high_temperatures_are_valid(text: str, at_c: float, make_board: Any) -> None:
    board = make_board("thor_jp7")
    board.write(f"{board.zone('tj-thermal')}/temp", text)
    assert TegraSensor(SysfsFiles(board.root)).read(100.0).zones[0].temperature_c == at_c


@pytest.mark.parametrize("text", ["0", "-1", "-274000", "2147483647", "none", "9" * 400])
def test_an_unset_trip_is_ignored(text: str, make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    board.write(f"{board.zone('cpu-thermal')}/trip_point_0_temp", text)
    zone = next(item for item in TegraSensor(SysfsFiles(board.root)).read(100.0).zones if item.name == "cpu")
    assert zone.trips == TripPoints(None, None, 104.5)


def test_the_lowest_of_several_trips_of_a_type_is_used(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    folder = board.zone("cpu-thermal")
    for number, at_mc in ((10, 97_000), (11, 98_000)):
        board.write(f"{folder}/trip_point_{number}_type", "passive")
        board.write(f"{folder}/trip_point_{number}_temp", at_mc)
    zone = next(item for item in TegraSensor(SysfsFiles(board.root)).read(100.0).zones if item.name == "cpu")
    assert zone.trips == TripPoints(97.0, None, 104.5)


@pytest.mark.parametrize(
    "path",
    [
        "/sys/devices/platform/gpu.0/load",
        "/sys/devices/gpu.0/load",
        "/sys/devices/platform/bus@0/17000000.gpu/load",
        "/sys/devices/platform/17000000.ga10b/load",
        "/sys/class/devfreq/17000000.gpu/device/load",
    ],
)
def test_the_gpu_load_is_found_at_each_known_path(path: str, make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    for known in [known for known in board.files if known.endswith("/load")]:
        board.remove(known)
    board.write(path, 375)
    (gpu,) = TegraSensor(SysfsFiles(board.root)).read(100.0).gpus
    assert gpu.utilization == 0.375
    assert gpu.sources["utilization"] == f"sysfs:{path}"


@pytest.mark.parametrize(("text", "share"), [("1000", 1.0), ("1023", 1.0), ("-5", 0.0), ("0", 0.0), ("busy", None)])
def test_a_load_is_a_fraction(text: str, share: float | None, make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    board.write("/sys/devices/platform/gpu.0/load", text)
    (gpu,) = TegraSensor(SysfsFiles(board.root)).read(100.0).gpus
    assert gpu.utilization == share
    assert ("utilization" in gpu.missing) == (share is None)


def test_a_load_file_that_moves_is_followed(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    sensor = TegraSensor(SysfsFiles(board.root))
    assert sensor.read(100.0).gpus[0].utilization == 0.13
    board.remove("/sys/devices/platform/gpu.0/load")
    board.write("/sys/class/devfreq/17000000.gpu/device/load", 130)
    sensor.read(100.5)
    assert sensor.read(101.0).gpus[0].utilization == pytest.approx(0.13)


def test_sum_shunt_and_unconnected_channels_are_no_rails(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    folder = board.monitor("ina3221")
    for name, content in {
        "in4_label": "VDD_SHUNT", "in4_input": "5000", "curr4_input": "9000",
        "in7_label": "sum of shunt voltages", "in7_input": "5000", "curr7_input": "9000",
    }.items():  # fmt: skip
        board.write(f"{folder}/{name}", content)
    board.write(f"{folder}/in3_label", "NC")
    rails = TegraSensor(SysfsFiles(board.root)).read(100.0).rails
    assert [rail.name for rail in rails] == ["VDD_IN", "VDD_CPU_GPU_CV"]


def test_a_rail_with_unreadable_current_makes_the_total_unknown(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    sensor = TegraSensor(SysfsFiles(board.root))
    sensor.read(100.0)
    board.block(f"{board.monitor('ina3221')}/curr1_input")
    rail = sensor.read(101.0).rails[0]
    assert (rail.name, rail.power_mw, rail.is_counted) == ("VDD_IN", None, True)
    assert "curr1_input: Is a directory" in rail.problem


def test_counters_restart_with_a_reloaded_driver(make_board: Any) -> None:
    board = make_board("orin_nano_jp6")
    sensor = TegraSensor(SysfsFiles(board.root))
    path = f"{board.monitor('soctherm_oc')}/oc3_event_cnt"
    rates = []
    for second, count in enumerate((4711, 4721, 3, 5)):
        board.write(path, count)
        rates.append(sensor.read(100.0 + second).over_current[2].per_s)
    assert rates == [None, 10.0, None, 2.0]


def test_on_other_machines_only_the_board_name_is_reported(make_board: Callable[[str], Any]) -> None:
    board = make_board("")
    board.write("/proc/device-tree/model", "Raspberry Pi 5 Model B Rev 1.0\0")
    board.write("/proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    assert TegraSensor(SysfsFiles(board.root)).read(1.0) == MachineReading(1.0, board="Raspberry Pi 5 Model B Rev 1.0")


def test_the_limit_of_the_gpus_clock_is_reported(make_board: Any) -> None:
    def limits(now_s: float) -> tuple[int | None, int | None]:
        clock = next(item for item in sensor.read(now_s).clocks if item.name == "gpu")
        return clock.cap_hz, clock.highest_hz

    board = make_board("orin_nano_jp6")
    sensor = TegraSensor(SysfsFiles(board.root))
    assert limits(100.0) == (918_000_000, 1_020_000_000)
    board.write("/sys/class/devfreq/17000000.gpu/max_freq", 510_000_000)
    assert limits(100.1) == (510_000_000, 1_020_000_000)
