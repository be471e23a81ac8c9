"""Reader of RAPL, the energy counters of Intel and AMD processors and their memory.

`energy_uj` counts microjoules and wraps after `max_energy_range_uj`. Because of the PLATYPUS attack only root may read
it; a udev or tmpfiles rule can permit other users.
"""

from __future__ import annotations

from typing import NamedTuple

from edge_server.plugins.governor.readings import EnergyCounter, Rail
from edge_server.plugins.governor.sensors.counter_rates import EnergyMeter
from edge_server.plugins.governor.sensors.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of

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


class Rapl:
    """Reads the power domains as rails and as energy counters."""

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
                rail = Rail(
                    domain.name, None, is_counted, domain.limit_mw, source=source_of(path), problem=count.reason
                )
                rails.append(rail)
                continue
            meter = self._meters.setdefault(domain.name, EnergyMeter(domain.range_uj))
            energy_uj, power_uw = meter.feed(count, now_s, _LONGEST_S)
            problem = "" if power_uw is not None else f"{path}: power follows from two readings"
            power_mw = None if power_uw is None else round(power_uw / 1000)
            rails.append(
                Rail(domain.name, power_mw, domain.is_counted, domain.limit_mw, source=source_of(path), problem=problem)
            )
            counters.append(EnergyCounter(domain.name, energy_uj // 1000, domain.is_counted, source_of(path)))
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
