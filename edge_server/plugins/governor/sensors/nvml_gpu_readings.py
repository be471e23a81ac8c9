"""Readings of one NVIDIA GPU: queries temperature, power, clocks and memory from the library NVML, each on its own.

The caller passes the module pynvml and a device handle. NVML's constants are numbers here, because older versions of
pynvml do not have all of them. New and old names of a call are tried in order.
"""

from __future__ import annotations

import re
from dataclasses import field
from types import ModuleType
from typing import Any

from edge_server.plugins.governor.readings import EnergyCounter, FanReading, Gpu, Rail, ThrottleReason, TripPoints, Zone
from edge_server.plugins.governor.sensors.counter_rates import EnergyMeter
from edge_server.record import record

SOURCE = "nvml"

_NEAR_LIMIT_C = 5.0

NOT_SUPPORTED, NO_PERMISSION, _FUNCTION_NOT_FOUND, VERSION_MISMATCH, _DEPRECATED = 3, 4, 13, 18, 26
_NEVER = frozenset({NOT_SUPPORTED, NO_PERMISSION, _FUNCTION_NOT_FOUND, _DEPRECATED})
"""Permanent errors: not supported by this GPU, or not permitted for this user. Other errors may be temporary."""
LOST = frozenset({15, 16, 28})
"""The GPU fell off the bus, needs a reset, or is not found."""
_CLOSED = frozenset({1, 9, VERSION_MISMATCH})
"""NVML is not initialized, has no driver, or the driver has another version."""

_GPU_SENSOR, _SHUTDOWN, _SLOWDOWN, _GPU_MAX = 0, 0, 1, 3
GRAPHICS = 0

_MEMORY_V2 = 0x02000028
MEMORY_CALLS: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetMemoryInfo", _MEMORY_V2),
    ("nvmlDeviceGetMemoryInfo",),
)
"""The first form excludes the memory that the driver reserves for itself."""

_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of the clock event reasons. Idle, application clocks, sync boost and display are left out: they are harmless."""

_NEVER_ZERO = ("memory_total_bytes", "memory_used_bytes", "power_mw", "power_limit_mw", "energy_mj", "clock_hz")

_CAUSES = {
    "sw_power_cap": ThrottleReason.POWER_CAP,
    "board_limit": ThrottleReason.POWER_CAP,
    "sw_thermal_slowdown": ThrottleReason.THERMAL,
    "hw_thermal_slowdown": ThrottleReason.THERMAL,
    "hw_power_brake_slowdown": ThrottleReason.POWER_BRAKE,
}


class GpuGone(Exception):
    """This GPU does not answer any more."""


class NvmlClosed(Exception):
    """NVML does not answer any more: it was shut down, or its version differs from the driver's."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@record(slots=True)
class NvmlGpu:
    """A known GPU. `handle` is None while it cannot be queried. `is_lost`: the reason is the GPU itself. `has_power`:
    it reported its power at least once."""

    key: str
    uuid: str | None
    name: str | None
    is_integrated: bool
    handle: Any = None
    is_lost: bool = False
    problem: str = ""
    has_power: bool = False
    meter: EnergyMeter = field(default_factory=EnergyMeter)

    @property
    def is_unknown(self) -> bool:
        """Whether NVML listed it but never reported its UUID or name."""
        return self.uuid is None and self.name is None


@record(slots=True)
class GpuReadingParts:
    """The parts of a machine reading that one GPU contributes."""

    gpu: Gpu
    zone: Zone | None = None
    rail: Rail | None = None
    energy: EnergyCounter | None = None
    fan: FanReading | None = None


