"""Metrics of heat, power and energy for the metrics page: Triton's nv_gpu_* (also on a Jetson) and the server's own
edge_*.

The number of series is limited: zones, rails and GPUs by the machine, causes and classes by their enumerations, models
by the models that serve.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_server.core.priority import PriorityClass
from edge_server.plugins.governor.control_loop import GovernorSnapshot
from edge_server.plugins.governor.control_policy import Cause
from edge_server.plugins.governor.readings import Gpu, MachineReading
from edge_server.plugins.governor.state_report import Shed
from edge_server.telemetry.metrics_page import Family

MAX_DEVICES_OF_A_KIND = 64
"""Most zones, rails and GPUs with their own series."""

_ALWAYS_SHOWN = ("heat", "power_budget")
"""Reasons of load shedding whose series exist from the start, so that a rate over them is always defined."""


def governor_metric_families(now: GovernorSnapshot, shed: Shed, *, has_gpu_metrics: bool) -> list[Family]:
    """Return the families of the machine and of the governor for the metrics page."""
    found = [*_heat(now.reading), *_power(now), *_state(now, shed), *_models(now)]
    return found + _gpus(now) if has_gpu_metrics else found


def _heat(reading: MachineReading) -> list[Family]:
    temperature = Family("edge_temperature_celsius", "gauge", "Temperature, by sensor zone, in degrees Celsius")
    limit = Family(
        "edge_temperature_limit_celsius", "gauge", "Temperature at which the box throttles, by zone, in degrees Celsius"
    )
    for zone in reading.zones[:MAX_DEVICES_OF_A_KIND]:
        if zone.temperature_c is not None:
            temperature.add({"zone": zone.name}, zone.temperature_c)
        if zone.trips.passive_c is not None:
            limit.add({"zone": zone.name}, zone.trips.passive_c)
    return [temperature, limit]


def _power(now: GovernorSnapshot) -> list[Family]:
    power = Family("edge_power_watts", "gauge", "Power, by rail, in watts; rail total is the whole box")
    budget = Family("edge_power_budget_watts", "gauge", "Power limit of the governor, in watts")
    energy = Family(
        "edge_energy_joules_total", "counter", "Energy of the whole box since the server started, in joules"
    )
    alarms = Family("edge_over_current_events_total", "counter", "Alarms of the board's power monitor, by input")
    reading = now.reading
    for rail in reading.rails[:MAX_DEVICES_OF_A_KIND]:
        if rail.power_mw is not None:
            power.add({"rail": rail.name}, rail.power_mw / 1000)
    if reading.power_mw is not None:
        power.add({"rail": "total"}, reading.power_mw / 1000)
    if now.decision.power_set_point_w is not None:
        budget.add({}, now.decision.power_set_point_w)
    if now.energy_j is not None:
        energy.add({}, now.energy_j)
    for name, count in now.over_current.items():
        alarms.add({"input": name}, count)
    return [power, budget, energy, alarms]


def _state(now: GovernorSnapshot, shed: Shed) -> list[Family]:
    decision = now.decision
    level = Family("edge_governor_level", "gauge", "0 NORMAL, 1 WARM, 2 HOT, 3 THROTTLED, 4 CRITICAL")
    share = Family("edge_governor_share", "gauge", "Allowed part of the full work, 0 to 1")
    set_point = Family(
        "edge_governor_set_point_celsius", "gauge", "Temperature set-point of the governor, in degrees Celsius"
    )
    predicted = Family("edge_governor_predicted_celsius", "gauge", "Predicted temperature some seconds ahead")
    capped = Family("edge_governor_clock_cap_hertz", "gauge", "Clock cap that the governor has set on the GPU")
    causes = Family("edge_throttle_state", "gauge", "1 while the box throttles, or work is limited, for this cause")
    sheds = Family("edge_shed_total", "counter", "Requests and frames rejected by the governor, by class and reason")
    level.add({}, int(decision.level))
    share.add({}, decision.share)
    if decision.set_point_c is not None and decision.predicted_c is not None:
        set_point.add({}, decision.set_point_c)
        predicted.add({}, decision.predicted_c)
    if now.clock_cap_hz is not None:
        capped.add({}, now.clock_cap_hz)
    for cause in Cause:
        causes.add({"cause": cause.value}, int(cause in decision.causes))
    for priority in PriorityClass:
        for reason in _ALWAYS_SHOWN:
            sheds.add({"class": priority.name.lower(), "reason": reason}, 0)
    for (priority, reason), count in shed.items():
        sheds.add({"class": priority.name.lower(), "reason": reason}, count)
    return [level, share, set_point, predicted, capped, causes, sheds]


def _models(now: GovernorSnapshot) -> list[Family]:
    joules = Family(
        "edge_joules_per_inference", "gauge", "Energy above idle of one inference, by batch size, in joules"
    )
    token_joules = Family(
        "edge_llm_joules_per_token", "gauge", "Energy above idle of one token of a language model, in joules"
    )
    variant = Family("edge_variant_in_force", "gauge", "1 while the lighter model `variant` answers for `model`")
    for (model, batch), cost in now.costs.items():
        if isinstance(batch, int):
            joules.add({"model": model, "batch": str(batch)}, cost.joules)
        else:
            token_joules.add({"model": model, "phase": batch}, cost.joules)
    for model, lighter in now.active_variants.items():
        variant.add({"model": model, "variant": lighter}, 1)
    return [joules, token_joules, variant]


def _gpus(now: GovernorSnapshot) -> list[Family]:
    names = (
        ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)"),
        ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes"),
        ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes"),
        ("nv_gpu_power_usage", "gauge", "GPU power usage in watts; of the whole module for an integrated GPU"),
        ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts"),
        ("nv_energy_consumption", "counter", "GPU energy consumption in joules since the server started"),
    )
    found = [Family(name, "counter" if kind == "counter" else "gauge", text) for name, kind, text in names]
    for gpu in now.reading.gpus[:MAX_DEVICES_OF_A_KIND]:
        labels = {"gpu_uuid": gpu.uuid or gpu.key}
        for family, value in zip(found, _gpu_values(gpu, now), strict=True):
            if value is not None:
                family.add(labels, value)
    return found


def _gpu_values(gpu: Gpu, now: GovernorSnapshot) -> Iterable[float | None]:
    """Return the GPU's values in the order of the families. An integrated GPU shares the machine's memory and power."""
    reading, memory = now.reading, now.reading.memory
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    power_mw, limit_mw = gpu.power_mw, gpu.power_limit_mw
    energy_j = now.gpu_energy_j.get(gpu.key)
    if gpu.is_integrated:
        if total is None and memory.total_bytes is not None and memory.available_bytes is not None:
            total, used = memory.total_bytes, memory.total_bytes - memory.available_bytes
        power_mw, limit_mw, energy_j = reading.power_mw, reading.power_limit_mw, now.energy_j
    watts = (None if value is None else value / 1000 for value in (power_mw, limit_mw))
    return (gpu.utilization, total, used, *watts, energy_j)
