"""Measurement of the work of each model (computing time, requests, tokens) between two samples of its counters.

No clock, no I/O: counters go in, differences come out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TypeAlias

from edge_server.core.metric_family import MetricFamilyView
from edge_server.core.model_statistics import VersionWork
from edge_server.plugins.governor.control_algorithms import smoothing_weight
from edge_server.plugins.governor.energy_model import ModelWorkload, WorkKey
from edge_server.record import record

_SMOOTHING_S = 3.0
_DECAY_S = 300.0
"""The peak decays, because the number of busy instances may change. It does not decay while work is held back."""

TokenWork: TypeAlias = Mapping[tuple[str, str], tuple[float, int]]
"""(model, "prefill" or "decode") -> seconds of engine steps and tokens, since the model was loaded."""

_PHASES = {"vllm:prompt_tokens_total": "prefill", "vllm:generation_tokens_total": "decode"}
"""Metric of a language model -> the phase whose tokens it counts."""


@record(slots=True)
class ModelWork:
    """Work of one model, and its rejected requests and frames."""

    busy_s: float = 0.0
    inferences: int = 0
    refused: int = 0


@record(slots=True)
class CompletedWork:
    """Work of one interval: by model and batch size (for the energy model), and by model."""

    batches: dict[WorkKey, ModelWorkload] = field(default_factory=dict)
    models: dict[str, ModelWork] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Seconds of computing. The seconds of parallel instances add up."""
        return sum(work.busy_s for work in self.models.values())


class CompletedWorkMeter:
    """Turns growing counters into the work since the last call. A counter that became smaller was reset by a reload."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], VersionWork] = {}
        self._known_frames: Mapping[str, int] = {}
        self._known_tokens: TokenWork = {}
        self._has_baseline = False

    def update(
        self,
        versions: Iterable[VersionWork],
        refused_frames: Mapping[str, int],
        tokens: TokenWork | None = None,
    ) -> CompletedWork:
        """Return the work since the last call; no work at the first call. `refused_frames`: counts by model.

        The requests of a model in `tokens` overlap, so its work is that of its tokens.
        """
        done = CompletedWork()
        before, self._known = self._known, {}
        for version in versions:
            key = (version.name, version.version)
            self._known[key] = version
            if self._has_baseline:
                model = done.models.setdefault(version.name, ModelWork())
                known = before.get(key)
                if version != known:
                    _add(done, model, known, version)
        for name, count in refused_frames.items():
            if self._has_baseline and count > (known_count := self._known_frames.get(name, 0)):
                done.models.setdefault(name, ModelWork()).refused += count - known_count
        if self._has_baseline:
            for phase, total in (tokens or {}).items():
                _add_tokens(done, phase, self._known_tokens.get(phase, (0.0, 0)), total)
        self._known_tokens = dict(tokens or {})
        self._known_frames = dict(refused_frames)
        self._has_baseline = True
        return done


def token_work(families: Iterable[MetricFamilyView]) -> TokenWork:
    """Return the work of language models from their metric families."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if family.name == "vllm:step_seconds_total":
                seconds[sample.labels["model"], sample.labels["phase"]] += sample.value
            elif family.name in _PHASES:
                counts[sample.labels["model"], _PHASES[family.name]] += sample.value
    return {key: (value, int(counts[key])) for key, value in seconds.items()}


def _add_tokens(done: CompletedWork, key: tuple[str, str], before: tuple[float, int], now: tuple[float, int]) -> None:
    if now[0] < before[0] or now[1] < before[1]:
        before = (0.0, 0)
    model = done.models.setdefault(key[0], ModelWork())
    for other in [other for other in done.batches if other[0] == key[0] and isinstance(other[1], int)]:
        model.busy_s -= done.batches.pop(other).busy_s
    work = ModelWorkload(now[0] - before[0], now[1] - before[1])
    if work.inferences:
        done.batches[key] = work
    model.busy_s = max(model.busy_s, 0.0) + work.busy_s


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


def _add(done: CompletedWork, model: ModelWork, before: VersionWork | None, now: VersionWork) -> None:
    name = now.name
    for size, (count, ns) in now.batches.items():
        known_count, known_ns = (0, 0) if before is None else before.batches.get(size, (0, 0))
        if count < known_count or ns < known_ns:
            known_count = known_ns = 0
        if count == known_count:
            continue
        busy_s, inferences = (ns - known_ns) / 1e9, (count - known_count) * size
        other = done.batches.get((name, size), ModelWorkload(0.0, 0))
        done.batches[name, size] = ModelWorkload(other.busy_s + busy_s, other.inferences + inferences)
        model.busy_s += busy_s
        model.inferences += inferences
    refused = 0 if before is None else before.rejected_count
    model.refused += now.rejected_count - (refused if now.rejected_count >= refused else 0)
