"""Thermal zones and cooling devices of the kernel (Documentation/driver-api/thermal/sysfs-api.rst).

Numbers of zones and devices change from boot to boot, and sort badly as text: everything is keyed by its `type`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_server.governor.readings import CoolingDevice, TripPoints, Zone
from edge_server.governor.sensors.sysfs import FoundPaths, Mark, MissingReason, SysfsFiles, source

JUNCTION = "tj"
"""Name of a Jetson's zone that is the hottest of the chip's others."""

_ZONES = "/sys/class/thermal"
_SWITCHED_OFF_MC = -200_000
"""JetPack 5 reads -256000 where the sensor is switched off with what it measures."""
_PLAUSIBLE_MC = range(-60_000, 200_000)
_READ_AGAIN_S = 0.45
"""Of zones that are slow to read. A little less than the half second between two looks."""


@dataclass(frozen=True, slots=True)
class _ZonePlace:
    name: str
    path: str
    trips: TripPoints
    mark: Mark


@dataclass(frozen=True, slots=True)
class _CoolerPlace:
    name: str
    path: str
    mark: Mark
    max_state: int | None


class ThermalZones:
    """The zones that `name_of` gives a name; it is given a zone's type, and returns None for one of no interest.

    `is_slow`: every temperature is asked of another processor (a Jetson's BPMP, about a millisecond each). They are
    then read twice a second at most, and what was read is told again in between.
    """

    def __init__(
        self, files: SysfsFiles, name_of: Callable[[str], str | None], *, has_trips: bool = True, is_slow: bool = False
    ) -> None:
        self._files = files
        self._name_of = name_of
        self._has_trips = has_trips
        self._again_s = _READ_AGAIN_S if is_slow else 0.0
        self._places: FoundPaths[_ZonePlace] = FoundPaths(self._find, lambda place: files.bears(place.mark))
        self._zones: tuple[Zone, ...] = ()
        self._read_s = -math.inf

    def read(self, now_s: float) -> tuple[Zone, ...]:
        if not 0 <= now_s - self._read_s < self._again_s:
            self._zones = tuple(self._zone(place) for place in self._places.items(now_s))
            self._read_s = now_s
        return self._zones

    def _find(self) -> list[_ZonePlace]:
        places: dict[str, _ZonePlace] = {}
        for entry in self._files.names(_ZONES, r"thermal_zone\d+"):
            folder = f"{_ZONES}/{entry}"
            mark = Mark(f"{folder}/type", self._files.maybe_text(f"{folder}/type") or "")
            name = self._name_of(mark.text)
            if name and name not in places:
                trips = self._trips(folder) if self._has_trips else TripPoints()
                places[name] = _ZonePlace(name, f"{folder}/temp", trips, mark)
        # The junction comes first: reading it may be slow, and it should be as fresh as can be.
        return sorted(places.values(), key=lambda place: place.name != JUNCTION)

    def _trips(self, folder: str) -> TripPoints:
        """Return the lowest trip of each kind. Those at zero and below, and beyond all reason, are not set."""
        lowest: dict[str, float] = {}
        for entry in self._files.names(folder, r"trip_point_\d+_type"):
            kind = self._files.maybe_text(f"{folder}/{entry}")
            at_mc = self._files.maybe_number(f"{folder}/{entry.removesuffix('type')}temp")
            if kind and at_mc is not None and at_mc in _PLAUSIBLE_MC and at_mc > 0:
                lowest[kind] = min(lowest.get(kind, at_mc / 1000), at_mc / 1000)
        return TripPoints(lowest.get("passive"), lowest.get("hot"), lowest.get("critical"))

    def _zone(self, place: _ZonePlace) -> Zone:
        at_mc = self._files.number(place.path)
        if place.name == JUNCTION and isinstance(at_mc, MissingReason) and at_mc.is_passing:
            # Now and then the firmware is busy; the others are not worth a second try.
            at_mc = self._files.number(place.path)
        if isinstance(at_mc, MissingReason):
            if not at_mc.is_passing:
                self._places.forget()
            return Zone(place.name, None, place.trips, source=source(place.path), problem=at_mc.reason)
        problem = implausible(place.path, at_mc)
        temperature_c = None if problem else at_mc / 1000
        return Zone(place.name, temperature_c, place.trips, source=source(place.path), problem=problem)


class CoolingDevices:
    """The devices that slow something down. Fans do not, and a hot-surface alert warns fingers."""

    def __init__(self, files: SysfsFiles) -> None:
        self._files = files
        self._places: FoundPaths[_CoolerPlace] = FoundPaths(self._find, lambda place: files.bears(place.mark))

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
                coolers[place.name] = CoolingDevice(place.name, state, place.max_state, is_alert, source(place.path))
        return tuple(coolers.values())

    def _find(self) -> list[_CoolerPlace]:
        places = []
        for entry in self._files.names(_ZONES, r"cooling_device\d+"):
            folder = f"{_ZONES}/{entry}"
            name = self._files.maybe_text(f"{folder}/type") or ""
            if re.fullmatch(r".+-throttle-alert|(thermal-)?(devfreq|cpufreq)-.+", name):
                max_state = self._files.maybe_number(f"{folder}/max_state")
                places.append(_CoolerPlace(name, f"{folder}/cur_state", Mark(f"{folder}/type", name), max_state))
        return places


def implausible(path: str, at_mc: int) -> str:
    """Return why a temperature in thousandths of a degree is none, "" for one that may be."""
    if at_mc <= _SWITCHED_OFF_MC:
        return f"{path}: switched off for now (it reads {at_mc // 1000} °C)"
    return "" if at_mc in _PLAUSIBLE_MC else f"{path}: {at_mc} thousandths of a degree cannot be"
