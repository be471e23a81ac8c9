"""Readings of x86 and other machines that are not a Jetson: temperatures, RAPL power, throttling, Intel's GPUs.

coretemp and k10temp: Documentation/hwmon/{coretemp,k10temp}.rst. RAPL: Documentation/power/powercap/powercap.rst.
Thermal throttling of a processor: /sys/devices/system/cpu/cpuN/thermal_throttle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from edge_server.plugins.governor.readings import (
    EnergyCounter,
    EventCounter,
    FanReading,
    Gpu,
    MachineReading,
    Rail,
    ThrottleReason,
    TripPoints,
    Zone,
)
from edge_server.plugins.governor.sensors.clocks import Clocks
from edge_server.plugins.governor.sensors.counter_rates import EnergyMeter, EventRate
from edge_server.plugins.governor.sensors.thermal import ThermalZones, implausible_reason
from edge_server.telemetry.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of

_CPUS = "/sys/devices/system/cpu"


_POWERCAP = "/sys/class/powercap"
_LONGEST_S = 30.0
"""Longest gap between two readings for a valid power. A package's counter may wrap within about a minute."""


class _Domain(NamedTuple):
    """One power domain. `is_counted`: packages, and memory, which is not part of a package. Cores and graphics are part
    of a package, and psys, if present, contains everything."""

    name: str
    folder: str
    kind: str
    is_counted: bool
    range_uj: int | None
    limit_mw: int | None


