"""Reading of the whole machine: joins the readings of each sensor, and computes the total power and the
temperature nearest to its throttling limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from edge_server.plugins.governor.readings import JUNCTION, CriticalTemperature, Gpu, MachineReading, Sensor, Zone
from edge_server.plugins.governor.sensors.jetson_identity import IdentityReader
from edge_server.plugins.governor.sensors.memory import MemorySensor
from edge_server.plugins.governor.sensors.nvml_sensor import NvmlSensor
from edge_server.telemetry.sysfs import SysfsFiles

if TYPE_CHECKING:
    from edge_server.plugins.governor.sensors.jetson_sensor import TegraSensor
    from edge_server.plugins.governor.sensors.non_jetson_sensor import X86Sensor

_log = logging.getLogger(__name__)

_FIRMWARE_BELOW_CRITICAL_C = 6.0
"""Thor reports no passive trip point. Its firmware was observed to throttle at 109 °C; it switches off at 114.5 °C."""

ReadSensor: TypeAlias = Callable[[float], MachineReading]
"""Returns the readings of one sensor at a time in seconds."""

_JOINED = ("coolers", "clocks", "over_current", "throttles", "fans", "energy", "zones", "rails")
_FIRST = ("board", "soc", "l4t", "jetpack", "power_mode", "power_limit_mw")


class MachineSensors:
    """Reads all sensors of the machine. Used by one thread at a time.

    On a Jetson the values come from files, and NVML adds missing values of the GPU. On other machines NVIDIA's GPUs are
    read by NVML and all else from files.
    """

    def __init__(
        self, sysfs_root: str | Path = "/", *, files: SysfsFiles | None = None, nvml: Sensor | None = None
    ) -> None:
        self._files = files or SysfsFiles(sysfs_root)
        self._identity = IdentityReader(self._files)
        self._nvml = nvml or NvmlSensor()
        self._tegra: TegraSensor | None = None
        self._x86: X86Sensor | None = None
        self._guarded_tegra = GuardedSensor("tegra", self._read_board)
        self._guarded_x86 = GuardedSensor("x86", self._read_processor)
        self._guarded_memory = GuardedSensor("memory", MemorySensor(self._files).read)
        self._guarded_nvml = GuardedSensor("nvml", self._nvml.read)
        self._is_jetson = False
        self._seen: set[str] = set()

    def read(self, now_s: float) -> MachineReading:
        """Return one reading of all sensors, with the names of sensors that had a reading before and have none now."""
        tegra, nvml, memory = (
            sensor.read(now_s) for sensor in (self._guarded_tegra, self._guarded_nvml, self._guarded_memory)
        )
        # Once a Jetson is recognised, a failed read of its files does not change that.
        self._is_jetson |= tegra.soc is not None
        if self._is_jetson:
            # NVML's temperature and power of a Jetson's GPU are not used: those of the module apply.
            integrated = {gpu.key for gpu in nvml.gpus if gpu.is_integrated}
            kept: dict[str, Any] = {
                name: tuple(item for item in getattr(nvml, name) if item.name not in integrated)
                for name in ("zones", "rails", "energy", "fans")
            }
            reading = join_readings(now_s, (tegra, replace(nvml, **kept), memory))
        else:
            reading = join_readings(now_s, (nvml, self._guarded_x86.read(now_s), tegra, memory))
        present = _present_sensors(reading, self._seen)
        # A lost GPU is reported as lost, so its temperature and power sensors are not reported as silent too.
        lost = {f"{kind} {gpu.key}" for gpu in reading.gpus if gpu.is_lost for kind in ("zone", "rail")}
        self._seen = (self._seen | present) - lost
        return replace(reading, silent=frozenset(self._seen - present))

    def close(self) -> None:
        """Close NVML. The other sensors hold nothing open."""
        try:
            self._nvml.close()
        except Exception as error:  # noqa: BLE001 - an error of the driver must not keep the server from its end
            self._guarded_nvml.log(error)

    def _read_board(self, now_s: float) -> MachineReading:
        """Read the board's name and, on a Jetson, all its sensors. The Jetson modules are imported only there."""
        if self._tegra is None:
            identity = self._identity.read(now_s)
            if identity.soc is None:
                return MachineReading(now_s, board=identity.board)
            from edge_server.plugins.governor.sensors.jetson_sensor import TegraSensor

            self._tegra = TegraSensor(self._files, self._identity)
        return self._tegra.read(now_s)

    def _read_processor(self, now_s: float) -> MachineReading:
        """Read the sensors of a machine that is not a Jetson. Their modules are imported at the first reading."""
        if self._x86 is None:
            from edge_server.plugins.governor.sensors.non_jetson_sensor import X86Sensor

            self._x86 = X86Sensor(self._files)
        return self._x86.read(now_s)


