"""Sensors with faults: wrong or missing files, removed sensors, and counters that only root may read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.plugins.governor.readings import CriticalTemperature, MachineReading, ThrottleReason
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors
from edge_server.plugins.governor.sensors.sysfs import SysfsFiles, read_once

BOARDS = ("orin_nano_jp6", "orin_nx_jp5", "agx_orin_jp6", "thor_jp7", "x86_box")


class NoNvml:
    """A machine without NVML."""

    def read(self, now_s: float) -> MachineReading:
        return MachineReading(now_s, missing={"nvml": "not installed"})

    def close(self) -> None:
        pass


@pytest.fixture
def board(make_board: Callable[[str], Any]) -> Callable[[str], Any]:
    return make_board


@pytest.fixture
def machine(make_board: Callable[[str], Any]) -> Any:
    """A machine without any sensor."""
    return make_board("")


def sensors(machine: Any) -> MachineSensors:
    return MachineSensors(machine.root, nvml=NoNvml())


@pytest.mark.sample
@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("content", ["", "-1", "not a number", "9" * 30, "\0\0", None])
def test_any_file_may_have_any_content_or_vanish_at_any_time(name: str, content: str | None, board: Any) -> None:
    machine = board(name)
    sensor = sensors(machine)
    sensor.read(0.0)
    for second, path in enumerate(list(machine.files), 1):
        if content is None:
            machine.remove(path)
        else:
            machine.write(path, content)
        reading = sensor.read(second / 2)
        assert reading.power_mw is None or reading.power_mw >= 0
        assert reading.heat is None or reading.heat.temperature_c is not None


@pytest.mark.parametrize("name", BOARDS)
def test_the_controlling_sensor_is_silent_while_it_is_missing(name: str, board: Any) -> None:
    machine = board(name)
    if name == "x86_box":
        # It would replace the sensor.
        machine.remove(machine.zone("x86_pkg_temp"))
    sensor = sensors(machine)
    sensor.read(0.0)
    before = sensor.read(1.0)
    assert before.silent == set()
    assert before.heat is not None
    heard = {f"zone {before.heat.name}"} | {f"rail {rail.name}" for rail in before.rails if rail.is_counted}
    paths = [zone.source for zone in before.zones if zone.name == before.heat.name]
    paths += [rail.source for rail in before.rails if rail.is_counted]
    kept = {path: machine.at(path.removeprefix("sysfs:")).read_text().strip() for path in paths}
    for path in kept:
        machine.remove(path.removeprefix("sysfs:"))
    assert sensor.read(2.0).silent == heard
    assert sensor.read(60.0).silent == heard
    for path, content in kept.items():
        machine.write(path.removeprefix("sysfs:"), content)
    sensor.read(61.0)
    assert sensor.read(62.0).silent == set()


def test_processor_power_is_the_difference_of_two_energy_readings(board: Any) -> None:
    machine = board("x86_box")
    package, memory = "/sys/class/powercap/intel-rapl:0", "/sys/class/powercap/intel-rapl:0:2"
    machine.write(f"{package}/energy_uj", 262143328850 - 4_000_000)
    sensor = sensors(machine)
    first = sensor.read(0.0)
    assert first.power_mw is None
    assert "two readings" in first.missing["power_mw"]
    machine.write(f"{package}/energy_uj", 6_000_000)
    machine.write(f"{memory}/energy_uj", 700_000 + 1_000_000)
    second = sensor.read(0.5)
    assert {rail.name: rail.power_mw for rail in second.rails if rail.is_counted} == {
        "package-0": 20_000,
        "package-0 dram": 2_000,
    }
    assert (second.power_mw, second.sources["power_mw"]) == (22_000, "package-0 + package-0 dram")
    counters = {item.name: item.energy_mj for item in second.energy}
    assert counters["package-0"] == (262143328850 - 4_000_000 + 10_000_000) // 1000


def test_energy_that_only_root_may_read_is_omitted_and_reported(board: Any) -> None:
    machine = board("x86_box")

    def as_user(path: Path) -> bytes:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read_once(path)

    reading = MachineSensors(files=SysfsFiles(machine.root, read=as_user), nvml=NoNvml()).read(0.0)
    assert reading.power_mw is None
    assert "may not be read by this user" in reading.missing["power_mw"]
    assert {rail.name for rail in reading.rails if rail.is_counted} == set()


def test_throttling_of_a_processor_is_counted_by_package_and_over_its_cores(board: Any) -> None:
    machine = board("x86_box")
    sensor = sensors(machine)
    assert {item.name: (item.count, item.per_s) for item in sensor.read(0.0).throttles} == {
        "package-0": (12, None),
        "cores": (0 + 1 + 2 + 3, None),
    }
    for number in range(4):
        machine.write(f"/sys/devices/system/cpu/cpu{number}/thermal_throttle/package_throttle_count", 14)
    reading = sensor.read(0.5)
    assert {item.name: item.per_s for item in reading.throttles} == {"package-0": 4.0, "cores": 0.0}
    assert ThrottleReason.THERMAL in reading.slowed_by


def test_readings_of_intel_graphics(board: Any) -> None:
    (gpu,) = sensors(board("x86_box")).read(0.0).gpus
    assert (gpu.key, gpu.is_integrated, gpu.clock_hz) == ("card0", True, 650_000_000)
    assert gpu.reasons == {"pl1"}


def test_an_amd_processor_uses_its_die_temperature_and_not_the_fan_value(machine: Any) -> None:
    monitor = "/sys/class/hwmon/hwmon0"
    for name, content in {
        "name": "k10temp", "temp1_label": "Tctl", "temp1_input": 82_500, "temp1_max": 70_000,
        "temp2_label": "Tdie", "temp2_input": 62_500, "temp3_label": "Tccd1", "temp3_input": 60_000,
    }.items():  # fmt: skip
        machine.write(f"{monitor}/{name}", content)
    assert sensors(machine).read(0.0).heat == CriticalTemperature("package-0", 62.5, None, None, None)


def test_the_acpi_zone_replaces_a_driver_that_is_not_loaded(board: Any) -> None:
    machine = board("x86_box")
    machine.remove("/sys/class/hwmon/hwmon2")
    assert sensors(machine).read(0.0).heat == CriticalTemperature("package-0", 56.0, None, None, None)


def test_an_unknown_board_is_read_by_its_thermal_zones(machine: Any) -> None:
    machine.write("/proc/device-tree/model", "Raspberry Pi 5 Model B Rev 1.0\0")
    zone = "/sys/class/thermal/thermal_zone0"
    for name, content in {
        "type": "cpu-thermal", "temp": 61_200, "trip_point_0_type": "critical", "trip_point_0_temp": 110_000,
        "trip_point_1_type": "passive", "trip_point_1_temp": 85_000,
    }.items():  # fmt: skip
        machine.write(f"{zone}/{name}", content)
    reading = sensors(machine).read(0.0)
    assert reading.board == "Raspberry Pi 5 Model B Rev 1.0"
    assert reading.heat == CriticalTemperature("cpu", 61.2, pytest.approx(23.8), 85.0, 110.0)
