"""All sensors of a box as one: what each of them tells is joined, and what follows from all of it is worked out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from edge_server.governor.readings import BoxReading, CriticalTemperature, Gpu, Rail, Sensor, Zone
from edge_server.governor.sensors.memory import MemorySensor
from edge_server.governor.sensors.nvml import NvmlSensor
from edge_server.governor.sensors.sysfs import SysfsFiles
from edge_server.governor.sensors.tegra import TegraSensor
from edge_server.governor.sensors.thermal import JUNCTION
from edge_server.governor.sensors.x86 import X86Sensor

_log = logging.getLogger(__name__)

_FIRMWARE_BELOW_CRITICAL_C = 6.0
"""Thor tells no passive trip: its firmware was seen to throttle at 109 °C, where it switches off at 114.5 °C."""

_JOINED = ("coolers", "clocks", "over_current", "throttles", "fans", "energy", "zones", "rails")
_FIRST = ("board", "soc", "l4t", "jetpack", "power_mode", "power_limit_mw")


class BoxSensors:
    """Reads the box with everything there is. Used by one thread at a time.

    On a Jetson the files hold, and NVML fills in what they do not tell of the GPU. Elsewhere NVML tells of NVIDIA's
    GPUs and the files of the rest.
    """

    def __init__(
        self, sysfs_root: str | Path = "/", *, files: SysfsFiles | None = None, nvml: Sensor | None = None
    ) -> None:
        files = files or SysfsFiles(sysfs_root)
        self._tegra = GuardedSensor("tegra", TegraSensor(files))
        self._x86 = GuardedSensor("x86", X86Sensor(files))
        self._memory = GuardedSensor("memory", MemorySensor(files))
        self._nvml = GuardedSensor("nvml", nvml or NvmlSensor())
        self._is_jetson = False
        self._heard: set[str] = set()

    def read(self, now_s: float) -> BoxReading:
        reading = self._joined(now_s)
        heard = _heard(reading, self._heard)
        # A lost GPU is told as such; it has no heat and power that would be missed.
        lost = {f"{kind} {gpu.key}" for gpu in reading.gpus if gpu.is_lost for kind in ("zone", "rail")}
        self._heard = (self._heard | heard) - lost
        return replace(reading, silent=frozenset(self._heard - heard))

    def _joined(self, now_s: float) -> BoxReading:
        tegra, nvml, memory = self._tegra.read(now_s), self._nvml.read(now_s), self._memory.read(now_s)
        # A Jetson whose files fail for a moment is a Jetson all the same.
        self._is_jetson |= tegra.soc is not None
        if self._is_jetson:
            return join(now_s, (tegra, _without_integrated(nvml), memory))
        return join(now_s, (nvml, self._x86.read(now_s), tegra, memory))

    def close(self) -> None:
        for sensor in (self._tegra, self._x86, self._memory, self._nvml):
            sensor.close()


class GuardedSensor:
    """A sensor whose faults concern nobody else: they leave its part of the reading empty, and are logged once per
    kind."""

    def __init__(self, name: str, sensor: Sensor) -> None:
        self._name = name
        self._sensor = sensor
        self._told: set[str] = set()

    def read(self, now_s: float) -> BoxReading:
        try:
            return self._sensor.read(now_s)
        except Exception as error:  # noqa: BLE001 - what a driver or a file holds must not hide the other sensors
            return BoxReading(now_s, missing={self._name: self._tell(error)})

    def close(self) -> None:
        try:
            self._sensor.close()
        except Exception as error:  # noqa: BLE001 - the others are to be closed too
            self._tell(error)

    def _tell(self, error: Exception) -> str:
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            _log.error("sensors of '%s' failed, and are tried again: %s: %s", self._name, kind, error, exc_info=error)
        return f"the sensor failed: {kind}: {error}"


def read_box(sysfs_root: str | Path = "/") -> BoxReading:
    """Read the box once. What takes two readings, such as rates and RAPL's power, is missing then."""
    sensors = BoxSensors(sysfs_root)
    try:
        return sensors.read(time.monotonic())
    finally:
        sensors.close()


def join(now_s: float, parts: Sequence[BoxReading]) -> BoxReading:
    """Return one reading of several; where two tell the same, the first holds."""
    values: dict[str, Any] = {
        name: _by_name(item for part in parts for item in getattr(part, name)) for name in _JOINED
    }
    for name in _FIRST:
        values[name] = next((found for part in parts if (found := getattr(part, name)) is not None), None)
    values["memory"] = next((part.memory for part in parts if part.memory.total_bytes is not None), parts[-1].memory)
    values["gpus"] = _gpus(gpu for part in parts for gpu in part.gpus)
    for name in ("sources", "missing"):
        values[name] = {key: value for part in reversed(parts) for key, value in getattr(part, name).items()}
    reading = BoxReading(now_s, **values, heat=heat(values["zones"]))
    known = {name for name in (*_JOINED, *_FIRST) if getattr(reading, name)}
    missing = {key: why for key, why in reading.missing.items() if key not in known}
    return _with_power(replace(reading, missing=missing))


def _heard(reading: BoxReading, before: set[str]) -> set[str]:
    """Return the sensors of heat and power that matter, and what tells of throttling, as far as they speak now.

    Where there is a junction, or was one `before`, it stands for the other zones, which are switched off at times.
    """
    has_junction = f"zone {JUNCTION}" in before or any(zone.name == JUNCTION for zone in reading.zones)
    zones = {
        f"zone {zone.name}"
        for zone in reading.zones
        if (zone.temperature_c is not None or zone.margin_c is not None) and (zone.name == JUNCTION or not has_junction)
    }
    rails = {f"rail {rail.name}" for rail in reading.rails if rail.is_counted and rail.power_mw is not None}
    alerts = {f"alert {cooler.name}" for cooler in reading.coolers if cooler.is_alert}
    return zones | rails | alerts | {f"alarm {alarm.name}" for alarm in reading.over_current}