class GuardedSensor:
    """Wraps a sensor so that its errors do not affect other sensors: its part of the reading is empty, and each kind of
    error is logged once."""

    def __init__(self, name: str, read: ReadSensor) -> None:
        self._name = name
        self._read = read
        self._logged: set[str] = set()

    def read(self, now_s: float) -> MachineReading:
        try:
            return self._read(now_s)
        except Exception as error:  # noqa: BLE001 - an error of one driver or file must not hide the other sensors
            return MachineReading(now_s, missing={self._name: self.log(error)})

    def log(self, error: Exception) -> str:
        """Log an error of a kind that was not logged before. Return it as the reason of a missing reading."""
        kind = type(error).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error("sensors of '%s' failed, and are tried again: %s: %s", self._name, kind, error, exc_info=error)
        return f"the sensor failed: {kind}: {error}"


def read_machine(sysfs_root: str | Path = "/") -> MachineReading:
    """Read all sensors once. Values that need two readings, such as rates and RAPL's power, are missing."""
    sensors = MachineSensors(sysfs_root)
    try:
        return sensors.read(time.monotonic())
    finally:
        sensors.close()


def join_readings(now_s: float, parts: Sequence[MachineReading]) -> MachineReading:
    """Return one reading of several parts. If two parts contain the same value, the first one counts."""
    values: dict[str, Any] = {}
    for name in _JOINED:
        by_name: dict[str, Any] = {}
        for part in parts:
            for item in getattr(part, name):
                by_name.setdefault(item.name, item)
        values[name] = tuple(by_name.values())
    for name in _FIRST:
        values[name] = next((found for part in parts if (found := getattr(part, name)) is not None), None)
    values["memory"] = next((part.memory for part in parts if part.memory.total_bytes is not None), parts[-1].memory)
    gpus: dict[str, Gpu] = {}
    for gpu in (gpu for part in parts for gpu in part.gpus):
        gpus[gpu.key] = _merge_gpus(gpus[gpu.key], gpu) if gpu.key in gpus else gpu
    values["gpus"] = tuple(gpus.values())
    for name in ("sources", "missing"):
        values[name] = {key: value for part in reversed(parts) for key, value in getattr(part, name).items()}
    reading = MachineReading(now_s, **values, heat=critical_temperature(values["zones"]))
    known = {name for name in (*_JOINED, *_FIRST) if getattr(reading, name)}
    missing = {key: why for key, why in reading.missing.items() if key not in known}
    return _with_power(replace(reading, missing=missing))


def _present_sensors(reading: MachineReading, before: set[str]) -> set[str]:
    """Return the names of the relevant sensors of temperature, power and throttling that have a reading now.

    If there is a junction zone now or `before`, the other zones are ignored, because they are switched off at times.
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


def critical_temperature(zones: Sequence[Zone]) -> CriticalTemperature | None:
    """Return the most critical temperature, or None if no zone has a reading.

    On a Jetson it is that of the junction, with the lowest trip points of all zones. On other machines it is the zone
    with the least headroom, or the hottest zone if no zone has a trip point.
    """
    junction = next((zone for zone in zones if zone.name == JUNCTION), None)
    if junction is not None:
        return _junction_temperature(junction, zones)
    with_headroom = [zone for zone in zones if zone.headroom_c is not None]
    zone = min(with_headroom, key=lambda zone: zone.headroom_c or 0.0) if with_headroom else _hottest(zones)
    return None if zone is None else zone.critical


def _junction_temperature(junction: Zone, zones: Sequence[Zone]) -> CriticalTemperature | None:
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
    known = [(zone.temperature_c, zone) for zone in zones if zone.temperature_c is not None]
    return max(known, key=lambda item: item[0])[1] if known else None


def _with_power(reading: MachineReading) -> MachineReading:
    """Return the reading with the total power of its counted rails, and the limit of the same rails."""
    counted = [rail for rail in reading.rails if rail.is_counted]
    sources, missing = dict(reading.sources), dict(reading.missing)
    power_mw = _sum([rail.power_mw for rail in counted])
    if power_mw is None:
        rails = reading.rails
        problems = [rail.problem for rail in counted if rail.problem] or [
            rail.problem for rail in rails if rail.problem
        ]
        if problems:
            missing["power_mw"] = "; ".join(problems)
        elif rails:
            names = ", ".join(rail.name for rail in rails)
            missing["power_mw"] = f"it is not known which of the rails {names} make up the total power"
        else:
            missing["power_mw"] = "no power can be read"
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


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum, or None if a number is unknown or there are none."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    return sum(numbers) if numbers and len(numbers) == len(known) else None


def _merge_gpus(known: Gpu, other: Gpu) -> Gpu:
    """Return the first GPU with its unknown values taken from the second."""
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
