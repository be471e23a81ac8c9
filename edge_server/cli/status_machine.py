"""Machine part of `edge-server status`: temperature, power, refused requests, energy per inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from edge_server.cli.table import render

_COST_COLUMN_TITLES = ("MODEL", "BATCH", "J PER INFERENCE")


def governor_lines(report: Mapping[str, Any], output: TextIO | None = None) -> str:
    """Return the lines for a response of GET /edge/v1/governor, formatted for `output`."""
    if not report.get("enabled"):
        return f"governor: off; {_clean(report.get('detail', ''))}".rstrip("; ")
    lines = [f"governor: {_clean(report['state'])}" + (f" - {_clean(report['detail'])}" if report["detail"] else "")]
    parts = [_temperature(report), _power(report), f"{report['share']:.0%} of full work allowed"]
    lines.append("  " + ", ".join(parts))
    lines += _board(report["box"])
    lines += [
        f"  {_clean(lighter)} answers for {_clean(model)}"
        for model, lighter in sorted(report["variants_in_force"].items())
    ]
    if report["shed"]:
        counts = ", ".join(f"{item['count']} {item['class']} ({item['reason']})" for item in report["shed"])
        lines.append(f"  refused since the start: {_clean(counts)}")
    costs = [
        (_clean(item["model"]), str(item.get("batch") or f"a token of {item['phase']}"), f"{item['joules']:.3g}")
        for item in report["joules_per_inference"]
    ]
    if costs:
        lines.append(render(_COST_COLUMN_TITLES, costs, output))
    return "\n".join(lines)


def _temperature(report: Mapping[str, Any]) -> str:
    if report["temperature_c"] is None:
        return "no temperature is known"
    set_point = report["set_point_c"]
    return f"{report['temperature_c']:.0f} °C" + (f" of {set_point:.0f} °C" if set_point is not None else "")


def _power(report: Mapping[str, Any]) -> str:
    if report["power_w"] is None:
        return "no power is known"
    budget = report["power_budget_w"]
    return f"{report['power_w']:.1f} W" + (f" of {budget:.1f} W" if budget is not None else "")


def _board(box: Mapping[str, Any]) -> list[str]:
    names = [box["board"], box["jetpack"] and f"JetPack {box['jetpack']}"]
    if box["power_mode"]:
        names.append(f"power mode {box['power_mode']['name']}")
    text = ", ".join(_clean(name) for name in names if name)
    return [f"  {text}"] if text else []


def _clean(text: object) -> str:
    """Return text without control characters, because it comes from files of the machine."""
    return "".join(char if char.isprintable() else " " for char in str(text))
