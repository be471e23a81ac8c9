"""Readings of a Jetson: reads temperatures, power, clocks and loads from files (JetPack 5 to 7 on Orin, JetPack 7 on
Thor).

It needs no root rights, no jtop and no tegrastats. It is preferred to NVML on these boards, because NVML reports zeros
and invented processes for Orin's GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from edge_server.plugins.governor.readings import (
    Clock,
    EventCounter,
    Gpu,
    MachineReading,
    PowerMode,
    ThrottleReason,
    Zone,
)
from edge_server.plugins.governor.sensors.clocks import Clocks, gpu_devfreq
from edge_server.plugins.governor.sensors.counter_rates import EventRate, MovingAverage
from edge_server.plugins.governor.sensors.fans import jetson_fans
from edge_server.plugins.governor.sensors.jetson_identity import IdentityReader, read_power_mode
from edge_server.plugins.governor.sensors.power_rails import JetsonRails
from edge_server.plugins.governor.sensors.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of
from edge_server.plugins.governor.sensors.thermal import CoolingDevices, ThermalZones

_LOADS = (
    "/sys/devices/platform/gpu.0/load",
    "/sys/devices/gpu.0/load",
    "/sys/devices/platform/bus@0/17000000.gpu/load",
    "/sys/devices/platform/17000000.gpu/load",
    "/sys/devices/platform/17000000.ga10b/load",
)
"""Files of the GPU's load, in thousandths: JetPack 6 and 7, JetPack 5, kernels without the alias."""

_LOAD_SMOOTHING_S = 2.0
"""Each value of the load is that of a short moment, so it is averaged."""

_OVER_CURRENT = {
    "oc1": ThrottleReason.UNDER_VOLTAGE,
    "oc2": ThrottleReason.OVER_CURRENT,
    "oc3": ThrottleReason.OVER_CURRENT,
}
"""Alarms of the power monitor: supply voltage too low, average power too high, momentary power too high."""


class _Counter(NamedTuple):
    """File of one over-current counter."""

    name: str
    path: str
    mark: Mark


