"""Reports on the governor's state: JSON for GET /edge/v1/governor (in W, °C and J), rows of `edge-server status`, and
curves of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_server.core.priority_class import PriorityClass
from edge_server.plugin import StatusPart, StatusRow, StatusTable
from edge_server.plugins.governor.control_loop import GovernorSnapshot
from edge_server.plugins.governor.readings import EventCounter, Gpu, MachineReading, Rail, Zone

Json = dict[str, object]
Shed = Mapping[tuple[PriorityClass, str], int]


def governor_report(now: GovernorSnapshot, shed: Shed) -> Json:
    """Return the response to GET /edge/v1/governor. Unknown numbers are null; `missing` gives the reasons."""
    decision, reading = now.decision, now.reading
    return {
        "enabled": True,
        "state": decision.level.name,
        "detail": decision.detail,
        "share": round(decision.share, 4),
        "limited_by": decision.limited_by,
        "causes": sorted(cause.value for cause in decision.causes),
        "sensors_lost": sorted(decision.lost),
        "may_load": decision.may_load,
        "temperature_c": _rounded(decision.temperature_c),
        "predicted_c": _rounded(decision.predicted_c),
        "set_point_c": _rounded(decision.set_point_c),
        "steers_by": now.control_zone,
        "power_w": in_watts(reading.power_mw),
        "power_budget_w": _rounded(decision.power_set_point_w),
        "power_limit_w": in_watts(reading.power_limit_mw),
        "energy_j": _rounded(now.energy_j),
        "capacity": round(now.capacity, 3),
        "control_share": round(now.control_share, 4),
        "busy": round(now.busy_share, 3),
        "clock_cap_hz": now.clock_cap_hz,
        "clock_cap_problem": now.clock_problem,
        "variants_in_force": dict(now.active_variants),
        "shed": [
            {"class": level.name.lower(), "reason": reason, "count": count}
            for (level, reason), count in sorted(shed.items())
        ],
        "joules_per_inference": [
            {
                "model": model,
                ("batch" if isinstance(batch, int) else "phase"): batch,
                "joules": float(f"{cost.joules:.4g}"),
                "watts_above_idle": _rounded(cost.watts),
                "confidence": round(cost.confidence, 3),
            }
            for (model, batch), cost in sorted(
                now.costs.items(), key=lambda item: (item[0][0], isinstance(item[0][1], str), item[0][1])
            )
        ],
        "box": _box(reading),
    }


def governor_rows(report: Mapping[str, Any]) -> Sequence[StatusPart]:
    """Return the rows of `edge-server status` for a report of `governor_report`."""
    temperature, power = "no temperature is known", "no power is known"
    if report["temperature_c"] is not None:
        temperature = f"{report['temperature_c']:.0f} °C"
        temperature += f" of {report['set_point_c']:.0f} °C" if report["set_point_c"] is not None else ""
    if report["power_w"] is not None:
        power = f"{report['power_w']:.1f} W"
        power += f" of {report['power_budget_w']:.1f} W" if report["power_budget_w"] is not None else ""
    share = f"{report['share']:.0%} of full work allowed, {report['control_share']:.0%} kept for control"
    box = report["box"]
    board = (
        box["board"],
        box["jetpack"] and f"JetPack {box['jetpack']}",
        box["power_mode"] and f"power mode {box['power_mode']['name']}",
    )
    texts = [f"{temperature}, {power}, {share}", ", ".join(name for name in board if name)]
    texts += [f"{lighter} answers for {model}" for model, lighter in sorted(report["variants_in_force"].items())]
    if report["shed"]:
        counts = ", ".join(f"{item['count']} {item['class']} ({item['reason']})" for item in report["shed"])
        texts.append(f"refused since the start: {counts}")
    costs = [
        (item["model"], str(item.get("batch") or f"a token of {item['phase']}"), f"{item['joules']:.3g}")
        for item in report["joules_per_inference"]
    ]
    return (
        StatusRow("governor", "ok", report["state"] + (f" - {report['detail']}" if report["detail"] else "")),
        *(StatusRow("", "ok", text) for text in texts if text),
        *([StatusTable(("MODEL", "BATCH", "J PER INFERENCE"), costs)] if costs else []),
    )


def governor_gauges(now: GovernorSnapshot) -> dict[str, float]:
    """Return the known numbers that the page draws as curves, under the names of its charts."""
    reading, decision = now.reading, now.decision
    values = {
        "temperature": decision.temperature_c,
        "power": in_watts(reading.power_mw),
        "load limit": 100 * decision.share,
        "busy instances": now.busy_share,
    }
    values |= {f"gpu {gpu.uuid}": None if gpu.utilization is None else 100 * gpu.utilization for gpu in reading.gpus}
    return {name: value for name, value in values.items() if value is not None}


def _box(reading: MachineReading) -> Json:
    mode, memory = reading.power_mode, reading.memory
    return {
        "board": reading.board,
        "soc": reading.soc,
        "l4t": reading.l4t,
        "jetpack": reading.jetpack,
        "power_mode": None if mode is None else {"number": mode.number, "name": mode.name},
        "zones": [_zone(zone) for zone in reading.zones],
        "throttle_states": {cooler.name: cooler.state for cooler in reading.coolers},
        "rails": [_rail(rail) for rail in reading.rails],
        "over_current": _counters(reading.over_current),
        "throttles": _counters(reading.throttles),
        "clocks": [
            {"name": clock.name, "hz": clock.current_hz, "cap_hz": clock.cap_hz, "highest_hz": clock.highest_hz}
            for clock in reading.clocks
        ],
        "fans": [{"name": fan.name, "duty": _rounded(fan.duty, 3), "rpm": fan.rpm} for fan in reading.fans],
        "gpus": [_gpu(gpu) for gpu in reading.gpus],
        "memory": {
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "pressure_some_percent": memory.some_percent,
            "pressure_full_percent": memory.full_percent,
        },
        "sources": dict(reading.sources),
        "missing": dict(reading.missing),
    }


def _zone(zone: Zone) -> Json:
    trips = zone.trips
    return {
        "name": zone.name,
        "temperature_c": _rounded(zone.temperature_c),
        "slows_down_at_c": trips.passive_c,
        "switches_off_at_c": trips.critical_c,
        "headroom_c": _rounded(zone.headroom_c),
        "problem": zone.problem,
    }


def _rail(rail: Rail) -> Json:
    return {
        "name": rail.name,
        "power_w": in_watts(rail.power_mw),
        "limit_w": in_watts(rail.limit_mw),
        "is_counted": rail.is_counted,
        "is_alarmed": rail.is_alarmed,
        "problem": rail.problem,
    }


def _gpu(gpu: Gpu) -> Json:
    return {
        "name": gpu.name or gpu.key,
        "uuid": gpu.uuid,
        "is_integrated": gpu.is_integrated,
        "is_lost": gpu.is_lost,
        "utilization": _rounded(gpu.utilization, 3),
        "temperature_c": _rounded(gpu.temperature_c),
        "power_w": in_watts(gpu.power_mw),
        "power_limit_w": in_watts(gpu.power_limit_mw),
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "clock_hz": gpu.clock_hz,
        "held_back_by": sorted(gpu.reasons or ()),
        "missing": dict(gpu.missing),
    }


def _counters(counters: Iterable[EventCounter]) -> list[Json]:
    return [
        {
            "name": item.name,
            "meaning": item.slowdown.value,
            "count": item.count,
            "per_s": _rounded(item.per_s),
            "per_s_over_a_minute": _rounded(item.sustained_per_s),
        }
        for item in counters
    ]


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def in_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
