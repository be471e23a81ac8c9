"""The nouns of what the box feels: one reading of its temperatures, power, clocks, counters and memory.

Every metric may be absent, on its own: a value is None, or a group is empty, and `missing` says why in plain words.
`sources` says where a value came from: "nvml", or "sysfs:" with the file. Temperatures are degrees Celsius, power is in
milliwatts, energy in millijoules, clocks are in hertz, shares run from 0 to 1.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ThrottleReason(enum.Enum):
    """Why the box, by its own word, slows itself down. The value is the word on metrics and events."""

    THERMAL = "thermal"
    POWER_CAP = "power_cap"
    POWER_BRAKE = "power_brake"
    UNDER_VOLTAGE = "under_voltage"
    OVER_CURRENT = "over_current"


@dataclass(frozen=True, slots=True)
class TripPoints:
    """Where something happens: the clocks are lowered (`passive_c`), all cooling is needed or the hardware steps in
    (`hot_c`), the box switches itself off (`critical_c`). None: the box does not tell."""

    passive_c: float | None = None
    hot_c: float | None = None
    critical_c: float | None = None


@dataclass(frozen=True, slots=True)
class Zone:
    """One temperature sensor. `margin_c` is what some GPUs tell in place of trips: degrees left until they slow down.

    `problem` says why `temperature_c` is None: a Jetson's GPU sensor is switched off together with an idle GPU.
    """

    name: str
    temperature_c: float | None
    trips: TripPoints = TripPoints()
    margin_c: float | None = None
    source: str = ""
    problem: str = ""

    @property
    def headroom_c(self) -> float | None:
        """Degrees left until the clocks are lowered here; negative above that point."""
        if self.margin_c is not None:
            return self.margin_c
        if self.temperature_c is None or self.trips.passive_c is None:
            return None
        return self.trips.passive_c - self.temperature_c


@dataclass(frozen=True, slots=True)
class CriticalTemperature:
    """The temperature that matters: of the zone `name`, which is the junction's, or the one nearest to its trip.

    `trip_c` and `critical_c` are what holds for that temperature; `headroom_c` is what is left until `trip_c`.
    """

    name: str
    temperature_c: float | None
    headroom_c: float | None
    trip_c: float | None
    critical_c: float | None


@dataclass(frozen=True, slots=True)
class CoolingDevice:
    """A cooling device that slows something down: its state runs from 0, doing nothing, to `max_state`.

    `is_alert`: it stands for throttling by firmware, which nothing else shows.
    """

    name: str
    state: int
    max_state: int | None
    is_alert: bool
    source: str = ""


@dataclass(frozen=True, slots=True)
class Rail:
    """Power of one supply line, or of one processor or GPU as a whole.

    `is_counted`: it is a part of the box's total; a rail that lies behind another one is not. `limit_mw` is enforced.
    `warn_ma`, `critical_ma`: the currents at which the monitor raises its alarms; `is_alarmed`: one is raised now.
    """

    name: str
    power_mw: int | None
    is_counted: bool
    limit_mw: int | None = None
    voltage_mv: int | None = None
    current_ma: int | None = None
    warn_ma: int | None = None
    critical_ma: int | None = None
    is_alarmed: bool | None = None
    source: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """Energy since some moment before the first reading. Never goes back while the sensor lives, wrapped or not."""

    name: str
    energy_mj: int
    is_counted: bool
    source: str = ""


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock now, and between which bounds its governor may move it. `highest_hz` is what the silicon offers."""

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


@dataclass(frozen=True, slots=True)
class EventCounter:
    """Events since boot. `per_s` is the rate since the reading before, `sustained_per_s` that of the last minute.

    Both are None as long as there is no such past: at the start, and after the counter went back.
    """

    name: str
    slowdown: ThrottleReason
    count: int
    per_s: float | None = None
    sustained_per_s: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class FanReading:
    """`duty` runs from 0 to 1."""

    name: str
    duty: float | None = None
    rpm: int | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class PowerMode:
    """What nvpmodel set. Numbers mean something else on each board: tell people the name."""

    number: int
    name: str
    gpu_cap_hz: int | None = None

    @property
    def watts(self) -> int | None:
        """Return the watts in the name (15W, MODE_30W), None for a mode that names none (MAXN)."""
        found = re.search(r"(?:^|_)(\d+)W(?:_|$)", self.name, re.IGNORECASE)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of the machine. Percentages: of the last ten seconds, in which some task, and in which every task, waited
    for memory."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    some_percent: float | None = None
    full_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `key` joins what two sensors tell of the same one: "gpu0" is NVIDIA's first card, "igpu" NVIDIA's that
    is built in with a processor, "card0" another maker's. `utilization`: 0 to 1, smoothed where it jumps.

    `is_integrated`: it shares the machine's memory, and heat and power are the box's. `is_lost`: it fell off the bus,
    or needs a reset; nothing else is known of it then. `reasons` are the driver's words, in snake case, for why its
    clock is held back, without those that mean nothing; `slowed_by` is what they come to. `violations_ns`: how long it
    was held back since the driver was loaded, by "power", "thermal" and so on. `highest_clock_hz` and `clock_cap_hz`:
    what the silicon offers and what holds now.
    """

    key: str
    name: str | None = None
    uuid: str | None = None
    is_integrated: bool = False
    is_lost: bool = False
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    clock_hz: int | None = None
    clock_cap_hz: int | None = None
    highest_clock_hz: int | None = None
    memory_clock_hz: int | None = None
    performance_state: int | None = None
    reasons: frozenset[str] | None = None
    slowed_by: frozenset[ThrottleReason] = frozenset()
    violations_ns: Mapping[str, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoxReading:
    """One look at the box, or the part of it that one sensor tells.

    `at_s` is of a monotonic clock. `power_mw` is what the counted rails draw together and `power_limit_mw` what is
    enforced for just these. `throttles` counts what a processor did against heat, `over_current` what the board's
    power monitor did. `silent` names what told something before and does not now: "zone tj", "rail VDD_IN", "alert
    cpu-throttle-alert", "alarm oc1". `sources` and `missing` are keyed by the names of these fields, and "nvml" for all
    of NVML.
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
        """Return why the box slows itself down now. Over-current is told whenever there is any; it is often harmless.

        Coolers that are no alerts count only where the box has no alerts: they follow the alerts, later.
        """
        alerts = [item for item in self.coolers if item.is_alert]
        found = {cause for gpu in self.gpus for cause in gpu.slowed_by}
        found |= {item.slowdown for item in (*self.over_current, *self.throttles) if item.per_s}
        if any(item.state > 0 for item in alerts or self.coolers):
            found.add(ThrottleReason.THERMAL)
        return frozenset(found)


class Sensor(Protocol):
    """One way to read the box. Used by one thread at a time."""

    def read(self, now_s: float) -> BoxReading:
        """Return what can be told now; `now_s` never goes back. An absent metric is no error, and is looked for again
        the next time: drivers come up after this program does."""

    def close(self) -> None:
        """Give back what is held; `read` may be called again all the same."""
