"""Status reports of the plugin `cameras`: its frame streams, the cameras that the server opens, its sinks, and the
questions that models are asked about pictures. Data classes, their JSON, and the tables of `edge-server status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.plugin import StatusPart, StatusRow, StatusTable

if TYPE_CHECKING:
    # Not imported by a server without cameras.
    from edge_server.protocol.frame_messages import StreamCounts


class FrameStreamReport(NamedTuple):
    """One open frame stream. `version` 0 is the newest that serves. `counts` belong to the stream id.

    Rates are frames per second over the last seconds. Ages are those of the last results when they were sent.
    """

    stream_id: str
    model: str
    version: int
    client: str
    priority: int
    weight: float
    open_s: float
    fps_in: float
    fps_out: float
    waiting_count: int
    age_p50_ms: float
    age_p99_ms: float
    counts: StreamCounts


class SourceReport(NamedTuple):
    """One camera that the server opens itself; its frame stream has the same name.

    `state` is CONNECTING, WAITING, RUNNING or FAILED. WAITING: its model is not ready yet. FAILED: it is opened again
    after a delay. `reason` says why, and is also set while the frames are answered with errors. `clock` is "camera" or
    "server": the clock of the stamps. `failures` counts the ends of the source, `offline_s` is the time without it,
    both since it was added or changed.
    """

    name: str
    url: str
    model: str
    state: str
    reason: str = ""
    clock: str = "server"
    title: str = ""
    failures: int = 0
    offline_s: float = 0.0


class SinkReport(NamedTuple):
    """One receiver of results. At any time received = delivered + suppressed + dropped + waiting.

    `state` is IDLE (nothing was sent yet), RUNNING or FAILED. `reason` says why it failed, or which of its classes no
    source's model has. `suppressed` counts messages
    without news, or within the least interval; `dropped` those that a slow or absent receiver cost.
    """

    name: str
    url: str
    state: str
    reason: str = ""
    received: int = 0
    delivered: int = 0
    suppressed: int = 0
    dropped: int = 0
    waiting: int = 0


class QuestionReport(NamedTuple):
    """One question about the pictures of a source. At any time asked = answered + replaced + expired + shed + failed +
    waiting.

    `reason` says why the last one failed, or why the next one will. `replaced` counts those for which a newer one came
    before their turn, `expired` those that waited too long for it, `shed` those that the governor refused. `waiting`
    includes one that the model answers now. `seconds` is the time that the model took for all answers.
    """

    source: str
    name: str
    model: str
    reason: str = ""
    asked: int = 0
    answered: int = 0
    replaced: int = 0
    expired: int = 0
    shed: int = 0
    failed: int = 0
    waiting: int = 0
    seconds: float = 0.0


class CamerasReport(NamedTuple):
    """Sources, sinks and questions. `problem` says that the file is not in use, or not its last change, and why; else
    ""."""

    sources: tuple[SourceReport, ...] = ()
    sinks: tuple[SinkReport, ...] = ()
    problem: str = ""
    questions: tuple[QuestionReport, ...] = ()


NO_CAMERAS: Mapping[str, object] = {"enabled": False, "sources": [], "sinks": [], "questions": []}
"""Response of GET /edge/v1/cameras of a server that opens no cameras itself."""


_STREAM_COLUMNS = ("STREAM", "MODEL", "CLIENT", "FPS IN", "FPS OUT", "DROPPED", "AGE P50 MS", "AGE P99 MS")
_SOURCE_COLUMNS = ("SOURCE", "URL", "MODEL", "STATE", "STAMPS BY", "FAILURES", "OFFLINE S")
_SINK_COLUMNS = ("SINK", "URL", "STATE", "RECEIVED", "DELIVERED", "SUPPRESSED", "DROPPED", "WAITING")
_QUESTION_COLUMNS = (
    "QUESTION", "MODEL", "ASKED", "ANSWERED", "REPLACED", "EXPIRED", "SHED", "FAILED", "WAITING", "MEAN S"
)  # fmt: skip


def streams_as_json(reports: Iterable[FrameStreamReport]) -> list[dict[str, object]]:
    """Return rates and counts of the open frame streams."""
    return [
        {
            "stream_id": report.stream_id,
            "model": report.model,
            "version": report.version,
            "client": report.client,
            "priority": report.priority,
            "weight": round(report.weight, 6),
            "open_s": round(report.open_s, 3),
            "fps_in": round(report.fps_in, 2),
            "fps_out": round(report.fps_out, 2),
            "received": report.counts.received,
            "answered": report.counts.answered,
            "late": report.counts.late,
            "waiting": report.waiting_count,
            "dropped": {reason.name: count for reason, count in report.counts.dropped.items()},
            "age_p50_ms": round(report.age_p50_ms, 3),
            "age_p99_ms": round(report.age_p99_ms, 3),
        }
        for report in reports
    ]


def cameras_as_json(report: CamerasReport) -> dict[str, object]:
    """Return the response of GET /edge/v1/cameras."""
    sources = [{**source._asdict(), "offline_s": round(source.offline_s, 3)} for source in report.sources]
    return {
        "enabled": True,
        "problem": report.problem,
        "sources": sources,
        "sinks": [sink._asdict() for sink in report.sinks],
        "questions": [{**one._asdict(), "seconds": round(one.seconds, 3)} for one in report.questions],
    }


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
