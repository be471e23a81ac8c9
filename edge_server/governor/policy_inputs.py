"""From what the box feels to what the law needs of it: one temperature, one power, and why the box slows itself down.

Pure: a reading goes in, an observation comes out; what is remembered is which temperature steers and which kinds of
sensor ever spoke.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_server.governor.control_policy import Cause, PolicyInput
from edge_server.governor.readings import (
    BoxReading,
    CoolingDevice,
    CriticalTemperature,
    EventCounter,
    ThrottleReason,
    Zone,
)

BURSTS_PER_S = 20.0
"""Momentary over-current is told above this rate over a minute. Below it is how some boards work all day, at idle too:
each event halves the clocks for a millisecond."""

STEERS_ON_C = 3.0
"""A temperature goes on steering until another one is nearer to its trip by this much. Each change of hands is a jump
that the law would take for heating."""

_CAUSES = {
    ThrottleReason.THERMAL: Cause.THERMAL,
    ThrottleReason.POWER_CAP: Cause.POWER_CAP,
    ThrottleReason.POWER_BRAKE: Cause.POWER_BRAKE,
    ThrottleReason.UNDER_VOLTAGE: Cause.UNDER_VOLTAGE,
    ThrottleReason.OVER_CURRENT: Cause.OVER_CURRENT,
}
_ALARMS = {"oc1": Cause.UNDER_VOLTAGE, "oc2": Cause.POWER_CAP}
"""Alarms of a Jetson's power monitor that are never harmless: supply voltage too low, average power too high."""


@dataclass(slots=True)
class PolicyInputReader:
    """Reduces readings in order."""

    steers_by: str = ""
    """The zone whose temperature steers, "" where there is none."""

    _spoke: frozenset[str] = frozenset()

    def observe(self, reading: BoxReading, *, is_capped_by_us: bool = False) -> PolicyInput:
        """Return what the law needs. `is_capped_by_us`: the GPU's clock is kept low by this server itself."""
        heat = self._steering(reading)
        self.steers_by = "" if heat is None else heat.name
        power_w = None if reading.power_mw is None else reading.power_mw / 1000
        seen = PolicyInput(
            power_w=power_w,
            power_limit_w=None if reading.power_limit_mw is None else reading.power_limit_mw / 1000,
            slowed_by=slowed_by(reading, is_capped_by_us=is_capped_by_us),
            silent=reading.silent,
            memory_pressure_percent=reading.memory.some_percent or 0.0,
        )
        if heat is not None:
            # The distance alone counts where there is nothing else; else it is in the trip already.
            margin_c = heat.headroom_c if heat.temperature_c is None else None
            seen = replace(
                seen,
                temperature_c=heat.temperature_c,
                trip_c=heat.trip_c,
                critical_c=heat.critical_c,
                margin_c=margin_c,
            )
        self._spoke |= _told(seen)
        return replace(seen, expects=self._spoke)

    def _steering(self, reading: BoxReading) -> CriticalTemperature | None:
        """Return the temperature to go by: the one that the sensors propose, or still the one before."""
        proposed = reading.heat
        zone = next((item for item in reading.zones if item.name == self.steers_by), None)
        if proposed is None or zone is None or proposed.name == self.steers_by or reading.soc is not None:
            return proposed
        if zone.headroom_c is None or proposed.headroom_c is None:
            return proposed
        return proposed if proposed.headroom_c < zone.headroom_c - STEERS_ON_C else _heat_of(zone, zone.headroom_c)


def slowed_by(reading: BoxReading, *, is_capped_by_us: bool = False) -> frozenset[Cause]:
    """Return why the box slows itself down at this moment, by its own word."""
    # NVML makes up answers for the GPU inside a Jetson; the module's own alerts tell what there is to tell.
    is_jetson = reading.soc is not None
    told = {cause for gpu in reading.gpus if not (is_jetson and gpu.is_integrated) for cause in gpu.slowed_by}
    found = {_CAUSES[cause] for cause in told}
    if _is_cooled(reading.coolers) or _is_throttled(reading.throttles):
        found.add(Cause.THERMAL)
    found |= {cause for item in reading.over_current if (cause := _alarm(item)) is not None}
    if not is_capped_by_us and _is_capped_by_mode(reading):
        found.add(Cause.POWER_MODE)
    return frozenset(found)


def _told(seen: PolicyInput) -> frozenset[str]:
    has_heat = seen.temperature_c is not None or seen.margin_c is not None
    names = {"temperature": has_heat, "power": seen.power_w is not None}
    return frozenset(name for name, is_told in names.items() if is_told)


def _heat_of(zone: Zone, headroom_c: float) -> CriticalTemperature:
    temperature_c = zone.temperature_c
    trip_c = zone.trips.passive_c if temperature_c is None else temperature_c + headroom_c
    return CriticalTemperature(zone.name, temperature_c, headroom_c, trip_c, zone.trips.critical_c)


def _is_cooled(coolers: tuple[CoolingDevice, ...]) -> bool:
    """Return whether firmware or kernel hold clocks back. The kernel's coolers follow the firmware's alerts, later."""
    alerts = [item for item in coolers if item.is_alert]
    return any(item.state > 0 for item in alerts or coolers)


def _is_throttled(counters: tuple[EventCounter, ...]) -> bool:
    """Return whether a processor throttled since the last look: as a whole, where that is counted. A single core that
    is hot for a moment is what turbo modes are for."""
    packages = [item for item in counters if item.name.startswith("package")]
    return any(item.per_s for item in packages or counters)


def _alarm(counter: EventCounter) -> Cause | None:
    if counter.name in _ALARMS:
        return _ALARMS[counter.name] if counter.per_s else None
    is_told = counter.sustained_per_s is not None and counter.sustained_per_s > BURSTS_PER_S
    return _CAUSES[counter.slowdown] if is_told else None


def _is_capped_by_mode(reading: BoxReading) -> bool:
    """Return whether a Jetson's power mode, or somebody's cap, keeps the GPU below what its silicon offers."""
    if reading.soc is None:
        return False
    clock = next((item for item in reading.clocks if item.name == "gpu"), None)
    if clock is None or clock.highest_hz is None:
        return False
    mode_hz = None if reading.power_mode is None else reading.power_mode.gpu_cap_hz
    return clock.is_capped or (mode_hz is not None and mode_hz < clock.highest_hz)
