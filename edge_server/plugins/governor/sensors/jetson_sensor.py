"""Readings of a Jetson: temperatures, supply rails, clocks, loads and fan, from files.

JetPack 5 to 7 on Orin, JetPack 7 on Thor.
It needs no root rights, no jtop and no tegrastats. It is preferred to NVML on these boards, because NVML reports zeros
and invented processes for Orin's GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from edge_server.plugins.governor.readings import (
    Clock,
    EventCounter,
    FanReading,
    Gpu,
    MachineReading,
    PowerMode,
    Rail,
    ThrottleReason,
    Zone,
)
from edge_server.plugins.governor.sensors.clocks import Clocks, gpu_devfreq
from edge_server.plugins.governor.sensors.counter_rates import EventRate, MovingAverage
from edge_server.plugins.governor.sensors.jetson_identity import IdentityReader, read_power_mode
from edge_server.plugins.governor.sensors.thermal import CoolingDevices, ThermalZones
from edge_server.telemetry.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of

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


_TOTALS: tuple[tuple[str, ...], ...] = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
)
"""Rails that add up to the total power of a board: Thor with INA238; Orin Nano and NX; AGX Orin; Thor without INA238.

The first row whose rails all exist applies; no total is known for other boards. The rails of AGX Orin's second monitor
are behind VIN_SYS_5V0.
"""

_FULL = 255
"""Pulse width at full speed (Documentation/hwmon/sysfs-interface.rst)."""


class _Channel(NamedTuple):
    """Files of one rail. `power` is the path of a power in microwatts; "": it is voltage times current."""

    name: str
    folder: str
    number: int
    mark: Mark
    power: str = ""


class JetsonRails:
    """Reads the power of the board's supply rails, from the monitors INA3221 and INA238 in the kernel's hwmon files
    (Documentation/hwmon/{ina3221,ina238}.rst). A failed rail does not affect the others.

    An INA3221 reports voltage (mV) and current (mA) of its channels 1 to 3, but no power. Its other files are sums and
    shunt voltages of the same channels, and would count the power twice. The rails of the whole module depend on the
    board and are identified by their labels.
    """

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._channels: FoundPaths[_Channel] = FoundPaths(self._find, lambda channel: files.matches(channel.mark))

    def read(self, now_s: float) -> tuple[Rail, ...]:
        rails = [self._rail(channel) for channel in self._channels.items(now_s)]
        if any(rail.power_mw is None for rail in rails):
            self._channels.forget()
        names = {rail.name for rail in rails}
        counted = next((total for total in _TOTALS if names.issuperset(total)), ())
        return tuple(rail._replace(is_counted=rail.name in counted) for rail in rails)

    def _find(self) -> list[_Channel]:
        channels: list[_Channel] = []
        for name, folder in self._files.hwmons():
            if name == "ina3221":
                channels += self._channels_of(folder)
            elif name == "ina238":
                label = self._files.maybe_text(f"{folder}/label") or "VIN"
                channels.append(_Channel(label, folder, 1, Mark(f"{folder}/name", name), f"{folder}/power1_input"))
        return channels

    def _channels_of(self, folder: str) -> list[_Channel]:
        found = []
        for number in (1, 2, 3):
            label = self._files.maybe_text(f"{folder}/in{number}_label")
            if not label or label == "NC" or label.startswith("sum of"):
                continue
            found.append(_Channel(label, folder, number, Mark(f"{folder}/in{number}_label", label)))
        return found

    def _rail(self, channel: _Channel) -> Rail:
        if channel.power:
            power_uw = self._files.number(channel.power)
            if isinstance(power_uw, MissingReason):
                return Rail(channel.name, None, False, source=source_of(channel.power), problem=power_uw.reason)
            return Rail(channel.name, max(0, power_uw // 1000), False, source=source_of(channel.power))
        flags = [
            self._files.maybe_number(f"{channel.folder}/curr{channel.number}_{kind}_alarm") for kind in ("max", "crit")
        ]
        known = [flag for flag in flags if flag is not None]
        current = f"{channel.folder}/curr{channel.number}_input"
        voltage_mv = self._files.number(f"{channel.folder}/in{channel.number}_input")
        current_ma = self._files.number(current)
        rail = Rail(
            channel.name,
            None,
            False,
            is_alarmed=any(known) if known else None,
            source=source_of(current),
        )
        if isinstance(voltage_mv, MissingReason):
            return rail._replace(problem=voltage_mv.reason)
        if isinstance(current_ma, MissingReason):
            return rail._replace(problem=current_ma.reason)
        # A rail that is switched off sometimes reads a little below zero.
        return rail._replace(power_mw=max(0, voltage_mv * current_ma // 1000))


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
        self._zones = ThermalZones(files, _zone_name, is_slow=True)
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


def _zone_name(kind: str) -> str | None:
    """Return "cpu" for cpu-thermal and CPU-therm; None for the PMIC (always 100 °C) and the fan (an estimate)."""
    name, dash, ending = kind.lower().rpartition("-")
    if not dash or ending not in ("therm", "thermal") or name.startswith(("pmic", "thermal-fan")):
        return None
    return name


def jetson_fans(files: SysfsFiles) -> tuple[FanReading, ...]:
    """Return the fan of a Jetson. One hwmon device controls it, another one counts its revolutions."""
    duty, rpm, source = None, None, ""
    for name, folder in files.hwmons():
        if name in ("pwmfan", "pwm-fan"):
            width = files.maybe_number(f"{folder}/pwm1")
            duty = None if width is None else min(1.0, max(0, width) / _FULL)
            source = source_of(f"{folder}/pwm1")
        elif name in ("pwm_tach", "pwm-tach", "tachometer"):
            turns = files.maybe_number(f"{folder}/rpm")
            rpm = turns if turns is not None else files.maybe_number(f"{folder}/fan1_input")
            source = source or source_of(f"{folder}/rpm")
    return () if duty is None and rpm is None else (FanReading("fan", duty, rpm, source),)