class NvmlQueries:
    """Queries one GPU metric by metric, and records why a value is missing. Raises GpuGone and NvmlClosed."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing: dict[str, str] = {}
        self.codes: dict[str, int] = {}

    def __call__(self, metric: str, *calls: tuple[Any, ...]) -> Any:
        """Return the result of the first call that works, or None. A call is a function name and the arguments after
        the handle."""
        for name, *arguments in calls:
            function = getattr(self._nvml, name, None)
            if function is None:
                self._record_missing(metric, _FUNCTION_NOT_FOUND, f"pynvml has no {name}")
                continue
            try:
                value = function(self._handle, *arguments)
            except UnicodeDecodeError as error:
                self._record_missing(metric, 0, f"{name}: {error}")
                continue
            except self._nvml.NVMLError as error:
                if error.value in LOST:
                    raise GpuGone(str(error)) from None
                if error.value in _CLOSED:
                    raise NvmlClosed(error.value, str(error)) from None
                self._record_missing(metric, error.value, f"{name}: {error}")
                continue
            self.missing.pop(metric, None)
            self.codes.pop(metric, None)
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return None

    def is_never(self, metric: str) -> bool:
        """Return whether the metric was queried and this GPU or driver never has it."""
        return self.codes.get(metric) in _NEVER

    def _record_missing(self, metric: str, code: int, why: str) -> None:
        # A temporary error is more important than a missing call.
        if metric not in self.codes or self.codes[metric] in _NEVER:
            self.codes[metric], self.missing[metric] = code, why


def read_gpu(query: NvmlQueries, device: NvmlGpu, now_s: float) -> GpuReadingParts:
    """Return the current readings of a GPU. Raises GpuGone and NvmlClosed."""
    zone = _zone(query, device)
    power_mw = query("power_mw", ("nvmlDeviceGetPowerUsage",))
    limit_mw = query("power_limit_mw", ("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
    energy_mj = query("energy_mj", ("nvmlDeviceGetTotalEnergyConsumption",))
    fan = query("fan", ("nvmlDeviceGetFanSpeed",))
    gpu = _gpu(query, device, zone, power_mw, limit_mw, energy_mj)
    # If a GPU never reports power, the total excludes it. If its power is missing only now, the total is unknown.
    is_counted = not query.is_never("power_mw")
    problem = query.missing.get("power_mw", "")
    device.has_power |= power_mw is not None
    counter = None
    if energy_mj is not None:
        counter = EnergyCounter(device.key, device.meter.feed(energy_mj, now_s)[0], True, SOURCE)
    return GpuReadingParts(
        gpu,
        zone if zone.temperature_c is not None or zone.margin_c is not None or zone.problem else None,
        Rail(device.key, power_mw, is_counted, limit_mw, source=SOURCE, problem=problem),
        counter,
        None if fan is None else FanReading(device.key, min(1.0, fan / 100), None, SOURCE),
    )


def _gpu(
    query: NvmlQueries, device: NvmlGpu, zone: Zone, power_mw: int | None, limit_mw: int | None, energy_mj: int | None
) -> Gpu:
    rates = query("utilization", ("nvmlDeviceGetUtilizationRates",))
    memory = query("memory_total_bytes", *MEMORY_CALLS)
    bits = query("reasons", ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",))
    reasons = None if bits is None else frozenset(word for bit, word in _REASONS.items() if bits & bit)
    clock_mhz = query("clock_hz", ("nvmlDeviceGetClockInfo", GRAPHICS))
    values: dict[str, Any] = {
        "utilization": None if rates is None else rates.gpu / 100,
        "memory_total_bytes": None if memory is None else memory.total,
        "memory_used_bytes": None if memory is None else memory.used,
        "temperature_c": zone.temperature_c,
        "power_mw": power_mw,
        "power_limit_mw": limit_mw,
        "energy_mj": energy_mj,
        "clock_hz": None if clock_mhz is None else clock_mhz * 1_000_000,
        "reasons": reasons,
    }
    if device.is_integrated:
        # Some drivers report 0 for unknown values of an integrated GPU.
        values |= {name: None for name in _NEVER_ZERO if values[name] == 0}
    return Gpu(
        device.key,
        device.name,
        device.uuid,
        device.is_integrated,
        slowed_by=_slowed_by(reasons or frozenset(), zone),
        sources={name: SOURCE for name, value in values.items() if value is not None},
        missing={name: why for name, why in query.missing.items() if values.get(name) is None and name in values},
        **values,
    )


def _zone(query: NvmlQueries, device: NvmlGpu) -> Zone:
    """Return the GPU's temperature with its trip points. Newer drivers report the margin instead of trip points."""
    temperature_c = query(
        "temperature_c", ("nvmlDeviceGetTemperatureV", _GPU_SENSOR), ("nvmlDeviceGetTemperature", _GPU_SENSOR)
    )
    margin_c = query("margin_c", ("nvmlDeviceGetMarginTemperature",))
    shutdown_c, slowdown_c, gpu_max_c = (
        query(f"threshold {which}", ("nvmlDeviceGetTemperatureThreshold", which))
        for which in (_SHUTDOWN, _SLOWDOWN, _GPU_MAX)
    )
    # Above GPU_MAX the driver lowers the clocks, above SLOWDOWN the hardware does. 0 means: none.
    passive = [trip for trip in (gpu_max_c, slowdown_c) if trip]
    trips = TripPoints(_degrees(min(passive, default=None)), _degrees(slowdown_c), _degrees(shutdown_c))
    problem = "" if query.is_never("temperature_c") else query.missing.get("temperature_c", "")
    return Zone(
        device.key, _degrees(temperature_c), trips, None if margin_c is None else float(margin_c), SOURCE, problem
    )


def _slowed_by(reasons: frozenset[str], zone: Zone) -> frozenset[ThrottleReason]:
    found = {_CAUSES[reason] for reason in reasons if reason in _CAUSES}
    if "hw_slowdown" in reasons and not found & {ThrottleReason.THERMAL, ThrottleReason.POWER_BRAKE}:
        # The hardware throttles because of heat or power. Older GPUs do not report which of them.
        is_hot = zone.headroom_c is not None and zone.headroom_c <= _NEAR_LIMIT_C
        found.add(ThrottleReason.THERMAL if is_hot else ThrottleReason.POWER_BRAKE)
    return frozenset(found)


def unresponsive_gpu(device: NvmlGpu) -> GpuReadingParts:
    """Return the readings of a GPU that cannot be queried. A lost GPU has no zone and no rail."""
    gpu = Gpu(
        device.key,
        device.name,
        device.uuid,
        device.is_integrated,
        is_lost=device.is_lost,
        missing={SOURCE: device.problem},
    )
    if device.is_lost:
        return GpuReadingParts(gpu)
    zone = Zone(device.key, None, source=SOURCE, problem=device.problem)
    return GpuReadingParts(gpu, zone, Rail(device.key, None, device.has_power, source=SOURCE, problem=device.problem))


def is_jetson_gpu(name: str | None) -> bool:
    """Return whether the name is that of a Jetson's GPU: "Orin (nvgpu)", "NVIDIA Thor"."""
    words = re.findall(r"[a-z0-9]+", (name or "").lower())
    return not {"nvgpu", "orin", "thor", "xavier", "tegra"}.isdisjoint(words)


def _degrees(value: int | None) -> float | None:
    """Return the temperature; None for 0 and less, which mean: no value."""
    return float(value) if value is not None and value > 0 else None