def _without_integrated(nvml: BoxReading) -> BoxReading:
    """Return NVML's reading without heat and power of the GPU in a Jetson's module, which are the module's own."""
    keys = {gpu.key for gpu in nvml.gpus if gpu.is_integrated}
    parts: dict[str, Any] = {
        name: tuple(item for item in getattr(nvml, name) if item.name not in keys)
        for name in ("zones", "rails", "energy", "fans")
    }
    return replace(nvml, **parts)


def heat(zones: Sequence[Zone]) -> CriticalTemperature | None:
    """Return the temperature to go by; None without a zone that can be read.

    A Jetson's junction is the hottest of its others, and slows down where the first of them does. Elsewhere it is the
    zone with the least headroom, or the hottest where none tells a trip.
    """
    junction = next((zone for zone in zones if zone.name == JUNCTION), None)
    if junction is not None:
        return _heat_of_junction(junction, zones)
    with_headroom = [zone for zone in zones if zone.headroom_c is not None]
    if with_headroom:
        zone = min(with_headroom, key=_headroom)
        headroom_c = _headroom(zone)
        temperature_c = zone.temperature_c
        trip_c = zone.trips.passive_c if temperature_c is None else temperature_c + headroom_c
        return CriticalTemperature(zone.name, temperature_c, headroom_c, trip_c, zone.trips.critical_c)
    hottest = _hottest(zones)
    return (
        None
        if hottest is None
        else CriticalTemperature(hottest.name, hottest.temperature_c, None, None, hottest.trips.critical_c)
    )


def _heat_of_junction(junction: Zone, zones: Sequence[Zone]) -> CriticalTemperature | None:
    zone = junction if junction.temperature_c is not None else _hottest(zones)
    if zone is None or zone.temperature_c is None:
        return None
    trip_c = min((zone.trips.passive_c for zone in zones if zone.trips.passive_c is not None), default=None)
    critical_c = min((zone.trips.critical_c for zone in zones if zone.trips.critical_c is not None), default=None)
    if trip_c is None and critical_c is not None:
        trip_c = critical_c - _FIRMWARE_BELOW_CRITICAL_C
    headroom_c = None if trip_c is None else trip_c - zone.temperature_c
    return CriticalTemperature(zone.name, zone.temperature_c, headroom_c, trip_c, critical_c)


def _hottest(zones: Sequence[Zone]) -> Zone | None:
    return max((zone for zone in zones if zone.temperature_c is not None), key=_temperature, default=None)


def _temperature(zone: Zone) -> float:
    assert zone.temperature_c is not None
    return zone.temperature_c


def _headroom(zone: Zone) -> float:
    assert zone.headroom_c is not None
    return zone.headroom_c


def _with_power(reading: BoxReading) -> BoxReading:
    """Return the reading with the power of its counted rails, and the limit that holds for just these."""
    counted = [rail for rail in reading.rails if rail.is_counted]
    sources, missing = dict(reading.sources), dict(reading.missing)
    power_mw = _sum([rail.power_mw for rail in counted])
    if power_mw is None:
        missing["power_mw"] = _why_no_power(reading.rails)
    else:
        sources["power_mw"] = " + ".join(rail.name for rail in counted)
    limit_mw = reading.power_limit_mw
    if limit_mw is None:
        limit_mw = _sum([rail.limit_mw for rail in counted])
        if limit_mw is not None:
            sources["power_limit_mw"] = " + ".join(rail.name for rail in counted)
        else:
            missing.setdefault("power_limit_mw", "not every rail that makes up the power has a limit")
    return replace(reading, power_mw=power_mw, power_limit_mw=limit_mw, sources=sources, missing=missing)


def _why_no_power(rails: Sequence[Rail]) -> str:
    problems = [rail.problem for rail in rails if rail.is_counted and rail.problem]
    problems = problems or [rail.problem for rail in rails if rail.problem]
    if problems:
        return "; ".join(problems)
    if rails:
        return f"it is not known which of the rails {', '.join(rail.name for rail in rails)} make up the whole"
    return "no power of anything can be read"


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of numbers that are all known; None without any."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    return sum(numbers) if numbers and len(numbers) == len(known) else None


def _by_name(items: Iterable[Any]) -> tuple[Any, ...]:
    found: dict[str, Any] = {}
    for item in items:
        found.setdefault(item.name, item)
    return tuple(found.values())


def _gpus(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    found: dict[str, Gpu] = {}
    for gpu in gpus:
        known = found.get(gpu.key)
        found[gpu.key] = gpu if known is None else _filled(known, gpu)
    return tuple(found.values())


def _filled(known: Gpu, other: Gpu) -> Gpu:
    """Return the first with what it does not know from the second, metric by metric."""
    values: dict[str, Any] = {}
    sources, missing = dict(known.sources), {**other.missing, **known.missing}
    for item in fields(Gpu):
        mine, theirs = getattr(known, item.name), getattr(other, item.name)
        if mine is None and theirs is not None:
            values[item.name] = theirs
            if item.name in other.sources:
                sources[item.name] = other.sources[item.name]
        if mine is not None or theirs is not None:
            missing.pop(item.name, None)
    values["is_lost"] = known.is_lost or other.is_lost
    values["slowed_by"] = known.slowed_by | other.slowed_by
    return replace(known, **values, sources=sources, missing=missing)