def _metered(
    name: str, path: str, energy: tuple[int, float | None], limit_mw: int | None, *, is_counted: bool
) -> tuple[Rail, EnergyCounter]:
    """Return the rail and the counter of a meter's total (microjoules) and power (microwatts)."""
    energy_uj, power_uw = energy
    problem = "" if power_uw is not None else f"{path}: power follows from two readings"
    power_mw = None if power_uw is None else round(power_uw / 1000)
    rail = Rail(name, power_mw, is_counted, limit_mw, source=source_of(path), problem=problem)
    return rail, EnergyCounter(name, energy_uj // 1000, is_counted, source_of(path))


class Rapl:
    """Reads RAPL, the energy counters of Intel and AMD processors and their memory, as rails and energy counters.

    `energy_uj` counts microjoules and wraps after `max_energy_range_uj`. Because of the PLATYPUS attack only root may
    read it; a udev or tmpfiles rule can permit other users.
    """

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._domains: FoundPaths[_Domain] = FoundPaths(
            self._find, lambda domain: files.matches(Mark(f"{domain.folder}/name", domain.kind))
        )
        self._meters: dict[str, EnergyMeter] = {}

    def read(self, now_s: float) -> tuple[tuple[Rail, ...], tuple[EnergyCounter, ...]]:
        rails, counters = [], []
        for domain in self._domains.items(now_s):
            path = f"{domain.folder}/energy_uj"
            count = self._files.number(path)
            if isinstance(count, MissingReason):
                # A domain that was never readable is not counted, else the total power would be unknown.
                is_counted = domain.is_counted and domain.name in self._meters
                source = source_of(path)
                rails.append(Rail(domain.name, None, is_counted, domain.limit_mw, source=source, problem=count.reason))
                continue
            meter = self._meters.setdefault(domain.name, EnergyMeter(domain.range_uj))
            energy = meter.feed(count, now_s, _LONGEST_S)
            rail, counter = _metered(domain.name, path, energy, domain.limit_mw, is_counted=domain.is_counted)
            rails.append(rail)
            counters.append(counter)
        return tuple(rails), tuple(counters)

    def _find(self) -> list[_Domain]:
        domains = []
        for entry in self._files.names(_POWERCAP, r"intel-rapl:\d+(:\d+)?"):
            folder = f"{_POWERCAP}/{entry}"
            kind = self._files.maybe_text(f"{folder}/name")
            if kind:
                package = self._files.maybe_text(f"{_POWERCAP}/{entry.rpartition(':')[0]}/name")
                is_inside = entry.count(":") > 1
                domains.append(
                    _Domain(
                        f"{package} {kind}" if is_inside and package else kind,
                        folder,
                        kind,
                        kind == "dram" if is_inside else kind.startswith("package"),
                        self._files.maybe_number(f"{folder}/max_energy_range_uj"),
                        self._limit_mw(folder),
                    )
                )
        return domains

    def _limit_mw(self, folder: str) -> int | None:
        """Return the long-term limit."""
        for entry in self._files.names(folder, r"constraint_\d+_name"):
            if self._files.maybe_text(f"{folder}/{entry}") == "long_term":
                limit_uw = self._files.maybe_number(f"{folder}/{entry.removesuffix('name')}power_limit_uw")
                return limit_uw // 1000 if limit_uw else None
        return None


_DRM = "/sys/class/drm"

_CAUSES = {
    "thermal": ThrottleReason.THERMAL,
    "prochot": ThrottleReason.THERMAL,
    "ratl": ThrottleReason.THERMAL,
    "vr_thermalert": ThrottleReason.THERMAL,
    "pl1": ThrottleReason.POWER_CAP,
    "pl2": ThrottleReason.POWER_CAP,
    "pl4": ThrottleReason.POWER_CAP,
    "vr_tdc": ThrottleReason.OVER_CURRENT,
}
"""File names after `throttle_reason_` or `reason_`. "status" is left out: it only says that there is a reason."""


class _Card(NamedTuple):
    """Files of one GPU. `monitor` is the folder of its hwmon device, "" for an integrated GPU."""

    key: str
    driver: str
    current: str
    reasons: tuple[tuple[str, str], ...]
    monitor: str


class IntelGpus:
    """Reads Intel GPUs with the drivers i915 and xe: clocks, throttle reasons, and the energy of discrete cards.

    The power of an integrated GPU is part of the processor package. Discrete cards have a hwmon device
    (Documentation/ABI/testing/sysfs-driver-intel-{i915,xe}-hwmon).
    """

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._cards: FoundPaths[_Card] = FoundPaths(self._find)
        self._meters: dict[str, EnergyMeter] = {}

    def read(self, now_s: float) -> tuple[tuple[Gpu, ...], tuple[Rail, ...], tuple[EnergyCounter, ...]]:
        gpus, rails, counters = [], [], []
        for card in self._cards.items(now_s):
            if card.monitor:
                rail, counter = self._energy(card, now_s)
                rails.append(rail)
                counters += [counter] if counter is not None else []
            gpus.append(self._gpu(card))
        return tuple(gpus), tuple(rails), tuple(counters)

    def _gpu(self, card: _Card) -> Gpu:
        clock_mhz = self._files.number(card.current)
        reasons = frozenset(reason for reason, path in card.reasons if self._files.maybe_number(path))
        if isinstance(clock_mhz, MissingReason):
            self._cards.forget()
        return Gpu(
            card.key,
            name=f"Intel GPU ({card.driver})",
            is_integrated=not card.monitor,
            clock_hz=None if isinstance(clock_mhz, MissingReason) else clock_mhz * 1_000_000,
            reasons=reasons if card.reasons else None,
            slowed_by=frozenset(_CAUSES[reason] for reason in reasons),
            sources={"clock_hz": source_of(card.current)},
            missing={"clock_hz": clock_mhz.reason} if isinstance(clock_mhz, MissingReason) else {},
        )

    def _energy(self, card: _Card, now_s: float) -> tuple[Rail, EnergyCounter | None]:
        path = f"{card.monitor}/energy1_input"
        limit_uw = self._files.maybe_number(f"{card.monitor}/power1_max")
        limit_mw = limit_uw // 1000 if limit_uw else None
        count = self._files.number(path)
        if isinstance(count, MissingReason):
            return Rail(card.key, None, False, limit_mw, source=source_of(path), problem=count.reason), None
        energy = self._meters.setdefault(card.key, EnergyMeter()).feed(count, now_s)
        return _metered(card.key, path, energy, limit_mw, is_counted=True)

    def _find(self) -> list[_Card]:
        cards = []
        for entry in self._files.names(_DRM, r"card\d+"):
            i915 = f"{_DRM}/{entry}/gt/gt0"
            xe = f"{_DRM}/{entry}/device/tile0/gt0/freq0"
            if self._files.exists(f"{i915}/rps_cur_freq_mhz"):
                cards.append(self._card(entry, "i915", i915, "rps_cur_freq_mhz"))
            elif self._files.exists(f"{xe}/cur_freq"):
                cards.append(self._card(entry, "xe", xe, "cur_freq"))
        return cards

    def _card(self, key: str, driver: str, folder: str, current: str) -> _Card:
        where, prefix = (folder, "throttle_reason_") if driver == "i915" else (f"{folder}/throttle", "reason_")
        reasons = [
            (entry.removeprefix(prefix), f"{where}/{entry}")
            for entry in self._files.names(where, rf"{prefix}({'|'.join(_CAUSES)})")
        ]
        hwmon = f"{_DRM}/{key}/device/hwmon"
        monitors = (f"{hwmon}/{entry}" for entry in self._files.names(hwmon, r"hwmon\d+"))
        monitor = next(
            (
                path
                for path in monitors
                if self._files.maybe_text(f"{path}/name") == driver and self._files.exists(f"{path}/energy1_input")
            ),
            "",
        )
        return _Card(key, driver, f"{folder}/{current}", tuple(reasons), monitor)


class _Temperature(NamedTuple):
    """File and trip points of one processor temperature."""

    name: str
    path: str
    trips: TripPoints
    mark: Mark


class _Throttle(NamedTuple):
    """Throttle counters `paths` whose sum is one counter."""

    name: str
    paths: tuple[str, ...]


class X86Sensor:
    """Reads processors and their integrated devices."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._temperatures: FoundPaths[_Temperature] = FoundPaths(
            self._find_temperatures, lambda place: files.matches(place.mark)
        )
        # The trip points of x86_pkg_temp are alarms that programs set.
        self._package = ThermalZones(
            files, lambda kind: "package-0" if kind == "x86_pkg_temp" else None, has_trips=False
        )
        self._others = ThermalZones(files, _zone_name)
        self._rapl = Rapl(files)
        self._throttles: FoundPaths[_Throttle] = FoundPaths(self._find_throttles)
        self._rates: dict[str, EventRate] = {}
        # Each core has its own policy here, and all have the same limits.
        self._clocks = Clocks(files, most_clusters=1)
        self._gpus = IntelGpus(files)

    def read(self, now_s: float) -> MachineReading:
        zones = self._zones(now_s)
        rails, energy = self._rapl.read(now_s)
        gpus, gpu_rails, gpu_energy = self._gpus.read(now_s)
        missing = {}
        if not zones:
            missing["zones"] = "no temperature of the processor is to be found under /sys (yet)"
        if not rails:
            missing["rails"] = "no RAPL domain is to be found under /sys/class/powercap (yet)"
        return MachineReading(
            now_s,
            board=self._files.maybe_text("/sys/class/dmi/id/product_name") or None,
            zones=zones,
            rails=(*rails, *gpu_rails),
            energy=(*energy, *gpu_energy),
            clocks=self._clocks.read(now_s),
            throttles=self._throttled(now_s),
            fans=hwmon_fans(self._files),
            gpus=gpus,
            missing=missing,
        )

    def _zones(self, now_s: float) -> tuple[Zone, ...]:
        zones = tuple(self._zone(place) for place in self._temperatures.items(now_s))
        if any(zone.temperature_c is not None for zone in zones):
            return zones
        # The kernel's zone is the same sensor. It is used if the driver is not loaded or fails.
        trips = {zone.name: zone.trips for zone in zones}
        others = self._package.read(now_s) or self._others.read(now_s)
        return tuple(zone._replace(trips=trips.get(zone.name, zone.trips)) for zone in others) or zones

    def _zone(self, place: _Temperature) -> Zone:
        at_mc = self._files.number(place.path)
        zone = Zone(place.name, None, place.trips, source=source_of(place.path))
        if isinstance(at_mc, MissingReason):
            self._temperatures.forget()
            return zone._replace(problem=at_mc.reason)
        problem = implausible_reason(place.path, at_mc)
        return zone._replace(problem=problem) if problem else zone._replace(temperature_c=at_mc / 1000)

    def _find_temperatures(self) -> list[_Temperature]:
        found: list[_Temperature] = []
        for name, folder in self._files.hwmons():
            if name == "coretemp":
                found += self._coretemp(folder)
            elif name == "k10temp":
                found.append(self._k10temp(folder, len(found)))
        return found

    def _coretemp(self, folder: str) -> Iterator[_Temperature]:
        labels = dict(self._labels(folder))
        packages = {number: label for number, label in labels.items() if label.startswith("Package id ")}
        for number, label in (packages or labels).items():
            # tempN_crit is TjMax, at which the processor throttles. The switch-off temperature is not reported.
            trips = TripPoints(
                self._degrees(f"{folder}/temp{number}_crit"), self._degrees(f"{folder}/temp{number}_max")
            )
            name = label.lower().replace("package id ", "package-").replace(" ", "-")
            yield _Temperature(name, f"{folder}/temp{number}_input", trips, Mark(f"{folder}/temp{number}_label", label))

    def _k10temp(self, folder: str, index: int) -> _Temperature:
        labels = {label: number for number, label in self._labels(folder)}
        # Tctl is Tdie plus an offset on some models; tempN_max is a constant of the driver.
        number = labels.get("Tdie") or labels.get("Tctl") or "1"
        trips = TripPoints(self._degrees(f"{folder}/temp{number}_crit") or self._degrees(f"{folder}/temp1_crit"))
        mark = Mark(f"{folder}/name", "k10temp")
        return _Temperature(f"package-{index}", f"{folder}/temp{number}_input", trips, mark)

    def _labels(self, folder: str) -> Iterator[tuple[str, str]]:
        for entry in self._files.names(folder, r"temp\d+_label"):
            label = self._files.maybe_text(f"{folder}/{entry}")
            if label:
                yield entry.removeprefix("temp").removesuffix("_label"), label

    def _degrees(self, path: str) -> float | None:
        at_mc = self._files.maybe_number(path)
        return at_mc / 1000 if at_mc is not None and at_mc > 0 else None

    def _throttled(self, now_s: float) -> tuple[EventCounter, ...]:
        counters = []
        for place in self._throttles.items(now_s):
            counts = [self._files.maybe_number(path) for path in place.paths]
            known = [count for count in counts if count is not None]
            if len(known) < len(counts):
                self._throttles.forget()
                continue
            rate, sustained = self._rates.setdefault(place.name, EventRate()).feed(sum(known), now_s)
            source = source_of(place.paths[0])
            counters.append(EventCounter(place.name, ThrottleReason.THERMAL, sum(known), rate, sustained, source))
        return tuple(counters)

    def _find_throttles(self) -> list[_Throttle]:
        """Return one counter per package (the same for all its processors), and one for all cores together."""
        packages: dict[str, str] = {}
        cores = []
        for entry in self._files.names(_CPUS, r"cpu\d+"):
            folder = f"{_CPUS}/{entry}/thermal_throttle"
            if self._files.exists(f"{folder}/package_throttle_count"):
                package = self._files.maybe_text(f"{_CPUS}/{entry}/topology/physical_package_id") or "0"
                packages.setdefault(f"package-{package}", f"{folder}/package_throttle_count")
            if self._files.exists(f"{folder}/core_throttle_count"):
                cores.append(f"{folder}/core_throttle_count")
        found = [_Throttle(name, (path,)) for name, path in packages.items()]
        return [*found, _Throttle("cores", tuple(cores))] if cores else found


def _zone_name(kind: str) -> str | None:
    """Return the name of a processor's zone on other boards: "cpu" for cpu-thermal, soc_thermal, gpu-thermal."""
    found = re.fullmatch(r"((cpu|soc|gpu)\d*)([-_].*)?", kind.lower())
    return found[1] if found else None


def hwmon_fans(files: SysfsFiles) -> tuple[FanReading, ...]:
    """Return all fans with a speed sensor."""
    fans = []
    for name, folder in files.hwmons():
        for entry in files.names(folder, r"fan\d+_input"):
            rpm = files.maybe_number(f"{folder}/{entry}")
            label = files.maybe_text(f"{folder}/{entry.replace('input', 'label')}") or entry.removesuffix("_input")
            if rpm is not None:
                fans.append(FanReading(f"{name} {label}", None, rpm, source_of(f"{folder}/{entry}")))
    return tuple(fans)