class TegraSensor:
    """Reads a Jetson. On other machines it reads only the board's name."""

    def __init__(self, files: SysfsFiles, identity: IdentityReader | None = None) -> None:
        self._files = files
        self._identity = identity or IdentityReader(files)
        self._mode: FoundPaths[PowerMode | str] = FoundPaths(lambda: [read_power_mode(files)])
        self._zones = ThermalZones(files, zone_name, is_slow=True)
        self._coolers = CoolingDevices(files)
        self._rails = JetsonRails(files)
        self._clocks = Clocks(files)
        self._counters: FoundPaths[_Counter] = FoundPaths(
            self._find_counters, lambda counter: files.matches(counter.mark)
        )
        self._rates: dict[str, EventRate] = {}
        self._load: FoundPaths[str] = FoundPaths(self._find_load)
        self._smooth = MovingAverage(_LOAD_SMOOTHING_S)

    def read(self, now_s: float) -> MachineReading:
        identity = self._identity.read(now_s)
        if identity.soc is None:
            return MachineReading(now_s, board=identity.board)
        zones = self._zones.read(now_s)
        clocks = self._clocks.read(now_s)
        mode = self._mode.items(now_s)[0]
        reading = MachineReading(
            now_s,
            board=identity.board,
            soc=identity.soc,
            l4t=identity.l4t,
            jetpack=identity.jetpack,
            power_mode=mode if isinstance(mode, PowerMode) else None,
            zones=zones,
            coolers=self._coolers.read(now_s),
            rails=self._rails.read(now_s),
            clocks=clocks,
            over_current=self._over_current(now_s),
            fans=jetson_fans(self._files),
            gpus=(self._gpu(zones, clocks, now_s),),
        )
        return _with_limit(replace(reading, missing=_missing(reading, "" if isinstance(mode, PowerMode) else mode)))

    def close(self) -> None:
        pass

    def _gpu(self, zones: tuple[Zone, ...], clocks: tuple[Clock, ...], now_s: float) -> Gpu:
        clock = next((item for item in clocks if item.name == "gpu"), None)
        zone = next((item for item in zones if item.name == "gpu"), None)
        paths = self._load.items(now_s)
        load = self._files.number(paths[0]) if paths else MissingReason("no load file of the GPU is to be found (yet)")
        missing: dict[str, str] = {}
        sources: dict[str, str] = {}
        utilization = None
        if isinstance(load, MissingReason):
            self._load.forget()
            missing["utilization"] = load.reason
        else:
            utilization = self._smooth.feed(min(1.0, max(0, load) / 1000), now_s)
            sources["utilization"] = source_of(paths[0])
        if zone is not None:
            sources["temperature_c"] = zone.source
        if clock is not None:
            sources["clock_hz"] = clock.source
        return Gpu(
            "igpu",
            is_integrated=True,
            utilization=utilization,
            temperature_c=None if zone is None else zone.temperature_c,
            clock_hz=None if clock is None else clock.current_hz,
            clock_cap_hz=None if clock is None else clock.cap_hz,
            highest_clock_hz=None if clock is None else clock.highest_hz,
            sources=sources,
            missing=missing,
        )

    def _find_load(self) -> list[str]:
        folder = gpu_devfreq(self._files)
        places = [*_LOADS, *([f"{folder}/device/load"] if folder else [])]
        return [path for path in places if self._files.exists(path)][:1]

    def _over_current(self, now_s: float) -> tuple[EventCounter, ...]:
        counters = []
        for counter in self._counters.items(now_s):
            count = self._files.number(counter.path)
            if isinstance(count, MissingReason):
                self._counters.forget()
                continue
            rate, sustained = self._rates.setdefault(counter.name, EventRate()).feed(count, now_s)
            slowdown = _OVER_CURRENT[counter.name]
            counters.append(EventCounter(counter.name, slowdown, count, rate, sustained, source_of(counter.path)))
        return tuple(counters)

    def _find_counters(self) -> list[_Counter]:
        return [
            _Counter(entry.partition("_")[0], f"{folder}/{entry}", Mark(f"{folder}/name", name))
            for name, folder in self._files.hwmons()
            if name == "soctherm_oc"
            for entry in self._files.names(folder, r"oc[123]_event_cnt")
        ]


def _missing(reading: MachineReading, mode_problem: str) -> dict[str, str]:
    """Return the reasons why parts of a Jetson's reading are missing."""
    missing = {
        name: f"no {name.replace('_', '-')} to be found under /sys (yet)"
        for name in ("zones", "coolers", "rails", "clocks", "over_current", "fans")
        if not getattr(reading, name)
    }
    if mode_problem:
        missing["power_mode"] = mode_problem
    if reading.l4t is None:
        missing["l4t"] = "neither /etc/nv_tegra_release nor the package nvidia-l4t-core gives the release"
    return missing


def _with_limit(reading: MachineReading) -> MachineReading:
    """Return the reading with the power limit from the name of its power mode."""
    mode = reading.power_mode
    if mode is None:
        return reading
    if mode.watts is None:
        why = f"power mode {mode.name} names no watts"
        return replace(reading, missing={**reading.missing, "power_limit_mw": why})
    sources = {**reading.sources, "power_limit_mw": source_of("/etc/nvpmodel.conf")}
    return replace(reading, power_limit_mw=mode.watts * 1000, sources=sources)


def zone_name(kind: str) -> str | None:
    """Return "cpu" for cpu-thermal and CPU-therm; None for the PMIC (always 100 °C) and the fan (an estimate)."""
    name, dash, ending = kind.lower().rpartition("-")
    if not dash or ending not in ("therm", "thermal") or name.startswith(("pmic", "thermal-fan")):
        return None
    return name
