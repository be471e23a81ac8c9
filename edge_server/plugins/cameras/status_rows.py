"""Part of `edge-server status` about cameras: tables of frame streams, cameras of the server, receivers of results, and
questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_server.plugin import StatusPart, StatusRow, StatusTable

_STREAM_COLUMNS = ("STREAM", "MODEL", "CLIENT", "FPS IN", "FPS OUT", "DROPPED", "AGE P50 MS", "AGE P99 MS")
_SOURCE_COLUMNS = ("SOURCE", "URL", "MODEL", "STATE", "STAMPS BY", "FAILURES", "OFFLINE S")
_SINK_COLUMNS = ("SINK", "URL", "STATE", "RECEIVED", "DELIVERED", "SUPPRESSED", "DROPPED", "WAITING")
_QUESTION_COLUMNS = (
    "QUESTION", "MODEL", "ASKED", "ANSWERED", "REPLACED", "EXPIRED", "SHED", "FAILED", "WAITING", "MEAN S"
)  # fmt: skip


def stream_rows(streams: Sequence[Mapping[str, Any]]) -> Sequence[StatusPart]:
    """Return the table for the streams of GET /edge/v1/streams. Drops are counted since an id was first used."""
    cells = [
        (
            stream["stream_id"],
            stream["model"],
            stream["client"],
            f"{stream['fps_in']:.1f}",
            f"{stream['fps_out']:.1f}",
            ", ".join(f"{count} {reason}" for reason, count in stream["dropped"].items() if count) or "0",
            f"{stream['age_p50_ms']:.1f}",
            f"{stream['age_p99_ms']:.1f}",
        )
        for stream in streams
    ]
    return [StatusTable(_STREAM_COLUMNS, cells, optional=("CLIENT", "AGE P99 MS", "FPS IN"))] if cells else []


def camera_rows(report: Mapping[str, Any]) -> Sequence[StatusPart]:
    """Return the tables of sources, sinks and questions, and a line for each problem, for a response of GET
    /edge/v1/cameras."""
    rows: list[StatusPart] = []
    if report["sources"]:
        sources = [
            (item["name"], item["url"], item["model"], item["state"], item["clock"], str(item["failures"]),
             f"{item['offline_s']:.1f}")
            for item in report["sources"]
        ]  # fmt: skip
        rows.append(StatusTable(_SOURCE_COLUMNS, sources, optional=("OFFLINE S", "STAMPS BY", "URL")))
    if report["sinks"]:
        counts = ("received", "delivered", "suppressed", "dropped", "waiting")
        sinks = [
            (item["name"], item["url"], item["state"], *(str(item[count]) for count in counts))
            for item in report["sinks"]
        ]
        rows.append(StatusTable(_SINK_COLUMNS, sinks, optional=("WAITING", "RECEIVED", "URL", "SUPPRESSED")))
    if report["questions"]:
        questions = [
            (_question_title(item), item["model"], *(str(item[count.lower()]) for count in _QUESTION_COLUMNS[2:-1]),
             f"{item['seconds'] / item['answered']:.1f}" if item["answered"] else "-")
            for item in report["questions"]
        ]  # fmt: skip
        rows.append(StatusTable(_QUESTION_COLUMNS, questions, optional=("WAITING", "EXPIRED", "REPLACED", "SHED")))
    for kind in ("source", "sink"):
        rows += [
            StatusRow(f"{kind} {item['name']}", "ok", item["reason"]) for item in report[f"{kind}s"] if item["reason"]
        ]
    rows += [
        StatusRow(f"question {_question_title(item)}", "ok", item["reason"])
        for item in report["questions"]
        if item["reason"]
    ]
    if report.get("problem"):
        title, _, text = report["problem"].partition(": ")
        rows.append(StatusRow(title, "failed", text))
    return rows


def _question_title(item: Mapping[str, Any]) -> str:
    return f"{item['source']}/{item['name']}"
