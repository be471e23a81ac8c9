"""What one of NVIDIA's GPUs tells, metric by metric (docs.nvidia.com/deploy/nvml-api).

Works on the module pynvml and a handle that it is given; numbers stand for NVML's constants, which older versions of
pynvml lack in part. Old and new names of a call are tried in turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from edge_server.governor.readings import EnergyCounter, FanReading, Gpu, Rail, ThrottleReason, TripPoints, Zone
from edge_server.governor.sensors.counter_rates import EnergyMeter

SOURCE = "nvml"

_NEAR_LIMIT_C = 5.0

NOT_SUPPORTED, NO_PERMISSION, _FUNCTION_NOT_FOUND, VERSION_MISMATCH, _DEPRECATED = 3, 4, 13, 18, 26
_NEVER = frozenset({NOT_SUPPORTED, NO_PERMISSION, _FUNCTION_NOT_FOUND, _DEPRECATED})
"""Answers that mean: not on this GPU, or not to this user. Others may pass."""
LOST = frozenset({15, 16, 28})
"""The GPU fell off the bus, needs a reset, is not to be found."""
_CLOSED = frozenset({1, 9, VERSION_MISMATCH})
"""NVML as a whole is not initialized, has no driver, or another one than its own."""

_GPU_SENSOR, _SHUTDOWN, _SLOWDOWN, _GPU_MAX = 0, 0, 1, 3
_GRAPHICS, _MEMORY, _APPLICATION_TARGET = 0, 2, 1
_POLICIES = {"power": 0, "thermal": 1, "board_limit": 3, "reliability": 5}
_POLICY_FIELDS = {"power": 74, "thermal": 75, "board_limit": 77, "reliability": 79}

_MEMORY_V2 = 0x02000028
MEMORY_CALLS: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetMemoryInfo", _MEMORY_V2),
    ("nvmlDeviceGetMemoryInfo",),
)
"""The first form tells apart what the driver keeps for itself."""

_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of the clock event reasons. Left out: idle, application clocks, sync boost, display; they hold nothing back."""

_NEVER_ZERO = (
    "memory_total_bytes", "memory_used_bytes", "power_mw", "power_limit_mw", "energy_mj", "clock_hz", "clock_cap_hz",
    "highest_clock_hz", "memory_clock_hz",
)  # fmt: skip

_CAUSES = {
    "sw_power_cap": ThrottleReason.POWER_CAP,
    "board_limit": ThrottleReason.POWER_CAP,
    "sw_thermal_slowdown": ThrottleReason.THERMAL,
    "hw_thermal_slowdown": ThrottleReason.THERMAL,
    "hw_power_brake_slowdown": ThrottleReason.POWER_BRAKE,
}


class GpuGone(Exception):
    """This GPU answers nothing any more."""


