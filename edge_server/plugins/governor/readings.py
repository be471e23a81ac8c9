"""Data classes of sensor readings: temperatures, power, clocks, counters and memory of the machine.

Each metric may be absent: a value is None or a group is empty, and `missing` gives the reason. `sources` names the
source of a value: "nvml", or "sysfs:" with the file. Temperatures are in degrees Celsius, power in milliwatts, energy
in millijoules, clocks in hertz. Shares are from 0 to 1.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple, Protocol

from edge_server.record import record

JUNCTION = "tj"
"""Name of a Jetson's zone with the highest temperature of all zones of its chip."""


class ThrottleReason(enum.Enum):
    """Reason why the machine throttles itself, as it reports. The value is the name in metrics and events."""

    THERMAL = "thermal"
    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    UNDER_VOLTAGE = "under_voltage"
    OVER_CURRENT = "over_current"


class TripPoints(NamedTuple):
    """Trip points: the clocks are lowered (`passive_c`), full cooling or hardware throttling starts (`hot_c`), the
    machine switches itself off (`critical_c`). None: not reported."""

    passive_c: float | None = None
    hot_c: float | None = None
    critical_c: float | None = None


class Zone(NamedTuple):
    """One temperature sensor. Some GPUs report `margin_c` instead of trip points: degrees until they throttle.

    `problem` is the reason why `temperature_c` is None. For example, a Jetson switches off the sensor of an idle GPU.
    """

    name: str
    temperature_c: float | None
    trips: TripPoints = TripPoints()
    margin_c: float | None = None
    source: str = ""
    problem: str = ""

    @property
    def headroom_c(self) -> float | None:
        """Degrees until the clocks are lowered; negative above that point."""
        if self.margin_c is not None:
            return self.margin_c
        if self.temperature_c is None or self.trips.passive_c is None:
            return None
        return self.trips.passive_c - self.temperature_c

    @property
    def critical(self) -> CriticalTemperature:
        """This zone's temperature, if it is the most critical one."""
        headroom_c, trip_c = self.headroom_c, self.trips.passive_c
        if self.temperature_c is not None and headroom_c is not None:
            trip_c = self.temperature_c + headroom_c
        return CriticalTemperature(self.name, self.temperature_c, headroom_c, trip_c, self.trips.critical_c)


class CriticalTemperature(NamedTuple):
    """The most critical temperature: that of the junction, or of the zone nearest to its trip point.

    `trip_c` and `critical_c` apply to this temperature. `headroom_c` is the distance to `trip_c`.
    """

    name: str
    temperature_c: float | None
    headroom_c: float | None
    trip_c: float | None
    critical_c: float | None


class CoolingDevice(NamedTuple):
    """A cooling device that throttles. Its state is from 0 (inactive) to `max_state`.

    `is_alert`: it reports throttling by the firmware, which is visible nowhere else.
    """

    name: str
    state: int
    max_state: int | None
    is_alert: bool
    source: str = ""


class Rail(NamedTuple):
    """Power of one supply rail, or of one processor or GPU.

    `is_counted`: it is part of the machine's total power; a rail behind another rail is not. `limit_mw` is enforced.
    `is_alarmed`: an alarm of the monitor is active.
    """

    name: str
    power_mw: int | None
    is_counted: bool
    limit_mw: int | None = None
    is_alarmed: bool | None = None
    source: str = ""
    problem: str = ""


class EnergyCounter(NamedTuple):
    """Energy counter with an arbitrary start. It never decreases within one process, even if the hardware wraps."""

    name: str
    energy_mj: int
    is_counted: bool
    source: str = ""


class Clock(NamedTuple):
    """A clock with the limits of its frequency governor. `highest_hz` is the hardware's highest clock."""

    name: str
    current_hz: int | None
    floor_hz: int | None = None
    cap_hz: int | None = None
    highest_hz: int | None = None
    governor: str = ""
    source: str = ""

    @property
    def is_capped(self) -> bool:
        return self.cap_hz is not None and self.highest_hz is not None and self.cap_hz < self.highest_hz


