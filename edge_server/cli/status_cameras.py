"""Cameras and sinks in the output of `edge-server status`."""

from __future__ import annotations

from typing import Any, TextIO

from edge_server.cli.table import render

SOURCE_COLUMN_TITLES = ("SOURCE", "URL", "MODEL", "STATE", "STAMPS BY", "FAILURES", "OFFLINE S")
SINK_COLUMN_TITLES = ("SINK", "URL", "STATE", "RECEIVED", "DELIVERED", "SUPPRESSED", "DROPPED", "WAITING")


def camera_lines(report: dict[str, Any], output: TextIO) -> list[str]:
    """Return the tables of sources and sinks, and a line for each problem."""
    lines = []
    if report["sources"]:
        rows = [
            (item["name"], item["url"], item["model"], item["state"], item["clock"], str(item["failures"]),
             f"{item['offline_s']:.1f}")
            for item in report["sources"]
        ]  # fmt: skip
        lines += ["", render(SOURCE_COLUMN_TITLES, rows, output, optional=("OFFLINE S", "STAMPS BY", "URL"))]
    if report["sinks"]:
        counts = ("received", "delivered", "suppressed", "dropped", "waiting")
        rows_of_sinks = [
            (item["name"], item["url"], item["state"], *(str(item[count]) for count in counts))
            for item in report["sinks"]
        ]
        optional = ("WAITING", "SUPPRESSED", "RECEIVED", "URL")
        lines += ["", render(SINK_COLUMN_TITLES, rows_of_sinks, output, optional=optional)]
    for kind in ("source", "sink"):
        lines += [f"{kind} {item['name']}: {item['reason']}" for item in report[f"{kind}s"] if item["reason"]]
    if report.get("problem"):
        lines.append(f"the cameras are unchanged: {report['problem']}")
    return lines