class Closed(Exception):
    """NVML as a whole answers nothing any more: shut down by somebody else, or older or newer than the driver."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(slots=True)
class NvmlGpu:
    """A GPU that was seen once. `handle` is None while it cannot be asked; `is_lost`: it is the GPU's own doing.
    `has_power`: it told its power once."""

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
        """Whether NVML listed it, and never told what it is."""
        return self.uuid is None and self.name is None


@dataclass(slots=True)
class GpuReadingParts:
    """What one GPU comes to in a reading."""

    gpu: Gpu
    zone: Zone | None = None
    rail: Rail | None = None
    energy: EnergyCounter | None = None
    fan: FanReading | None = None


class NvmlQueries:
    """Asks one GPU, metric by metric, and keeps why something is not known. Raises Gone and Closed."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing: dict[str, str] = {}
        self.codes: dict[str, int] = {}

    def __call__(self, metric: str, *calls: tuple[Any, ...]) -> Any:
        """Return what the first call that this driver has tells, None when none does. A call is a name with what
        follows the handle."""
        for name, *arguments in calls:
            function = getattr(self._nvml, name, None)
            if function is None:
                self._note(metric, _FUNCTION_NOT_FOUND, f"pynvml has no {name}")
                continue
            try:
                value = function(self._handle, *arguments)
            except UnicodeDecodeError as error:
                self._note(metric, 0, f"{name}: {error}")
                continue
            except self._nvml.NVMLError as error:
                self._refused(metric, name, error)
                continue
            self.missing.pop(metric, None)
            self.codes.pop(metric, None)
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return None

    def _refused(self, metric: str, name: str, error: Any) -> None:
        code = error.value
        if code in LOST:
            raise GpuGone(str(error)) from None
        if code in _CLOSED:
            raise Closed(code, str(error)) from None
        self._note(metric, code, f"{name}: {error}")

    def is_never(self, metric: str) -> bool:
        """Return whether the metric was asked for, and this GPU or this driver will never tell it."""
        return self.codes.get(metric) in _NEVER

    def _note(self, metric: str, code: int, why: str) -> None:
        # What may pass counts for more than what this driver never had.
        if metric not in self.codes or self.codes[metric] in _NEVER:
            self.codes[metric], self.missing[metric] = code, why


