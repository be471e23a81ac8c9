"""Data classes of the status reports on frame streams, cameras of the server, receivers of results and questions, and
their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

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
