"""Jetson sensor with faults: files that fail one by one, appear late, or change their numbers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from edge_server.plugins.governor.readings import MachineReading, TripPoints
from edge_server.plugins.governor.sensors.jetson_sensor import TegraSensor
from edge_server.telemetry.sysfs import SysfsFiles


@pytest.mark.parametrize(
    ("path", "after_s"),
    [("/proc/device-tree/compatible", 4.0), ("/proc/device-tree/model", 60.0), ("/etc/nv_tegra_release", 60.0)],
)
def test_the_identity_of_the_machine_is_read_until_it_is_known(path: str, after_s: float, make_board: Any) -> None:
    board = make_board("thor_jp7")

    def identify(now_s: float) -> tuple[Any, ...]:
        reading = sensor.read(now_s)
        return reading.board, reading.soc, reading.l4t, reading.jetpack

    board.remove(path)
    sensor = TegraSensor(SysfsFiles(board.root))
    assert None in identify(100.0)
    board.restore(path)
    assert None not in identify(100.0 + after_s)


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
