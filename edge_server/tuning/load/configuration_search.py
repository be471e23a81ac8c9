"""Configuration search: limits, ranking, and successive halving over candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_server.tuning.load.measurement_windows import MeasuredPoint
from edge_server.tuning.load.server_candidates import ServerCandidate

LEFT_AT_THE_END = 3
GAIN = 0.05
"""By how much another configuration must be better than the one that is there: less is noise, or worth no change."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """None: no limit. `difference`: of the outputs, as a part of the largest value of each."""

    latency_ms: float | None = None
    memory_mb: float | None = None
    power_w: float | None = None
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What a trial gave. `problem` says why there are no points; `difference` is None where nothing was compared."""

    candidate: ServerCandidate
    points: Sequence[MeasuredPoint] = ()
    difference: float | None = None
    runtime: str = ""
    precision: str = ""
    problem: str = ""
    round: int = 0

    @property
    def memory_mb(self) -> float | None:
        known = [point.server_bytes for point in self.points if point.server_bytes is not None]
        return max(known) / 1e6 if known else None

    @property
    def power_w(self) -> float | None:
        known = [point.power_w for point in self.points if point.power_w is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True)
class RankedTrial:
    """`point` is the best of those within the latency limit, else the quickest. `broken`: the limits that it breaks."""

    outcome: TrialOutcome
    point: MeasuredPoint | None
    broken: tuple[str, ...]
    score: float
    """More is better; infinitely bad without figures."""

    @property
    def is_allowed(self) -> bool:
        return not self.broken and self.point is not None

    @property
    def rank(self) -> tuple[bool, float]:
        return self.is_allowed, self.score


def judge(outcome: TrialOutcome, limits: SearchLimits, objective: str) -> RankedTrial:
    """`objective`: "throughput", the most inferences a second; or "latency", the lowest p99."""
    if not outcome.points:
        return RankedTrial(outcome, None, (outcome.problem or "not measured",), -math.inf)
    limit_ms = math.inf if limits.latency_ms is None else limits.latency_ms
    within = [point for point in outcome.points if point.percentiles_ms[99] <= limit_ms and not point.failures]
    broken = []
    if within:
        point = max(within, key=lambda item: _score(item, objective))
        score = _score(point, objective)
    else:
        point = min(outcome.points, key=lambda item: item.percentiles_ms[99])
        # Among those that are all too slow, the least slow goes on.
        score = -point.percentiles_ms[99]
        if point.failures:
            broken.append(f"{sum(point.failures.values())} requests failed")
        if point.percentiles_ms[99] > limit_ms:
            broken.append(f"p99 {point.percentiles_ms[99]:.1f} ms > {limit_ms:g} ms")
    for what, value, limit, unit in (
        ("memory", outcome.memory_mb, limits.memory_mb, " MB"),
        ("power", outcome.power_w, limits.power_w, " W"),
        ("difference", outcome.difference, limits.difference, ""),
    ):
        if value is not None and limit is not None and not value <= limit:
            broken.append(f"{what} {value:.3g}{unit} > {limit:g}{unit}")
    return RankedTrial(outcome, point, tuple(broken), score)


def _score(point: MeasuredPoint, objective: str) -> float:
    return point.throughput if objective == "throughput" else -point.percentiles_ms[99]


@dataclass
class Search:
    """Successive halving: all candidates briefly, the better half twice as long, until few are left.

    `trial(candidate, round)` measures; the default is in every round, so that the last one compares like with like.
    """

    trial: Callable[[ServerCandidate, int], TrialOutcome]
    limits: SearchLimits
    objective: str = "throughput"
    latest: dict[ServerCandidate, RankedTrial] = field(default_factory=dict)
    rounds: int = 0
    in_round: int = 0
    """How many candidates the round that runs has."""

    def run(self, candidates: Sequence[ServerCandidate]) -> RankedTrial | None:
        """Return the best that keeps the limits, None when none does. `latest` fills meanwhile, and stays when a trial
        raises."""
        left = list(candidates)
        while True:
            judged = []
            self.in_round = len(left)
            for candidate in left:
                judged.append(judge(self.trial(candidate, self.rounds), self.limits, self.objective))
                self.latest[candidate] = judged[-1]
            self.rounds += 1
            judged = [item for item in judged if item.point is not None]
            ranked = sorted(judged, key=lambda item: item.rank, reverse=True)
            if len(ranked) <= LEFT_AT_THE_END:
                return self._best(ranked)
            kept = [item.outcome.candidate for item in ranked[: max(-(-len(ranked) // 2), LEFT_AT_THE_END)]]
            default = [item.outcome.candidate for item in ranked if item.outcome.candidate.is_default]
            if default and default[0] not in kept:
                kept[-1] = default[0]
            if len(kept) == len(ranked):
                return self._best(ranked)
            left = kept

    def _best(self, ranked: Sequence[RankedTrial]) -> RankedTrial | None:
        """Return the first; but the default, where it is allowed and nearly as good."""
        if not ranked or not ranked[0].is_allowed:
            return None
        best = ranked[0]
        for item in ranked:
            if item.outcome.candidate.is_default and item.is_allowed:
                gain = best.score / item.score if self.objective == "throughput" else item.score / best.score
                if gain < 1 + GAIN:
                    return item
        return best
