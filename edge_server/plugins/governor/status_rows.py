"""Part of `edge-server status` about the governor: temperature, power, refused requests, energy per inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.plugin import StatusPart, StatusRow, StatusTable


def governor_rows(report: Mapping[str, Any]) -> Sequence[StatusPart]:
    """Return the rows for a response of GET /edge/v1/governor with `enabled` true."""
    parts = [
        _temperature(report),
        _power(report),
        f"{report['share']:.0%} of full work allowed, {report['control_share']:.0%} kept for control",
    ]
    texts = [", ".join(parts), *_board(report["box"])]
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
        *(StatusRow("", "ok", text) for text in texts),
        *([StatusTable(("MODEL", "BATCH", "J PER INFERENCE"), costs)] if costs else []),
    )


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
    text = ", ".join(name for name in names if name)
    return [text] if text else []
