"""The metrics page's families of heat, power and energy: Triton's nv_gpu_*, on a Jetson too, and our own edge_*.

Series are bounded: zones, rails and GPUs by the box, causes and classes by their enumerations, models by what serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_server.core.priority import PriorityClass
from edge_server.governor.control_policy import Cause
from edge_server.governor.readings import BoxReading, Gpu
from edge_server.governor.sampler import GovernorSnapshot
from edge_server.governor.state_report import Shed
from edge_server.telemetry.metrics_page import Family

MOST_OF_A_KIND = 64
"""Zones, rails and GPUs that get a series of their own."""

_ALWAYS_SHOWN = ("heat", "power_budget")
"""Reasons of shedding that have their series from the start, so that a rate over them is never undefined."""


def families(now: GovernorSnapshot, shed: Shed, *, has_gpu_metrics: bool) -> list[Family]:
    """Return what the page tells of the box and of the governor."""
    found = [*_heat(now.reading), *_power(now), *_state(now, shed), *_models(now)]
    return found + _gpus(now) if has_gpu_metrics else found


def _heat(reading: BoxReading) -> list[Family]:
    temperature = Family("edge_temperature_celsius", "gauge", "Temperature, by sensor zone, in degrees Celsius")
    limit = Family(
        "edge_temperature_limit_celsius", "gauge", "Where the box slows itself down, by zone, in degrees Celsius"
    )
    for zone in reading.zones[:MOST_OF_A_KIND]:
        if zone.temperature_c is not None:
            temperature.add({"zone": zone.name}, zone.temperature_c)
        if zone.trips.passive_c is not None:
            limit.add({"zone": zone.name}, zone.trips.passive_c)
    return [temperature, limit]


def _power(now: GovernorSnapshot) -> list[Family]:
    power = Family("edge_power_watts", "gauge", "Power, by rail, in watts; rail total is the whole box")
    budget = Family("edge_power_budget_watts", "gauge", "Power that the governor keeps to, in watts")
    energy = Family(
        "edge_energy_joules_total", "counter", "Energy of the whole box since the server started, in joules"
    )
    alarms = Family("edge_over_current_events_total", "counter", "Alarms of the board's power monitor, by input")
    reading = now.reading
    for rail in reading.rails[:MOST_OF_A_KIND]:
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
    share = Family("edge_governor_share", "gauge", "Part of its full work that the box may do, 0 to 1")
    aim = Family(
        "edge_governor_set_point_celsius", "gauge", "Temperature that the governor keeps to, in degrees Celsius"
    )
    ahead = Family("edge_governor_predicted_celsius", "gauge", "Temperature expected some seconds ahead")
    capped = Family("edge_governor_clock_cap_hertz", "gauge", "Cap that the governor has put on the GPU's clock")
    causes = Family("edge_throttle_state", "gauge", "1 while the box is slowed down, or held back, for that cause")
    sheds = Family("edge_shed_total", "counter", "Requests and frames refused, by class and reason")
    level.add({}, int(decision.level))
    share.add({}, decision.share)
    if decision.set_point_c is not None and decision.predicted_c is not None:
        aim.add({}, decision.set_point_c)
        ahead.add({}, decision.predicted_c)
    if now.clock_cap_hz is not None:
        capped.add({}, now.clock_cap_hz)
    for cause in Cause:
        causes.add({"cause": cause.value}, int(cause in decision.causes))
    for priority in PriorityClass:
        for reason in _ALWAYS_SHOWN:
            sheds.add({"class": priority.name.lower(), "reason": reason}, 0)
    for (priority, reason), count in shed.items():
        sheds.add({"class": priority.name.lower(), "reason": reason}, count)
    return [level, share, aim, ahead, capped, causes, sheds]


def _models(now: GovernorSnapshot) -> list[Family]:
    joules = Family(
        "edge_joules_per_inference", "gauge", "Energy above idle of one inference, by batch size, in joules"
    )
    variant = Family("edge_variant_in_force", "gauge", "1 while the lighter model `variant` answers for `model`")
    for (model, batch), cost in now.costs.items():
        joules.add({"model": model, "batch": str(batch)}, cost.joules)
    for model, lighter in now.in_force.items():
        variant.add({"model": model, "variant": lighter}, 1)
    return [joules, variant]


def _gpus(now: GovernorSnapshot) -> list[Family]:
    names = (
        ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)"),
        ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes"),
        ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes"),
        ("nv_gpu_power_usage", "gauge", "GPU power usage in watts; of the whole module where the GPU is built in"),
        ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts"),
        ("nv_energy_consumption", "counter", "GPU energy consumption in joules since the server started"),
    )
    found = [Family(name, "counter" if kind == "counter" else "gauge", words) for name, kind, words in names]
    for gpu in now.reading.gpus[:MOST_OF_A_KIND]:
        labels = {"gpu_uuid": gpu.uuid or gpu.key}
        for family, value in zip(found, _values(gpu, now), strict=True):
            if value is not None:
                family.add(labels, value)
    return found


def _values(gpu: Gpu, now: GovernorSnapshot) -> Iterable[float | None]:
    """Return the GPU's metrics in the order of the families. A built-in GPU shares memory and power with the box."""
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
