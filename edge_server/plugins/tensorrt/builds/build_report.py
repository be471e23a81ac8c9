"""Report on TensorRT engines and their builds: as JSON for HTTP, as metrics, and as lines of `edge-server status`."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edge_server.plugin import StatusPart, StatusRow
from edge_server.telemetry.metrics_page import Family


class BuildState(enum.Enum):
    WAITING = "waiting"
    BUILDING = "building"
    PAUSED = "paused"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EngineReport(NamedTuple):
    """A TensorRT engine of one model version that is built or will be built.

    `state`: "waiting", "building", "paused", "verifying", "ready", "failed" or "cancelled". `reason` says why it is
    built, why it waits, or why it failed. `retry_s` is the unix time of the next attempt; None if only new files or a
    user's command can start one. `difference` is the largest difference to the outputs of the serving runtime; None
    before the comparison, or if no other runtime serves the model. `took_s` is the duration of the build. `dla_layers`:
    how many layers the DLA can run, and how many there are; None if the engine uses no DLA, or is not built yet.
    """

    model: str
    version: int
    library: str
    precision: str
    digest: str
    state: str
    phase: str
    percent: float
    reason: str
    since_s: float
    attempt_count: int
    retry_s: float | None
    took_s: float
    difference: float | None
    tolerance: float
    dla_layers: Sequence[int] | None


class EngineBuildsReport(NamedTuple):
    """All known engines. `pause` says why no engine is built now; "" if builds are allowed."""

    engines: tuple[EngineReport, ...]
    cached_count: int
    cached_bytes: int
    pause: str

    def as_json(self) -> Mapping[str, object]:
        """Return the response of GET /edge/v1/engines."""
        return {
            "enabled": True,
            "detail": self.pause,
            "cached": {"count": self.cached_count, "bytes": self.cached_bytes},
            "engines": [
                item._asdict()
                | {
                    "version": str(item.version),
                    "since_s": round(item.since_s, 3),
                    "retry_s": None if item.retry_s is None else round(item.retry_s, 3),
                    "took_s": round(item.took_s, 3),
                }
                for item in self.engines
            ],
        }


def families(now: EngineBuildsReport, outcomes: Mapping[str, int], lookups: Mapping[str, int]) -> list[Family]:
    """Return the metric families, with one series for each version that has an engine. `outcomes` and `lookups` are
    counts of the build queue."""
    percent = Family(
        "edge_engine_build_percent", "gauge", "How far the build of a version's engine has come, in per cent"
    )
    state = Family(
        "edge_engine_build_state", "gauge", "1 for the state that a version's engine is in, 0 for the others"
    )
    took = Family("edge_engine_build_duration_seconds", "gauge", "What the last build of the engine took, in seconds")
    apart = Family(
        "edge_engine_difference_ratio",
        "gauge",
        "Largest difference of the engine's answers from those of the runtime that it replaced, of their magnitude",
    )
    for item in now.engines:
        labels = {"model": item.model, "version": str(item.version)}
        percent.add(labels, item.percent)
        for one in BuildState:
            state.add({**labels, "state": one.value}, int(one.value == item.state))
        if item.took_s:
            took.add(labels, item.took_s)
        if item.difference is not None:
            apart.add(labels, item.difference)
    builds = Family("edge_engine_builds_total", "counter", "Builds of engines that ended, by how")
    for outcome in ("ready", "failed", "cancelled"):
        builds.add({"outcome": outcome}, outcomes.get(outcome, 0))
    found = Family(
        "edge_engine_cache_lookups_total", "counter", "Engines looked for when a model was loaded, by result"
    )
    for result in ("hit", "miss"):
        found.add({"result": result}, lookups.get(result, 0))
    size = Family("edge_engine_cache_bytes", "gauge", "Bytes of verified engines on disk")
    size.add({}, now.cached_bytes)
    paused = Family("edge_engine_builds_paused", "gauge", "1 while no engine may be built: the box is hot")
    paused.add({}, int(bool(now.pause)))
    return [percent, state, took, apart, builds, found, size, paused]


def engine_rows(report: Mapping[str, Any]) -> Sequence[StatusPart]:
    """Return the rows for a response of GET /edge/v1/engines."""
    if not report["enabled"]:
        return ()
    cached, now_s = report["cached"], time.time()
    text = f"{cached['count']} cached, {cached['bytes'] / 1e6:.0f} MB"
    text += f"; builds are paused: {report['detail']}" if report["detail"] else ""
    return (
        StatusRow("engines", "ok", text),
        *(StatusRow("", "ok", _engine_text(item, now_s)) for item in report["engines"]),
    )


def _engine_text(item: Mapping[str, Any], now_s: float) -> str:
    title = f"{item['model']} version {item['version']}, {item['library']} {item['precision']}"
    state = item["state"]
    if state == "ready":
        difference = item["difference"]
        compared = "" if difference is None else f", outputs within {difference:.1g} of the previous runtime"
        layers = item["dla_layers"]
        on_dla = "" if layers is None else f", {layers[0]} of {layers[1]} layers can run on the DLA"
        return f"{title}: ready, built in {item['took_s']:.1f} s{compared}{on_dla}"
    if state in ("building", "verifying"):
        return f"{title}: {state}, {item['percent']:.0f} % ({item['phase']})"
    if state == "waiting" and item["phase"]:
        return f"{title}: {item['phase']}"
    retry_s = item["retry_s"]
    retry = "" if retry_s is None else f"; retry in {max(retry_s - now_s, 0):.0f} s"
    return f"{title}: {state}, {item['reason']}{retry}"
