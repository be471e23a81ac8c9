"""Reader of the kernel's thermal zones and cooling devices (Documentation/driver-api/thermal/sysfs-api.rst).

The numbers of zones and devices change with each boot, so everything is identified by its `type`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from edge_server.plugins.governor.readings import JUNCTION, CoolingDevice, TripPoints, Zone
from edge_server.telemetry.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source_of

_ZONES = "/sys/class/thermal"
_SWITCHED_OFF_MC = -200_000
"""JetPack 5 reports -256000 for a sensor that is switched off."""
_PLAUSIBLE_MC = range(-60_000, 200_000)
_SLOW_READ_PERIOD_S = 0.45
"""Least time between two reads of slow zones, a little less than the half second between two samples."""


class _ZoneFiles(NamedTuple):
    """Files and trip points of one zone."""

    name: str
    path: str
    trips: TripPoints
    mark: Mark


class _CoolerFiles(NamedTuple):
    """Files of one cooling device."""

    name: str
    path: str
    mark: Mark
    max_state: int | None


class ThermalZones:
    """Reads the zones for which `name_of` returns a name. Its argument is the zone's type; None: ignore the zone.

    `is_slow`: each read takes about a millisecond, because another processor (a Jetson's BPMP) answers it. The zones
    are then read at most twice a second, and the last values are returned in between.
    """

    def __init__(
        self, files: SysfsFiles, name_of: Callable[[str], str | None], *, has_trips: bool = True, is_slow: bool = False
    ) -> None:
        self._files = files
        self._name_of = name_of
        self._has_trips = has_trips
        self._period_s = _SLOW_READ_PERIOD_S if is_slow else 0.0
        self._places: FoundPaths[_ZoneFiles] = FoundPaths(self._find, lambda place: files.matches(place.mark))
        self._zones: tuple[Zone, ...] = ()
        self._read_s = -math.inf

    def read(self, now_s: float) -> tuple[Zone, ...]:
        if not 0 <= now_s - self._read_s < self._period_s:
            self._zones = tuple(self._zone(place) for place in self._places.items(now_s))
            self._read_s = now_s
        return self._zones

    def _find(self) -> list[_ZoneFiles]:
        places: dict[str, _ZoneFiles] = {}
        for entry in self._files.names(_ZONES, r"thermal_zone\d+"):
            folder = f"{_ZONES}/{entry}"
            mark = Mark(f"{folder}/type", self._files.maybe_text(f"{folder}/type") or "")
            name = self._name_of(mark.text)
            if name and name not in places:
                trips = self._trips(folder) if self._has_trips else TripPoints()
                places[name] = _ZoneFiles(name, f"{folder}/temp", trips, mark)
        # The junction is read first, because reads may be slow and its value should be as new as possible.
        return sorted(places.values(), key=lambda place: place.name != JUNCTION)

    def _trips(self, folder: str) -> TripPoints:
        """Return the lowest trip point of each kind. Values of zero or less, or implausible ones, are not set."""
        lowest: dict[str, float] = {}
        for entry in self._files.names(folder, r"trip_point_\d+_type"):
            kind = self._files.maybe_text(f"{folder}/{entry}")
            at_mc = self._files.maybe_number(f"{folder}/{entry.removesuffix('type')}temp")
            if kind and at_mc is not None and at_mc in _PLAUSIBLE_MC and at_mc > 0:
                lowest[kind] = min(lowest.get(kind, at_mc / 1000), at_mc / 1000)
        return TripPoints(lowest.get("passive"), lowest.get("hot"), lowest.get("critical"))

    def _zone(self, place: _ZoneFiles) -> Zone:
        at_mc = self._files.number(place.path)
        if place.name == JUNCTION and isinstance(at_mc, MissingReason) and at_mc.is_temporary:
            # The firmware is sometimes busy. Only the junction is important enough for a second read.
            at_mc = self._files.number(place.path)
        if isinstance(at_mc, MissingReason):
            if not at_mc.is_temporary:
                self._places.forget()
            return Zone(place.name, None, place.trips, source=source_of(place.path), problem=at_mc.reason)
        problem = implausible_reason(place.path, at_mc)
        temperature_c = None if problem else at_mc / 1000
        return Zone(place.name, temperature_c, place.trips, source=source_of(place.path), problem=problem)


class CoolingDevices:
    """Reads the cooling devices that throttle. Fans and hot-surface alerts are ignored."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._places: FoundPaths[_CoolerFiles] = FoundPaths(self._find, lambda place: files.matches(place.mark))

    def read(self, now_s: float) -> tuple[CoolingDevice, ...]:
        coolers: dict[str, CoolingDevice] = {}
        for place in self._places.items(now_s):
            state = self._files.maybe_number(place.path)
            if state is None:
                self._places.forget()
                continue
            known = coolers.get(place.name)
            if known is None or known.state < state:
                is_alert = place.name.endswith("throttle-alert")
                coolers[place.name] = CoolingDevice(place.name, state, place.max_state, is_alert, source_of(place.path))
        return tuple(coolers.values())

    def _find(self) -> list[_CoolerFiles]:
        places = []
        for entry in self._files.names(_ZONES, r"cooling_device\d+"):
            folder = f"{_ZONES}/{entry}"
            name = self._files.maybe_text(f"{folder}/type") or ""
            if re.fullmatch(r".+-throttle-alert|(thermal-)?(devfreq|cpufreq)-.+", name):
                max_state = self._files.maybe_number(f"{folder}/max_state")
                places.append(_CoolerFiles(name, f"{folder}/cur_state", Mark(f"{folder}/type", name), max_state))
        return places


def implausible_reason(path: str, at_mc: int) -> str:
    """Return the reason why a temperature in thousandths of a degree is invalid, or "" if it is plausible."""
    if at_mc <= _SWITCHED_OFF_MC:
        return f"{path}: switched off for now (it reads {at_mc // 1000} °C)"
    return "" if at_mc in _PLAUSIBLE_MC else f"{path}: {at_mc} thousandths of a degree cannot be"
