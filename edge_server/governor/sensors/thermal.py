"""Thermal zones and cooling devices of the kernel (Documentation/driver-api/thermal/sysfs-api.rst).

Numbers of zones and devices change from boot to boot, and sort badly as text: everything is keyed by its `type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_server.governor.readings import Cooler, Trips, Zone
from edge_server.governor.sensors.files import Absent, Files, Found, source

JUNCTION = "tj"
"""Name of a Jetson's zone that is the hottest of the chip's others."""

_ZONES = "/sys/class/thermal"
_SWITCHED_OFF_MC = -200_000
"""JetPack 5 reads -256000 where the sensor is switched off with what it measures."""
_PLAUSIBLE_MC = range(-60_000, 200_000)


@dataclass(frozen=True, slots=True)
class _ZonePlace:
    name: str
    path: str
    trips: Trips


@dataclass(frozen=True, slots=True)
class _CoolerPlace:
    name: str
    path: str
    max_state: int | None


class ThermalZones:
    """The zones that `name_of` gives a name; it is given a zone's type, and returns None for one of no interest."""

    def __init__(self, files: Files, name_of: Callable[[str], str | None], *, has_trips: bool = True) -> None:
        self._files = files
        self._name_of = name_of
        self._has_trips = has_trips
        self._places: Found[_ZonePlace] = Found(self._find)

    def read(self, now_s: float) -> tuple[Zone, ...]:
        return tuple(self._zone(place) for place in self._places.items(now_s))

    def _find(self) -> list[_ZonePlace]:
        places: dict[str, _ZonePlace] = {}
        for entry in self._files.names(_ZONES, r"thermal_zone\d+"):
            folder = f"{_ZONES}/{entry}"
            name = self._name_of(self._files.maybe_text(f"{folder}/type") or "")
            if name and name not in places:
                trips = self._trips(folder) if self._has_trips else Trips()
                places[name] = _ZonePlace(name, f"{folder}/temp", trips)
        # The junction comes first: reading it may be slow, and it should be as fresh as can be.
        return sorted(places.values(), key=lambda place: place.name != JUNCTION)

    def _trips(self, folder: str) -> Trips:
        """Return the lowest trip of each kind. Those at zero and below are not set."""
        lowest: dict[str, float] = {}
        for entry in self._files.names(folder, r"trip_point_\d+_type"):
            kind = self._files.maybe_text(f"{folder}/{entry}")
            at_mc = self._files.maybe_number(f"{folder}/{entry.removesuffix('type')}temp")
            if kind and at_mc is not None and at_mc > 0:
                lowest[kind] = min(lowest.get(kind, at_mc / 1000), at_mc / 1000)
        return Trips(lowest.get("passive"), lowest.get("hot"), lowest.get("critical"))

    def _zone(self, place: _ZonePlace) -> Zone:
        at_mc = self._files.number(place.path)
        if place.name == JUNCTION and isinstance(at_mc, Absent) and at_mc.is_passing:
            # Now and then the firmware is busy; the others are not worth a second try.
            at_mc = self._files.number(place.path)
        if isinstance(at_mc, Absent):
            if not at_mc.is_passing:
                self._places.forget()
            return Zone(place.name, None, place.trips, source=source(place.path), problem=at_mc.reason)
        problem = implausible(place.path, at_mc)
        temperature_c = None if problem else at_mc / 1000
        return Zone(place.name, temperature_c, place.trips, source=source(place.path), problem=problem)


class CoolingDevices:
    """The devices that slow something down. Fans do not, and a hot-surface alert warns fingers."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._places: Found[_CoolerPlace] = Found(self._find)

    def read(self, now_s: float) -> tuple[Cooler, ...]:
        coolers: dict[str, Cooler] = {}
        for place in self._places.items(now_s):
            state = self._files.maybe_number(place.path)
            if state is None:
                self._places.forget()
                continue
            known = coolers.get(place.name)
            if known is None or known.state < state:
                is_alert = place.name.endswith("throttle-alert")
                coolers[place.name] = Cooler(place.name, state, place.max_state, is_alert, source(place.path))
        return tuple(coolers.values())

    def _find(self) -> list[_CoolerPlace]:
        places = []
        for entry in self._files.names(_ZONES, r"cooling_device\d+"):
            folder = f"{_ZONES}/{entry}"
            name = self._files.maybe_text(f"{folder}/type") or ""
            if re.fullmatch(r".+-throttle-alert|(thermal-)?(devfreq|cpufreq)-.+", name):
                places.append(
                    _CoolerPlace(name, f"{folder}/cur_state", self._files.maybe_number(f"{folder}/max_state"))
                )
        return places


def implausible(path: str, at_mc: int) -> str:
    """Return why a temperature in thousandths of a degree is none, "" for one that may be."""
    if at_mc <= _SWITCHED_OFF_MC:
        return f"{path}: switched off for now (it reads {at_mc // 1000} °C)"
    return "" if at_mc in _PLAUSIBLE_MC else f"{path}: {at_mc} thousandths of a degree cannot be"
