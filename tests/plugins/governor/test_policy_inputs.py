"""Policy inputs from readings: the controlled temperature, limits in effect, and causes of throttling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edge_server.plugins.governor.control_policy import Cause
from edge_server.plugins.governor.policy_inputs import PolicyInputReader, throttle_causes
from edge_server.plugins.governor.readings import (
    Clock,
    CoolingDevice,
    CriticalTemperature,
    EventCounter,
    Gpu,
    MachineReading,
    MemoryState,
    PowerMode,
    ThrottleReason,
    TripPoints,
    Zone,
)
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors, critical_temperature

BOARDS = {
    "orin_nano_jp6": (99.0, 104.5, 25.0, {Cause.POWER_MODE}),
    "orin_nx_jp5": (99.0, 104.5, 15.0, {Cause.POWER_MODE}),
    "agx_orin_jp6": (99.0, 104.5, None, {Cause.THERMAL}),
    "thor_jp7": (108.5, 114.5, 120.0, {Cause.POWER_MODE}),
}
"""Board -> where it slows down, where it switches off, the watts of its power mode, and what holds it back."""


class SilentNvml:
    """No NVIDIA driver: the machine that runs the tests may have one."""

    def read(self, now_s: float) -> MachineReading:
        return MachineReading(now_s, missing={"nvml": "none here"})

    def close(self) -> None:
        pass


def look(board: Any, now_s: float = 0.0) -> MachineReading:
    return MachineSensors(board.root, nvml=SilentNvml()).read(now_s)


@pytest.mark.parametrize("name", BOARDS)
def test_a_jetson_is_controlled_by_its_junction_temperature_and_its_limits(
    name: str, make_board: Callable[[str], Any]
) -> None:
    trip_c, critical_c, watts, causes = BOARDS[name]
    reading = look(make_board(name))
    inputs = PolicyInputReader()
    seen = inputs.reduce(reading)
    assert inputs.control_zone == "tj"
    assert reading.heat is not None
    assert (seen.temperature_c, seen.trip_c, seen.critical_c) == (reading.heat.temperature_c, trip_c, critical_c)
    assert seen.power_w == pytest.approx(reading.power_mw / 1000)
    assert seen.power_limit_w == watts
    assert seen.expects == {"temperature", "power"}
    assert seen.slowed_by == causes
    assert seen.margin_c is None


def test_a_processor_package_controls_a_machine_without_a_gpu(make_board: Callable[[str], Any], boards: Any) -> None:
    name = next(name for name in boards.NAMES if name.startswith("x86"))
    inputs = PolicyInputReader()
    seen = inputs.reduce(look(make_board(name)))
    assert inputs.control_zone.startswith("package")
    assert seen.temperature_c is not None
    assert seen.trip_c is not None


def of_zones(*zones: Zone, **more: Any) -> MachineReading:
    return MachineReading(0.0, zones=zones, heat=critical_temperature(zones), **more)


def zone(name: str, temperature_c: float, passive_c: float) -> Zone:
    return Zone(name, temperature_c, TripPoints(passive_c, None, passive_c + 10))


def test_the_device_nearest_to_its_throttling_temperature_controls() -> None:
    inputs = PolicyInputReader()
    seen = inputs.reduce(of_zones(zone("package-0", 70, 100), zone("gpu0", 60, 83), zone("gpu1", 75, 83)))
    assert (inputs.control_zone, seen.temperature_c, seen.trip_c, seen.critical_c) == ("gpu1", 75, 83, 93)


def test_a_temperature_controls_until_another_is_clearly_nearer_to_its_trip() -> None:
    inputs = PolicyInputReader()
    inputs.reduce(of_zones(zone("package-0", 90, 100), zone("gpu0", 70, 83)))
    assert inputs.control_zone == "package-0"
    seen = inputs.reduce(of_zones(zone("package-0", 90, 100), zone("gpu0", 75, 83)))
    assert (inputs.control_zone, seen.temperature_c, seen.trip_c) == ("package-0", 90, 100)
    seen = inputs.reduce(of_zones(zone("package-0", 90, 100), zone("gpu0", 77, 83)))
    assert (inputs.control_zone, seen.temperature_c) == ("gpu0", 77)


def test_a_margin_replaces_a_temperature_that_is_not_reported() -> None:
    seen = PolicyInputReader().reduce(MachineReading(0.0, heat=CriticalTemperature("gpu0", None, 12.0, None, None)))
    assert (seen.temperature_c, seen.margin_c) == (None, 12.0)
    assert seen.expects == {"temperature"}


def test_a_margin_is_converted_to_a_trip_if_there_is_a_temperature() -> None:
    seen = PolicyInputReader().reduce(MachineReading(0.0, heat=CriticalTemperature("gpu0", 70.0, 12.0, 82.0, None)))
    assert (seen.temperature_c, seen.trip_c, seen.margin_c) == (70.0, 82.0, None)


def test_a_sensor_that_reported_once_is_expected_again() -> None:
    inputs = PolicyInputReader()
    assert inputs.reduce(MachineReading(0.0)).expects == frozenset()
    assert inputs.reduce(MachineReading(1.0, power_mw=9000)).expects == {"power"}
    seen = inputs.reduce(MachineReading(2.0, silent=frozenset({"rail VDD_IN"})))
    assert (seen.expects, seen.silent, seen.power_w) == ({"power"}, {"rail VDD_IN"}, None)


def test_memory_pressure_is_passed_on() -> None:
    assert (
        PolicyInputReader().reduce(MachineReading(0.0, memory=MemoryState(some_percent=47.5))).memory_pressure_percent
        == 47.5
    )


def alarm(name: str, slowdown: ThrottleReason, per_s: float, sustained_per_s: float | None = None) -> MachineReading:
    return MachineReading(0.0, over_current=(EventCounter(name, slowdown, 10, per_s, sustained_per_s),))


def throttle(name: str, per_s: float) -> EventCounter:
    return EventCounter(name, ThrottleReason.THERMAL, 5, per_s)


def cooled(*coolers: CoolingDevice) -> MachineReading:
    return MachineReading(0.0, coolers=coolers)


def card(**values: Any) -> MachineReading:
    return MachineReading(0.0, gpus=(Gpu("gpu0", **values),))


ORIN = MachineReading(0.0, soc="tegra234")
GPU_CLOCK = Clock("gpu", 300_000_000, 300_000_000, 1_020_000_000, 1_020_000_000)

CAUSES: dict[str, tuple[MachineReading, set[Cause]]] = {
    "nothing": (MachineReading(0.0), set()),
    "an alert of the firmware": (cooled(CoolingDevice("gpu-throttle-alert", 1, 3, True)), {Cause.THERMAL}),
    "coolers follow alerts, which count alone": (
        cooled(CoolingDevice("gpu-throttle-alert", 0, 3, True), CoolingDevice("devfreq-gpu", 18, 169, False)),
        set(),
    ),
    "coolers count where there are no alerts": (cooled(CoolingDevice("devfreq-gpu", 18, 169, False)), {Cause.THERMAL}),
    "a card that is too hot": (card(slowed_by=frozenset({ThrottleReason.THERMAL})), {Cause.THERMAL}),
    "a card at its power limit": (card(slowed_by=frozenset({ThrottleReason.POWER_CAP})), {Cause.POWER_CAP}),
    "a power supply that brakes": (card(slowed_by=frozenset({ThrottleReason.POWER_BRAKE})), {Cause.POWER_BRAKE}),
    "what NVML makes up for a Jetson": (
        replace(card(is_integrated=True, slowed_by=frozenset({ThrottleReason.THERMAL})), soc="tegra234"),
        set(),
    ),
    "a GPU built in with another processor": (
        card(is_integrated=True, slowed_by=frozenset({ThrottleReason.THERMAL})),
        {Cause.THERMAL},
    ),
    "supply voltage": (alarm("oc1", ThrottleReason.UNDER_VOLTAGE, 0.5), {Cause.UNDER_VOLTAGE}),
    "average power": (alarm("oc2", ThrottleReason.OVER_CURRENT, 2.0), {Cause.POWER_CAP}),
    "bursts of current for a moment": (alarm("oc3", ThrottleReason.OVER_CURRENT, 500.0), set()),
    "bursts of current, as some boards have them": (alarm("oc3", ThrottleReason.OVER_CURRENT, 19.0, 20.0), set()),
    "bursts of current for a minute": (alarm("oc3", ThrottleReason.OVER_CURRENT, 30.0, 20.5), {Cause.OVER_CURRENT}),
    "a package that throttled": (MachineReading(0.0, throttles=(throttle("package-0", 2.0),)), {Cause.THERMAL}),
    "a core in turbo": (MachineReading(0.0, throttles=(throttle("package-0", 0.0), throttle("cores", 9.0))), set()),
    "cores where no package is counted": (MachineReading(0.0, throttles=(throttle("cores", 9.0),)), {Cause.THERMAL}),
    "a power mode below the silicon": (
        replace(ORIN, power_mode=PowerMode(0, "15W", 612_000_000), clocks=(GPU_CLOCK,)),
        {Cause.POWER_MODE},
    ),
    "somebody's cap": (replace(ORIN, clocks=(GPU_CLOCK._replace(cap_hz=612_000_000),)), {Cause.POWER_MODE}),
    "full clocks": (replace(ORIN, power_mode=PowerMode(2, "MAXN", 1_020_000_000), clocks=(GPU_CLOCK,)), set()),
    "a laptop's setting": (MachineReading(0.0, clocks=(GPU_CLOCK._replace(cap_hz=612_000_000),)), set()),
}


@pytest.mark.parametrize("case", CAUSES)
def test_throttle_causes_of_a_machine(case: str) -> None:
    reading, causes = CAUSES[case]
    assert throttle_causes(reading) == causes


def test_the_servers_own_cap_is_no_power_mode() -> None:
    reading = replace(ORIN, clocks=(GPU_CLOCK._replace(cap_hz=612_000_000),))
    assert throttle_causes(reading, is_capped_by_us=True) == frozenset()
