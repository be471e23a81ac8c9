"""Metrics of heat, power and energy for the metrics page: Triton's nv_gpu_* (also on a Jetson) and the server's own
edge_*.

The number of series is limited: zones, rails and GPUs by the machine, causes and classes by their enumerations, models
by the models that serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from edge_server.core.priority_class import PriorityClass
from edge_server.plugins.governor.control_loop import GovernorSnapshot
from edge_server.plugins.governor.control_policy import Cause
from edge_server.plugins.governor.readings import Gpu
from edge_server.plugins.governor.state_report import Shed, in_watts
from edge_server.telemetry.metrics_page import Family

_ALWAYS_SHOWN = ("heat", "power_budget")
"""Reasons of load shedding whose series exist from the start, so that a rate over them is always defined."""

_Row: TypeAlias = tuple[str, Literal["counter", "gauge"], str, Iterable[tuple[Mapping[str, str], "float | None"]]]
"""Name, kind and help of a family, and its labels and values. A value that is not known has no sample."""


def governor_metric_families(now: GovernorSnapshot, shed: Shed, *, has_gpu_metrics: bool) -> list[Family]:
    """Return the families of the machine and of the governor for the metrics page."""
    rows = [*_machine(now), *_decision(now, shed), *_models(now)]
    found = []
    for name, kind, text, samples in rows + _gpus(now) if has_gpu_metrics else rows:
        found.append(Family(name, kind, text))
        for labels, value in samples:
            if value is not None:
                found[-1].add(labels, value)
    return found


def _machine(now: GovernorSnapshot) -> list[_Row]:
    zones, total_w = now.reading.zones, in_watts(now.reading.power_mw)
    rails = [*((rail.name, in_watts(rail.power_mw)) for rail in now.reading.rails), ("total", total_w)]
    return [
        ("edge_temperature_celsius", "gauge", "Temperature, by sensor zone, in degrees Celsius",
         [({"zone": zone.name}, zone.temperature_c) for zone in zones]),
        ("edge_temperature_limit_celsius", "gauge",
         "Temperature at which the box throttles, by zone, in degrees Celsius",
         [({"zone": zone.name}, zone.trips.passive_c) for zone in zones]),
        ("edge_power_watts", "gauge", "Power, by rail, in watts; rail total is the whole box",
         [({"rail": name}, power_w) for name, power_w in rails]),
        ("edge_power_budget_watts", "gauge", "Power limit of the governor, in watts",
         [({}, now.decision.power_set_point_w)]),
        ("edge_energy_joules_total", "counter", "Energy of the whole box since the server started, in joules",
         [({}, now.energy_j)]),
        ("edge_over_current_events_total", "counter", "Alarms of the board's power monitor, by input",
         [({"input": name}, count) for name, count in now.over_current.items()]),
    ]  # fmt: skip


def _decision(now: GovernorSnapshot, shed: Shed) -> list[_Row]:
    decision = now.decision
    set_point_c, predicted_c = decision.set_point_c, decision.predicted_c
    if set_point_c is None or predicted_c is None:
        set_point_c = predicted_c = None
    counts = {(priority, reason): 0 for priority in PriorityClass for reason in _ALWAYS_SHOWN} | dict(shed)
    return [
        ("edge_governor_level", "gauge", "0 NORMAL, 1 WARM, 2 HOT, 3 THROTTLED, 4 CRITICAL",
         [({}, int(decision.level))]),
        ("edge_governor_share", "gauge", "Allowed part of the full work, 0 to 1", [({}, decision.share)]),
        ("edge_governor_set_point_celsius", "gauge", "Temperature set-point of the governor, in degrees Celsius",
         [({}, set_point_c)]),
        ("edge_governor_predicted_celsius", "gauge", "Predicted temperature some seconds ahead", [({}, predicted_c)]),
        ("edge_governor_clock_cap_hertz", "gauge", "Clock cap that the governor has set on the GPU",
         [({}, now.clock_cap_hz)]),
        ("edge_throttle_state", "gauge", "1 while the box throttles, or work is limited, for this cause",
         [({"cause": cause.value}, int(cause in decision.causes)) for cause in Cause]),
        ("edge_shed_total", "counter", "Requests and frames rejected by the governor, by class and reason",
         [({"class": priority.name.lower(), "reason": reason}, count) for (priority, reason), count in counts.items()]),
    ]  # fmt: skip


def _models(now: GovernorSnapshot) -> list[_Row]:
    costs = [(model, batch, cost.joules) for (model, batch), cost in now.costs.items()]
    return [
        ("edge_joules_per_inference", "gauge", "Energy above idle of one inference, by batch size, in joules",
         [({"model": model, "batch": str(size)}, cost) for model, size, cost in costs if isinstance(size, int)]),
        ("edge_llm_joules_per_token", "gauge", "Energy above idle of one token of a language model, in joules",
         [({"model": model, "phase": phase}, cost) for model, phase, cost in costs if isinstance(phase, str)]),
        ("edge_variant_in_force", "gauge", "1 while the lighter model `variant` answers for `model`",
         [({"model": model, "variant": lighter}, 1) for model, lighter in now.active_variants.items()]),
    ]  # fmt: skip


def _gpus(now: GovernorSnapshot) -> list[_Row]:
    rows: list[tuple[str, Literal["counter", "gauge"], str]] = [
        ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)"),
        ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes"),
        ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes"),
        ("nv_gpu_power_usage", "gauge", "GPU power usage in watts; of the whole module for an integrated GPU"),
        ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts"),
        ("nv_energy_consumption", "counter", "GPU energy consumption in joules since the server started"),
    ]
    gpus = [({"gpu_uuid": gpu.uuid or gpu.key}, _gpu_values(gpu, now)) for gpu in now.reading.gpus]
    return [(*row, [(labels, values[index]) for labels, values in gpus]) for index, row in enumerate(rows)]


def _gpu_values(gpu: Gpu, now: GovernorSnapshot) -> tuple[float | None, ...]:
    """Return the GPU's values in the order of the families. An integrated GPU shares the machine's memory and power."""
    reading, memory = now.reading, now.reading.memory
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    power_mw, limit_mw, energy_j = gpu.power_mw, gpu.power_limit_mw, now.gpu_energy_j.get(gpu.key)
    if gpu.is_integrated:
        if total is None and memory.total_bytes is not None and memory.available_bytes is not None:
            total, used = memory.total_bytes, memory.total_bytes - memory.available_bytes
        power_mw, limit_mw, energy_j = reading.power_mw, reading.power_limit_mw, now.energy_j
    return gpu.utilization, total, used, in_watts(power_mw), in_watts(limit_mw), energy_j
