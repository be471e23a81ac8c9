"""Readings of x86 and other machines that are not a Jetson: temperatures, RAPL power, throttling, Intel's GPUs.

coretemp and k10temp: Documentation/hwmon/{coretemp,k10temp}.rst. RAPL: Documentation/power/powercap/powercap.rst.
Thermal throttling of a processor: /sys/devices/system/cpu/cpuN/thermal_throttle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from edge_server.plugins.governor.readings import EventCounter, MachineReading, ThrottleReason, TripPoints, Zone
from edge_server.plugins.governor.sensors.clocks import Clocks
from edge_server.plugins.governor.sensors.counter_rates import EventRate
from edge_server.plugins.governor.sensors.fans import hwmon_fans
from edge_server.plugins.governor.sensors.intel_gpu import IntelGpus
from edge_server.plugins.governor.sensors.rapl import Rapl
from edge_server.plugins.governor.sensors.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of
from edge_server.plugins.governor.sensors.thermal import ThermalZones, implausible_reason

_CPUS = "/sys/devices/system/cpu"


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

    def close(self) -> None:
        pass

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
                found += self._k10temp(folder, len(found))
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

    def _k10temp(self, folder: str, index: int) -> Iterator[_Temperature]:
        labels = {label: number for number, label in self._labels(folder)}
        # Tctl is Tdie plus an offset on some models; tempN_max is a constant of the driver.
        number = labels.get("Tdie") or labels.get("Tctl") or "1"
        trips = TripPoints(self._degrees(f"{folder}/temp{number}_crit") or self._degrees(f"{folder}/temp1_crit"))
        mark = Mark(f"{folder}/name", "k10temp")
        yield _Temperature(f"package-{index}", f"{folder}/temp{number}_input", trips, mark)

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