@record(frozen=True, slots=True)
class EventCounter:
    """Events since boot. `per_s` is the rate since the previous reading, `sustained_per_s` that of the last minute.

    Both are None without earlier readings: at the start, and after the counter was reset.
    """

    name: str
    slowdown: ThrottleReason
    count: int
    per_s: float | None = None
    sustained_per_s: float | None = None
    source: str = ""


class FanReading(NamedTuple):
    """Speed of a fan. `duty` is from 0 to 1."""

    name: str
    duty: float | None = None
    rpm: int | None = None
    source: str = ""


class PowerMode(NamedTuple):
    """Power mode set by nvpmodel. Numbers have different meanings on each board, so show the name to users."""

    number: int
    name: str
    gpu_cap_hz: int | None = None

    @property
    def watts(self) -> int | None:
        """The watts in the name (15W, MODE_30W); None for a name without watts (MAXN)."""
        found = re.search(r"(?:^|_)(\d+)W(?:_|$)", self.name, re.IGNORECASE)
        return int(found[1]) if found else None


class MemoryState(NamedTuple):
    """Memory of the machine. The percentages are the part of the last ten seconds in which some task, and in which all
    tasks, waited for memory."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    some_percent: float | None = None
    full_percent: float | None = None


@record(frozen=True, slots=True)
class Gpu:
    """One GPU. Readings of two sensors with the same `key` are joined: "gpu0" is NVIDIA's first card, "igpu" NVIDIA's
    integrated GPU, "card0" a GPU of another vendor. `utilization` is from 0 to 1, smoothed if it jumps.

    `is_integrated`: it shares memory, heat and power with the machine. `is_lost`: it fell off the bus or needs a reset;
    all other values are then unknown. `reasons` are the driver's names, in snake case, for the reasons that limit the
    clock, without harmless ones; `slowed_by` are the same as ThrottleReason.
    """

    key: str
    name: str | None = None
    uuid: str | None = None
    is_integrated: bool = False
    is_lost: bool = False
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    clock_hz: int | None = None
    reasons: frozenset[str] | None = None
    slowed_by: frozenset[ThrottleReason] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@record(frozen=True, slots=True)
class MachineReading:
    """One reading of the machine, or the part of it from one sensor.

    `at_s` is of a monotonic clock. `power_mw` is the power of the counted rails, and `power_limit_mw` the enforced
    limit of the same rails. `throttles` counts thermal throttling of processors, `over_current` events of the board's
    power monitor. `silent` names sensors that had a reading before and have none now: "zone tj", "rail VDD_IN", "alert
    cpu-throttle-alert", "alarm oc1". Keys of `sources` and `missing` are the names of these fields, and "nvml" for NVML
    as a whole.
    """

    at_s: float
    board: str | None = None
    soc: str | None = None
    l4t: str | None = None
    jetpack: str | None = None
    power_mode: PowerMode | None = None
    zones: tuple[Zone, ...] = ()
    heat: CriticalTemperature | None = None
    coolers: tuple[CoolingDevice, ...] = ()
    rails: tuple[Rail, ...] = ()
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy: tuple[EnergyCounter, ...] = ()
    clocks: tuple[Clock, ...] = ()
    over_current: tuple[EventCounter, ...] = ()
    throttles: tuple[EventCounter, ...] = ()
    fans: tuple[FanReading, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    memory: MemoryState = MemoryState()
    silent: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def slowed_by(self) -> frozenset[ThrottleReason]:
        """The reasons why the machine throttles itself now. Over-current is always included; it is often harmless.

        Coolers that are not alerts count only if there are no alerts, because they follow the alerts with a delay.
        """
        alerts = [item for item in self.coolers if item.is_alert]
        found = {cause for gpu in self.gpus for cause in gpu.slowed_by}
        found |= {item.slowdown for item in (*self.over_current, *self.throttles) if item.per_s}
        if any(item.state > 0 for item in alerts or self.coolers):
            found.add(ThrottleReason.THERMAL)
        return frozenset(found)


class Sensor(Protocol):
    """One source of readings. Used by one thread at a time."""

    def read(self, now_s: float) -> MachineReading:
        """Return the current readings; `now_s` never decreases. An absent metric is not an error and is searched again
        at the next call, because drivers may be loaded after the server starts."""

    def close(self) -> None:
        """Release all resources. `read` may be called again after it."""
