"""Data classes of the report on TensorRT engines and their builds, for HTTP, metrics and `edge-server status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


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
                {
                    "model": item.model,
                    "version": str(item.version),
                    "library": item.library,
                    "precision": item.precision,
                    "digest": item.digest,
                    "state": item.state,
                    "phase": item.phase,
                    "percent": item.percent,
                    "reason": item.reason,
                    "since_s": round(item.since_s, 3),
                    "attempt_count": item.attempt_count,
                    "retry_s": None if item.retry_s is None else round(item.retry_s, 3),
                    "took_s": round(item.took_s, 3),
                    "difference": item.difference,
                    "tolerance": item.tolerance,
                    "dla_layers": item.dla_layers,
                }
                for item in self.engines
            ],
        }
