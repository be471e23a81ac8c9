"""Complete readings of each reconstructed board: exact values, missing values, and files with faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edge_server.plugins.governor.readings import CriticalTemperature, MachineReading, PowerMode, ThrottleReason
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors, read_machine
from edge_server.plugins.governor.sensors.jetson_identity import jetpack_of_release


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


IDENTITY = {
    "orin_nano_jp6": (
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        "tegra234",
        "36.4.3",
        "6.2",
        PowerMode(1, "25W", 918000000),
        25_000,
    ),
    "orin_nx_jp5": (
        "NVIDIA Orin NX Developer Kit",
        "tegra234",
        "35.4.1",
        "5.1.2",
        PowerMode(2, "15W", 612000000),
        15_000,
    ),
    "agx_orin_jp6": (
        "NVIDIA Jetson AGX Orin Developer Kit",
        "tegra234",
        "36.3.0",
        "6.0",
        PowerMode(0, "MAXN", None),
        None,
    ),
    "thor_jp7": (
        "NVIDIA Jetson AGX Thor Developer Kit",
        "tegra264",
        "38.2.0",
        "7.0",
        PowerMode(1, "120W", 1386000000),
        120_000,
    ),
    "x86_box": ("NUC11TNHi5", None, None, None, None, 28_000),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_identity_of_the_machine(name: str, board: Any) -> None:
    reading = sensors(board(name)).read(100.0)
    limit_mw = reading.power_limit_mw
    if name == "x86_box":
        # Memory beside the package has no limit of its own, so that there is none for the sum.
        assert limit_mw is None
        limit_mw = next(rail.limit_mw for rail in reading.rails if rail.name == "package-0")
    assert IDENTITY[name] == (
        reading.board,
        reading.soc,
        reading.l4t,
        reading.jetpack,
        reading.power_mode,
        limit_mw,
    )


HEAT = {
    "orin_nano_jp6": CriticalTemperature("tj", 51.812, pytest.approx(47.188), 99.0, 104.5),
    "orin_nx_jp5": CriticalTemperature("tj", 44.218, pytest.approx(54.782), 99.0, 104.5),
    "agx_orin_jp6": CriticalTemperature("tj", 99.125, -0.125, 99.0, 104.5),
    "thor_jp7": CriticalTemperature("tj", 43.75, 64.75, 108.5, 114.5),
    "x86_box": CriticalTemperature("package-0", 56.0, 44.0, 100.0, None),
}


@pytest.mark.parametrize("name", HEAT)
def test_the_controlling_temperature_of_each_board(name: str, board: Any) -> None:
    assert sensors(board(name)).read(100.0).heat == HEAT[name]


ZONES: dict[str, dict[str, float | None]] = {
    "orin_nano_jp6": {
        "tj": 51.812, "cpu": 51.812, "gpu": None, "cv0": None, "cv1": None, "cv2": None,
        "soc0": 50.593, "soc1": 49.937, "soc2": 51.25,
    },
    "orin_nx_jp5": {
        "tj": 44.218, "cpu": 44.218, "gpu": None, "cv0": None, "cv1": None, "cv2": None,
        "soc0": 42.5, "soc1": 41.906, "soc2": 43.312,
    },
    "agx_orin_jp6": {
        "tj": 99.125, "cpu": 97.25, "gpu": 99.125, "cv0": 94.5, "cv1": None, "cv2": None,
        "soc0": 95.031, "soc1": 94.812, "soc2": 96.468, "tboard": 71.5, "tdiode": 74.25,
    },
    "thor_jp7": {"tj": 43.75, "cpu": 43.75, "gpu": None, "soc012": 42.937, "soc345": 42.312},
    "x86_box": {"package-0": 56.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ZONES)
def test_every_zone_has_its_temperature_or_a_reason(name: str, board: Any) -> None:
    zones = sensors(board(name)).read(100.0).zones
    assert {zone.name: zone.temperature_c for zone in zones} == ZONES[name]
    for zone in zones:
        assert zone.source.startswith("sysfs:/sys/class/")
        assert ("switched off for now" in zone.problem) == (zone.temperature_c is None)


POWER = {
    "orin_nano_jp6": (5453, {"VDD_IN": 5453, "VDD_CPU_GPU_CV": 1192, "VDD_SOC": 1589}, {"VDD_IN"}),
    "orin_nx_jp5": (6239, {"VDD_IN": 6239, "VDD_CPU_GPU_CV": 966, "VDD_SOC": 2012}, {"VDD_IN"}),
    "agx_orin_jp6": (
        30592 + 6118 + 6048,
        {"VDD_GPU_SOC": 30592, "VDD_CPU_CV": 6118, "VIN_SYS_5V0": 6048, "VDDQ_VDD2_1V8AO": 1209},
        {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"},
    ),
    "thor_jp7": (27683, {"VDD_GPU": 0, "VDD_CPU_SOC_MSS": 8611, "VIN_SYS_5V0": 4769, "VIN": 27683}, {"VIN"}),
}


@pytest.mark.parametrize("name", POWER)
def test_the_power_of_each_rail_is_counted_once(name: str, board: Any) -> None:
    reading = sensors(board(name)).read(100.0)
    total_mw, rails, counted = POWER[name]
    assert {rail.name: rail.power_mw for rail in reading.rails} == rails
    assert {rail.name for rail in reading.rails if rail.is_counted} == counted
    assert reading.power_mw == total_mw
    assert "power_mw" not in reading.missing


def test_thor_without_its_input_monitor_adds_up_its_rails(board: Any) -> None:
    machine = board("thor_jp7")
    machine.remove("/sys/class/hwmon/hwmon1")
    assert sensors(machine).read(100.0).power_mw == 0 + 8611 + 4769


def test_rails_of_an_unknown_board_are_reported_and_not_added_up(board: Any) -> None:
    machine = board("orin_nano_jp6")
    machine.write("/sys/class/hwmon/hwmon1/in1_label", "VDD_SOMETHING")
    reading = sensors(machine).read(100.0)
    assert reading.power_mw is None
    assert "VDD_SOMETHING, VDD_CPU_GPU_CV, VDD_SOC" in reading.missing["power_mw"]


def test_rails_have_their_alarms(board: Any) -> None:
    machine = board("orin_nano_jp6")
    machine.write("/sys/class/hwmon/hwmon1/curr1_crit_alarm", 1)
    rail = next(item for item in sensors(machine).read(100.0).rails if item.name == "VDD_IN")
    assert (rail.power_mw, rail.is_alarmed) == (4976 * 1096 // 1000, True)


CLOCKS = {
    "orin_nano_jp6": {
        "gpu": (306, 306, 918, 1020),
        "cpu0": (1113.6, 729.6, 1344, 1728),
        "cpu4": (729.6,) * 2 + (1344, 1728),
    },
    "orin_nx_jp5": {
        "gpu": (306, 306, 612, 918),
        "cpu0": (729.6, 729.6, 1420.8, 1984),
        "cpu4": (729.6, 729.6, 1420.8, 1984),
    },
    "agx_orin_jp6": {"gpu": (918, 306, 1300.5, 1300.5)}
    | {f"cpu{n}": (2201.6, 729.6, 2201.6, 2201.6) for n in (0, 4, 8)},
    "thor_jp7": {
        "gpu": (630, 315, 1386, 1575),
        "gpu-nvd": (600, 300, 1200, 1200),
        "emc": (4266, 665.6, 4266, 4266),
        "cpu0": (972, 54, 2601, 2601),
    },
    "x86_box": {"cpu0": (2400, 400, 4200, 4200)},
}


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_with_their_floor_and_cap(name: str, board: Any) -> None:
    clocks = sensors(board(name)).read(100.0).clocks
    found = {
        item.name: tuple((hz or 0) / 1e6 for hz in (item.current_hz, item.floor_hz, item.cap_hz, item.highest_hz))
        for item in clocks
    }
    assert found == CLOCKS[name]
    assert {item.name for item in clocks if item.is_capped} == {
        clock for clock, (_, _, cap, highest) in CLOCKS[name].items() if cap < highest
    }


FANS = {
    "orin_nano_jp6": [("fan", 0.4, 2310)],
    "orin_nx_jp5": [("fan", 0.0, 0)],
    "agx_orin_jp6": [("fan", 1.0, 2937)],
    "thor_jp7": [("fan", pytest.approx(97 / 255), 5400)],
    "x86_box": [("nct6798 CPU", None, 1210), ("nct6798 fan2", None, 0)],
}


@pytest.mark.parametrize("name", FANS)
def test_fans(name: str, board: Any) -> None:
    assert [(fan.name, fan.duty, fan.rpm) for fan in sensors(board(name)).read(100.0).fans] == FANS[name]


LOADS = {"orin_nano_jp6": 0.13, "orin_nx_jp5": 0.0, "agx_orin_jp6": 0.998, "thor_jp7": None}


@pytest.mark.parametrize("name", LOADS)
def test_the_gpu_of_a_module(name: str, board: Any) -> None:
    reading = sensors(board(name)).read(100.0)
    (gpu,) = reading.gpus
    assert (gpu.key, gpu.is_integrated, gpu.is_lost) == ("igpu", True, False)
    assert gpu.utilization == LOADS[name]
    assert ("utilization" in gpu.missing) == (LOADS[name] is None)
    assert gpu.temperature_c == ZONES[name]["gpu"]
    assert gpu.clock_hz == CLOCKS[name]["gpu"][0] * 1e6


@pytest.mark.parametrize("name", ["orin_nano_jp6", "orin_nx_jp5", "thor_jp7", "x86_box"])
def test_an_idle_machine_is_not_throttled(name: str, board: Any) -> None:
    reading = sensors(board(name)).read(100.0)
    # The one in the NUC is throttled by its package's power limit, and reports that.
    assert reading.slowed_by == ({ThrottleReason.POWER_CAP} if name == "x86_box" else set())


def test_a_throttle_alert_counts_as_heat_and_a_hot_surface_does_not(board: Any) -> None:
    machine = board("agx_orin_jp6")
    sensor = sensors(machine)
    reading = sensor.read(100.0)
    assert reading.slowed_by == {ThrottleReason.THERMAL}
    assert {item.name: item.state for item in reading.coolers if item.state} == {
        "gpu-throttle-alert": 1, "devfreq-gpu": 3,
    }  # fmt: skip
    machine.write("/sys/class/thermal/cooling_device2/cur_state", 0)
    # The clock cap is still being lifted, step by step; the firmware throttles no more.
    assert sensor.read(101.0).slowed_by == set()


def test_over_current_is_reported_as_a_rate(board: Any) -> None:
    machine = board("orin_nano_jp6")
    sensor = sensors(machine)
    first = sensor.read(100.0)
    assert {item.name: (item.count, item.per_s) for item in first.over_current} == {
        "oc1": (0, None), "oc2": (0, None), "oc3": (4711, None),
    }  # fmt: skip
    machine.write("/sys/class/hwmon/hwmon2/oc3_event_cnt", 4711 + 15)
    second = sensor.read(100.5)
    assert {item.name: item.per_s for item in second.over_current} == {"oc1": 0.0, "oc2": 0.0, "oc3": 30.0}
    assert second.slowed_by == {ThrottleReason.OVER_CURRENT}
    machine.write("/sys/class/hwmon/hwmon2/oc1_event_cnt", 1)
    assert sensor.read(101.0).slowed_by == {ThrottleReason.UNDER_VOLTAGE}


def test_a_burst_of_over_current_is_distinguished_from_a_sustained_one(board: Any) -> None:
    machine = board("orin_nano_jp6")
    sensor = sensors(machine)
    for second in range(61):
        machine.write("/sys/class/hwmon/hwmon2/oc3_event_cnt", 4711 + 25 * second)
        oc3 = sensor.read(100.0 + second).over_current[2]
    assert (oc3.per_s, oc3.sustained_per_s) == (25.0, 25.0)
    oc3 = sensor.read(161.0).over_current[2]
    assert (oc3.per_s, oc3.sustained_per_s) == (0.0, pytest.approx(25.0 * 59 / 60))


def test_the_load_of_a_short_moment_is_smoothed(board: Any) -> None:
    machine = board("orin_nano_jp6")
    sensor = sensors(machine)
    sensor.read(100.0)
    machine.write("/sys/devices/platform/gpu.0/load", 1000)
    after = [sensor.read(100.0 + step).gpus[0].utilization for step in (1, 2, 10)]
    assert after[0] == pytest.approx(0.13 + 0.87 * 0.3935, abs=1e-3)
    assert after == sorted(after)
    assert after[-1] == pytest.approx(1.0, abs=0.02)


def test_a_machine_without_any_sensor_is_read_and_names_the_missing_ones(machine: Any) -> None:
    reading = sensors(machine).read(100.0)
    assert (reading.zones, reading.rails, reading.gpus, reading.heat) == ((), (), (), None)
    assert {"zones", "rails", "memory", "nvml", "power_mw", "power_limit_mw"} <= reading.missing.keys()


def test_reading_once_needs_nothing_but_the_root(board: Any) -> None:
    reading = read_machine(board("orin_nano_jp6").root)
    assert (reading.jetpack, reading.power_mw) == ("6.2", 5453)


def test_the_jetpack_of_a_release() -> None:
    table = [
        ("35.2.1", "5.1"),
        ("35.5.0", "5.1.3"),
        ("36.4.0", "6.1"),
        ("36.4.5", "6.2.1"),
        ("36.5.0", "6.2.2"),
        ("36.5.1", "6.2.2"),
        ("36.5.2", "6.2.3"),
        ("38.3.0", "7.0"),
        ("38.4.1", "7.1"),
        ("39.1.0", "7.2"),
        ("39.2.0", "7.2"),
        ("39.2.1", "7.2.1"),
        ("32.7.4", None),
        ("36.2.0", None),
        ("40.0", None),
    ]
    assert [(l4t, jetpack_of_release(l4t)) for l4t, _ in table] == table


def test_without_its_file_the_release_is_read_from_the_package_list(board: Any) -> None:
    machine = board("orin_nano_jp6")
    machine.remove("/etc/nv_tegra_release")
    machine.write(
        "/var/lib/dpkg/status",
        "Package: nvidia-l4t-cuda\nVersion: 1.0\n\nPackage: nvidia-l4t-core\nArchitecture: arm64\n"
        "Version: 36.4.7-20250918154033\n\nPackage: zlib1g\nVersion: 1:1.2\n",
    )
    reading = sensors(machine).read(100.0)
    assert (reading.l4t, reading.jetpack) == ("36.4.7", "6.2.1")


def test_attributes_of_a_power_mode_come_in_any_order(board: Any) -> None:
    machine = board("orin_nano_jp6")
    machine.write(
        "/etc/nvpmodel.conf",
        "  < POWER_MODEL NAME=MAXN_SUPER ID=1 >\n GPU MAX_FREQ 1020000000\n< PM_CONFIG DEFAULT=1 >",
    )
    reading = sensors(machine).read(100.0)
    assert reading.power_mode == PowerMode(1, "MAXN_SUPER", 1020000000)
    assert reading.power_limit_mw is None
    assert reading.missing["power_limit_mw"] == "power mode MAXN_SUPER names no watts"


def test_an_unknown_power_mode_has_a_reason(board: Any) -> None:
    machine = board("orin_nano_jp6")
    sensor = sensors(machine)
    machine.remove("/var/lib/nvpmodel/status")
    assert "nvpmodel has not run" in sensor.read(100.0).missing["power_mode"]
    machine.write("/var/lib/nvpmodel/status", "pmode:0009 fmode:fanNull")
    reading = sensor.read(105.0)
    assert (reading.power_mode, reading.missing["power_mode"]) == (None, "/etc/nvpmodel.conf has no power mode 9")


@pytest.mark.sample
@pytest.mark.parametrize("name", IDENTITY)
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


@pytest.mark.parametrize("name", IDENTITY)
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
