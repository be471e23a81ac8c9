"""x86 sensor: processors of both vendors, permissions of RAPL counters, throttling, Intel GPUs."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from edge_server.plugins.governor.readings import Gpu, MachineReading, ThrottleReason, TripPoints
from edge_server.plugins.governor.sensors.non_jetson_sensor import X86Sensor
from edge_server.telemetry.sysfs import SysfsFiles

PACKAGE = "/sys/class/powercap/intel-rapl:0"
RANGE_UJ = 262143328850
CPU = "/sys/devices/system/cpu"


@pytest.fixture
def board(make_board: Any) -> Any:
    return make_board("x86_box")


@pytest.fixture
def sensor(board: Any) -> X86Sensor:
    return X86Sensor(SysfsFiles(board.root))


def watts(reading: MachineReading) -> dict[str, float | None]:
    return {rail.name: None if rail.power_mw is None else rail.power_mw / 1000 for rail in reading.rails}


def zones(reading: MachineReading) -> dict[str, float | None]:
    return {zone.name: zone.temperature_c for zone in reading.zones}


def test_power_is_the_difference_of_two_energy_readings(board: Any, sensor: X86Sensor) -> None:
    first = sensor.read(100.0)
    assert set(watts(first).values()) == {None}
    assert "power follows from two readings" in first.rails[0].problem
    board.write(f"{PACKAGE}/energy_uj", 5_000_000 + 9_000_000)
    board.write(f"{PACKAGE}:0/energy_uj", 1_000_000 + 6_000_000)
    board.write(f"{PACKAGE}:2/energy_uj", 700_000 + 800_000)
    second = sensor.read(100.5)
    assert watts(second) == {
        "package-0": 18.0, "package-0 core": 12.0, "package-0 uncore": 0.0, "package-0 dram": 1.6, "psys": 0.0,
    }  # fmt: skip
    assert {rail.name for rail in second.rails if rail.is_counted} == {"package-0", "package-0 dram"}
    assert second.energy[0].energy_mj == 14_000


def test_energy_continues_across_a_counter_wrap(board: Any, sensor: X86Sensor) -> None:
    board.write(f"{PACKAGE}/energy_uj", RANGE_UJ - 4_000_000)
    before = sensor.read(100.0).energy[0].energy_mj
    board.write(f"{PACKAGE}/energy_uj", 6_000_000)
    after = sensor.read(101.0)
    assert after.energy[0].energy_mj - before == 10_000
    assert watts(after)["package-0"] == 10.0


def test_energy_that_only_root_may_read_is_reported_and_ignored(board: Any, boards: Any) -> None:
    faults = boards.Faults(board)
    faults.errors = {path: errno.EACCES for path in board.files if path.endswith("/energy_uj")}
    reading = X86Sensor(SysfsFiles(board.root, read=faults)).read(100.0)
    assert reading.energy == ()
    for rail in reading.rails:
        assert (rail.power_mw, rail.is_counted) == (None, False)
        assert rail.problem.endswith("energy_uj may not be read by this user")
    # The limit is no secret.
    assert reading.rails[0].limit_mw == 28_000


def test_a_silent_package_makes_the_total_power_unknown(board: Any, sensor: X86Sensor) -> None:
    sensor.read(100.0)
    sensor.read(101.0)
    board.block(f"{PACKAGE}/energy_uj")
    package = sensor.read(102.0).rails[0]
    assert (package.name, package.power_mw, package.is_counted) == ("package-0", None, True)
    board.restore(f"{PACKAGE}/energy_uj")
    assert sensor.read(103.0).rails[0].power_mw == 0


@pytest.mark.parametrize(("first", "limit_mw"), [("long_term", 28_000), ("short_term", 64_000)])
def test_the_long_term_power_limit_is_found_by_name(first: str, limit_mw: int, board: Any) -> None:
    second = {"long_term": "short_term", "short_term": "long_term"}[first]
    board.write(f"{PACKAGE}/constraint_0_name", first)
    board.write(f"{PACKAGE}/constraint_1_name", second)
    assert X86Sensor(SysfsFiles(board.root)).read(1.0).rails[0].limit_mw == limit_mw


@pytest.mark.parametrize("text", ["0", "unlimited", ""])
def test_an_invalid_limit_is_none(text: str, board: Any) -> None:
    board.write(f"{PACKAGE}/constraint_0_power_limit_uw", text)
    assert X86Sensor(SysfsFiles(board.root)).read(1.0).rails[0].limit_mw is None


def test_throttling_is_reported_as_rates_of_the_package_and_of_all_cores(board: Any, sensor: X86Sensor) -> None:
    first = {item.name: (item.count, item.per_s) for item in sensor.read(100.0).throttles}
    assert first == {"package-0": (12, None), "cores": (6, None)}
    for cpu in range(4):
        board.write(f"{CPU}/cpu{cpu}/thermal_throttle/package_throttle_count", 22)
    board.write(f"{CPU}/cpu2/thermal_throttle/core_throttle_count", 6)
    reading = sensor.read(102.0)
    assert {item.name: item.per_s for item in reading.throttles} == {"package-0": 5.0, "cores": 2.0}
    assert ThrottleReason.THERMAL in reading.slowed_by
    assert ThrottleReason.THERMAL not in sensor.read(103.0).slowed_by


def test_an_offline_processor_is_not_counted_as_throttling(board: Any, sensor: X86Sensor) -> None:
    sensor.read(100.0)
    board.remove(f"{CPU}/cpu3/thermal_throttle")
    rates = [[item.per_s for item in sensor.read(101.0 + step).throttles] for step in range(3)]
    assert all(rate in (None, 0.0) for look in rates for rate in look)
    assert {item.name: item.count for item in sensor.read(105.0).throttles} == {"package-0": 12, "cores": 3}


def test_each_package_has_its_own_temperature_and_trips(board: Any) -> None:
    folder = "/sys/class/hwmon/hwmon7"
    for name, content in {
        "name": "coretemp", "temp1_label": "Package id 1", "temp1_input": 61000, "temp1_max": 82000,
        "temp1_crit": 98000, "temp2_label": "Core 0", "temp2_input": 62000,
    }.items():  # fmt: skip
        board.write(f"{folder}/{name}", content)
    found = X86Sensor(SysfsFiles(board.root)).read(1.0).zones
    assert [(zone.name, zone.temperature_c, zone.trips) for zone in found] == [
        ("package-0", 56.0, TripPoints(100.0, 80.0)),
        ("package-1", 61.0, TripPoints(98.0, 82.0)),
    ]


@pytest.mark.parametrize(
    ("files", "at_c"),
    [
        ({"temp1_label": "Tctl", "temp1_input": 68750, "temp3_label": "Tccd1", "temp3_input": 60500}, 68.75),
        ({"temp1_label": "Tctl", "temp1_input": 88750, "temp2_label": "Tdie", "temp2_input": 68750}, 68.75),
        ({"temp1_input": 51000}, 51.0),
    ],
)
def test_an_amd_processor(files: dict[str, Any], at_c: float, make_board: Any) -> None:
    board = make_board("")
    for name, content in {"name": "k10temp", "temp1_max": 70000, **files}.items():
        board.write(f"/sys/class/hwmon/hwmon4/{name}", content)
    reading = X86Sensor(SysfsFiles(board.root)).read(1.0)
    assert zones(reading) == {"package-0": at_c}
    assert reading.zones[0].trips == TripPoints()


def test_the_acpi_zone_replaces_a_missing_or_failing_driver(board: Any, sensor: X86Sensor) -> None:
    folder = board.monitor("coretemp")
    board.set_temperature("x86_pkg_temp", 57)
    assert zones(sensor.read(100.0)) == {"package-0": 56.0}
    board.block(f"{folder}/temp1_input")
    failing = sensor.read(101.0).zones[0]
    assert (failing.name, failing.temperature_c, failing.trips) == ("package-0", 57.0, TripPoints(100.0, 80.0))
    board.restore(f"{folder}/temp1_input")
    assert zones(sensor.read(102.0)) == {"package-0": 56.0}
    board.remove(folder)
    absent = sensor.read(103.0).zones[0]
    assert (absent.name, absent.temperature_c, absent.trips) == ("package-0", 57.0, TripPoints())


def test_zones_of_an_unknown_board_are_named_by_their_first_word(make_board: Any) -> None:
    board = make_board("")
    for number, (kind, at_mc) in enumerate({"cpu-thermal": 61000, "soc_thermal": 58000, "bat": 30000}.items()):
        folder = f"/sys/class/thermal/thermal_zone{number}"
        board.write(f"{folder}/type", kind)
        board.write(f"{folder}/temp", at_mc)
    board.write("/sys/class/thermal/thermal_zone0/trip_point_0_type", "passive")
    board.write("/sys/class/thermal/thermal_zone0/trip_point_0_temp", 80000)
    reading = X86Sensor(SysfsFiles(board.root)).read(1.0)
    assert zones(reading) == {"cpu": 61.0, "soc": 58.0}
    assert reading.zones[0].trips == TripPoints(80.0)


def test_throttle_reasons_of_integrated_graphics(board: Any, sensor: X86Sensor) -> None:
    folder = "/sys/class/drm/card0/gt/gt0"
    (gpu,) = sensor.read(1.0).gpus
    assert (gpu.clock_hz, gpu.is_integrated) == (650_000_000, True)
    assert (gpu.reasons, gpu.slowed_by) == ({"pl1"}, {ThrottleReason.POWER_CAP})
    board.write(f"{folder}/throttle_reason_pl1", 0)
    board.write(f"{folder}/throttle_reason_thermal", 1)
    (gpu,) = sensor.read(2.0).gpus
    assert (gpu.reasons, gpu.slowed_by) == ({"thermal"}, {ThrottleReason.THERMAL})


def _card(board: Any, driver: str) -> None:
    folder = {"i915": "/sys/class/drm/card1/gt/gt0", "xe": "/sys/class/drm/card1/device/tile0/gt0/freq0"}[driver]
    names = {
        "i915": ("rps_cur_freq_mhz", "rps_RP0_freq_mhz", "throttle_reason_thermal"),
        "xe": ("cur_freq", "rp0_freq", "throttle/reason_thermal"),
    }[driver]
    for name, content in zip(names, (900, 2400, 1), strict=True):
        board.write(f"{folder}/{name}", content)
    for name, content in {"name": driver, "energy1_input": 1_000_000, "power1_max": 75_000_000}.items():
        board.write(f"/sys/class/drm/card1/device/hwmon/hwmon5/{name}", content)


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_a_graphics_card_has_its_own_power(driver: str, board: Any, sensor: X86Sensor) -> None:
    _card(board, driver)
    gpu: Gpu = sensor.read(100.0).gpus[1]
    assert (gpu.key, gpu.is_integrated, gpu.clock_hz) == ("card1", False, 900_000_000)
    assert gpu.slowed_by == {ThrottleReason.THERMAL}
    board.write("/sys/class/drm/card1/device/hwmon/hwmon5/energy1_input", 31_000_000)
    rail = sensor.read(101.0).rails[-1]
    assert (rail.name, rail.power_mw, rail.limit_mw, rail.is_counted) == ("card1", 30_000, 75_000, True)