def read_gpu(ask: NvmlQueries, device: NvmlGpu, now_s: float) -> GpuReadingParts:
    """Return what a GPU tells now. Raises Gone and Closed."""
    zone = _zone(ask, device)
    power_mw = ask("power_mw", ("nvmlDeviceGetPowerUsage",))
    limit_mw = ask("power_limit_mw", ("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
    energy_mj = ask("energy_mj", ("nvmlDeviceGetTotalEnergyConsumption",))
    fan = ask("fan", ("nvmlDeviceGetFanSpeed",))
    gpu = _gpu(ask, device, zone, power_mw, limit_mw, energy_mj)
    # Power that this GPU never tells is left out of the whole; power that it does not tell now makes the whole unknown.
    is_counted = not ask.is_never("power_mw")
    problem = ask.missing.get("power_mw", "")
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
    ask: NvmlQueries, device: NvmlGpu, zone: Zone, power_mw: int | None, limit_mw: int | None, energy_mj: int | None
) -> Gpu:
    rates = ask("utilization", ("nvmlDeviceGetUtilizationRates",))
    memory = ask("memory_total_bytes", *MEMORY_CALLS)
    bits = ask("reasons", ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",))
    reasons = None if bits is None else frozenset(word for bit, word in _REASONS.items() if bits & bit)
    values: dict[str, Any] = {
        "utilization": None if rates is None else rates.gpu / 100,
        "memory_utilization": None if rates is None else rates.memory / 100,
        "memory_total_bytes": None if memory is None else memory.total,
        "memory_used_bytes": None if memory is None else memory.used,
        "temperature_c": zone.temperature_c,
        "power_mw": power_mw,
        "power_limit_mw": limit_mw,
        "energy_mj": energy_mj,
        "clock_hz": _hertz(ask("clock_hz", ("nvmlDeviceGetClockInfo", _GRAPHICS))),
        "clock_cap_hz": _hertz(ask("clock_cap_hz", ("nvmlDeviceGetClock", _GRAPHICS, _APPLICATION_TARGET))),
        "highest_clock_hz": _hertz(ask("highest_clock_hz", ("nvmlDeviceGetMaxClockInfo", _GRAPHICS))),
        "memory_clock_hz": _hertz(ask("memory_clock_hz", ("nvmlDeviceGetClockInfo", _MEMORY))),
        "performance_state": ask("performance_state", ("nvmlDeviceGetPerformanceState",)),
        "reasons": reasons,
        "violations_ns": _violations(ask),
    }
    if device.is_integrated:
        # Where drivers have nothing to tell of such a GPU, some tell a zero.
        values |= {name: None for name in _NEVER_ZERO if values[name] == 0}
    return Gpu(
        device.key,
        device.name,
        device.uuid,
        device.is_integrated,
        slowed_by=_slowed_by(reasons or frozenset(), zone),
        sources={name: SOURCE for name, value in values.items() if value is not None},
        missing={name: why for name, why in ask.missing.items() if values.get(name) is None and name in values},
        **values,
    )


def _zone(ask: NvmlQueries, device: NvmlGpu) -> Zone:
    """Return the GPU's temperature with its trips. Newer drivers tell the margin and no trips."""
    temperature_c = ask(
        "temperature_c", ("nvmlDeviceGetTemperatureV", _GPU_SENSOR), ("nvmlDeviceGetTemperature", _GPU_SENSOR)
    )
    margin_c = ask("margin_c", ("nvmlDeviceGetMarginTemperature",))
    shutdown_c, slowdown_c, gpu_max_c = (
        ask(f"threshold {which}", ("nvmlDeviceGetTemperatureThreshold", which))
        for which in (_SHUTDOWN, _SLOWDOWN, _GPU_MAX)
    )
    # Above GPU_MAX the driver lowers the clocks, above SLOWDOWN the hardware does. 0 stands for none.
    passive = [trip for trip in (gpu_max_c, slowdown_c) if trip]
    trips = TripPoints(_degrees(min(passive, default=None)), _degrees(slowdown_c), _degrees(shutdown_c))
    problem = "" if ask.is_never("temperature_c") else ask.missing.get("temperature_c", "")
    return Zone(device.key, _degrees(temperature_c), trips, _float(margin_c), SOURCE, problem)


def _violations(ask: NvmlQueries) -> Mapping[str, int] | None:
    """Return for how many nanoseconds each policy held the GPU back; drivers without the call have fields for them."""
    times: dict[str, int] = {}
    for policy, number in _POLICIES.items():
        status = ask("violations_ns", ("nvmlDeviceGetViolationStatus", number))
        if status is not None:
            times[policy] = status.violationTime
        elif ask.codes["violations_ns"] in (_FUNCTION_NOT_FOUND, _DEPRECATED):
            return _violation_fields(ask)
    return times or None


def _violation_fields(ask: NvmlQueries) -> Mapping[str, int] | None:
    values = ask("violations_ns", ("nvmlDeviceGetFieldValues", list(_POLICY_FIELDS.values()))) or ()
    times = {
        policy: value.value.ullVal
        for policy, value in zip(_POLICY_FIELDS, values, strict=False)
        if value.nvmlReturn == 0
    }
    return times or None


def _slowed_by(reasons: frozenset[str], zone: Zone) -> frozenset[ThrottleReason]:
    found = {_CAUSES[reason] for reason in reasons if reason in _CAUSES}
    if "hw_slowdown" in reasons and not found & {ThrottleReason.THERMAL, ThrottleReason.POWER_BRAKE}:
        # The hardware brakes for heat or for power, and older GPUs do not say for which.
        is_hot = zone.headroom_c is not None and zone.headroom_c <= _NEAR_LIMIT_C
        found.add(ThrottleReason.THERMAL if is_hot else ThrottleReason.POWER_BRAKE)
    return frozenset(found)


def silent_gpu(device: NvmlGpu) -> GpuReadingParts:
    """Return what is left of a GPU that cannot be asked: a lost one has no heat and power that would matter."""
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


def is_of_jetson(name: str | None) -> bool:
    """Return whether the name is that of the GPU in a Jetson's module: "Orin (nvgpu)", "NVIDIA Thor"."""
    words = re.findall(r"[a-z0-9]+", (name or "").lower())
    return not {"nvgpu", "orin", "thor", "xavier", "tegra"}.isdisjoint(words)


def _hertz(megahertz: int | None) -> int | None:
    return None if megahertz is None else megahertz * 1_000_000


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _degrees(value: int | None) -> float | None:
    """Return a temperature; 0 and less stand for none."""
    return float(value) if value is not None and value > 0 else None
