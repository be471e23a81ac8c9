"""Metrics of TensorRT engines and their builds, for the metrics page in Prometheus' format. There is one series for
each version with an engine."""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.plugins.tensorrt.builds.build_registry import BuildState
from edge_server.plugins.tensorrt.builds.build_report import EngineBuildsReport
from edge_server.telemetry.metrics_page import Family


def families(now: EngineBuildsReport, outcomes: Mapping[str, int], lookups: Mapping[str, int]) -> list[Family]:
    """Return the metric families. `outcomes` and `lookups` come from the build queue."""
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
