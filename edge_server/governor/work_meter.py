"""Work meter: computes each model's work since the last sample from the serving statistics, and the compute capacity.

No clock, no I/O: statistics go in, differences come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge_server.core.model_statistics import VersionStatistics
from edge_server.governor.controllers import smoothing_weight
from edge_server.governor.energy_model import ModelWorkload

_SMOOTHING_S = 3.0
_DECAY_S = 300.0
"""The peak decays, because the number of busy instances may change. It does not decay while work is held back."""

_REFUSED = "REJECTED"
"""Triton's failure reason for rejected requests."""


@dataclass(slots=True)
class ModelWork:
    """Work of one model, and its rejected requests and frames."""

    busy_s: float = 0.0
    inferences: int = 0
    refused: int = 0


@dataclass(slots=True)
class CompletedWork:
    """Work of one interval: by model and batch size (for the energy model), and by model."""

    batches: dict[tuple[str, int], ModelWorkload] = field(default_factory=dict)
    models: dict[str, ModelWork] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Seconds of computing. The seconds of parallel instances add up."""
        return sum(work.busy_s for work in self.models.values())


class CompletedWorkMeter:
    """Turns growing counters into the work since the last call. A counter that became smaller was reset by a reload."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[dict[int, tuple[int, int]], int]] = {}
        self._known_frames: Mapping[str, int] = {}
        self._has_baseline = False

    def update(self, versions: Iterable[VersionStatistics], refused_frames: Mapping[str, int]) -> CompletedWork:
        """Return the work since the last call; no work at the first call. `refused_frames`: counts by model."""
        done = CompletedWork()
        before, self._known = self._known, {}
        for version in versions:
            key = (version.name, version.version)
            totals = {
                size: (
                    item.compute_infer.count,
                    item.compute_input.ns + item.compute_infer.ns + item.compute_output.ns,
                )
                for size, item in version.batches.items()
            }
            now = totals, version.failures.get(_REFUSED, 0)
            self._known[key] = now
            if self._has_baseline:
                _add(done, version.name, before.get(key, ({}, 0)), now)
        for name, count in refused_frames.items():
            if self._has_baseline and count > (known := self._known_frames.get(name, 0)):
                done.models.setdefault(name, ModelWork()).refused += count - known
        self._known_frames = dict(refused_frames)
        self._has_baseline = True
        return done


class ComputeCapacity:
    """Compute capacity: the recent peak of computing seconds per second; at least 1."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._peak = 1.0

    def update(self, busy_s: float, dt_s: float, *, is_held_back: bool) -> float:
        """Add an interval and return the capacity. `is_held_back`: the governor limited the work."""
        if dt_s > 0:
            self._rate += smoothing_weight(dt_s, _SMOOTHING_S) * (busy_s / dt_s - self._rate)
            if self._rate >= self._peak:
                self._peak = self._rate
            elif not is_held_back:
                self._peak += smoothing_weight(dt_s, _DECAY_S) * (self._rate - self._peak)
        self._peak = max(1.0, self._peak)
        return self._peak


def _add(
    done: CompletedWork,
    name: str,
    before: tuple[dict[int, tuple[int, int]], int],
    now: tuple[dict[int, tuple[int, int]], int],
) -> None:
    model = done.models.setdefault(name, ModelWork())
    for size, (count, ns) in now[0].items():
        known_count, known_ns = before[0].get(size, (0, 0))
        if count < known_count or ns < known_ns:
            known_count = known_ns = 0
        if count == known_count:
            continue
        busy_s, inferences = (ns - known_ns) / 1e9, (count - known_count) * size
        other = done.batches.get((name, size), ModelWorkload(0.0, 0))
        done.batches[name, size] = ModelWorkload(other.busy_s + busy_s, other.inferences + inferences)
        model.busy_s += busy_s
        model.inferences += inferences
    model.refused += now[1] - before[1] if now[1] >= before[1] else now[1]
