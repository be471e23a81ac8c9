"""Search of `edge-server analyze` for a model's best configuration: measures all briefly, then the better half for
longer, and so on, within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_server.plugins.tuning.load.measurement_results import MeasuredPoint
from edge_server.plugins.tuning.load.model_config_candidates import ServerCandidate

FINALIST_COUNT = 3
"""Candidates in the last round."""

MIN_GAIN = 0.05
"""Relative gain that a candidate must have over the present configuration. A smaller gain may be noise."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits that a configuration must keep; None means no limit.

    `difference` is the largest difference of the outputs, relative to the largest value of each output.
    """

    latency_ms: float | None = None
    memory_mb: float | None = None
    power_w: float | None = None
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Result of a trial. `problem` is the reason if there are no points.

    `difference` is None if no outputs were compared.
    """

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
    """A trial with its score. `point` is the best point within the latency limit, or else the one with the lowest p99.

    `violations` lists the exceeded limits.
    """

    outcome: TrialOutcome
    point: MeasuredPoint | None
    violations: tuple[str, ...]
    score: float
    """Higher is better; minus infinity without measurements."""

    @property
    def is_allowed(self) -> bool:
        return not self.violations and self.point is not None

    @property
    def rank(self) -> tuple[bool, float]:
        return self.is_allowed, self.score


def rank_trial(outcome: TrialOutcome, limits: SearchLimits, objective: str) -> RankedTrial:
    """Check a trial against the limits and score it.

    `objective` is "throughput" (most inferences per second) or "latency" (lowest p99).
    """
    if not outcome.points:
        return RankedTrial(outcome, None, (outcome.problem or "not measured",), -math.inf)
    limit_ms = math.inf if limits.latency_ms is None else limits.latency_ms
    within = [point for point in outcome.points if point.percentiles_ms[99] <= limit_ms and not point.failures]
    violations = []
    if within:
        point = max(within, key=lambda item: _score(item, objective))
        score = _score(point, objective)
    else:
        point = min(outcome.points, key=lambda item: item.percentiles_ms[99])
        # If all points exceed the limit, the fastest one ranks first.
        score = -point.percentiles_ms[99]
        if point.failures:
            violations.append(f"{sum(point.failures.values())} requests failed")
        if point.percentiles_ms[99] > limit_ms:
            violations.append(f"p99 {point.percentiles_ms[99]:.1f} ms > {limit_ms:g} ms")
    for what, value, limit, unit in (
        ("memory", outcome.memory_mb, limits.memory_mb, " MB"),
        ("power", outcome.power_w, limits.power_w, " W"),
        ("difference", outcome.difference, limits.difference, ""),
    ):
        if value is not None and limit is not None and not value <= limit:
            violations.append(f"{what} {value:.3g}{unit} > {limit:g}{unit}")
    return RankedTrial(outcome, point, tuple(violations), score)


def _score(point: MeasuredPoint, objective: str) -> float:
    return point.throughput if objective == "throughput" else -point.percentiles_ms[99]


@dataclass
class Search:
    """Successive halving: measures all candidates briefly, then the better half for twice the time, until few are left.

    `trial(candidate, round)` measures a candidate. The default configuration stays in every round, because the last
    round must compare measurements of the same length.
    """

    trial: Callable[[ServerCandidate, int], TrialOutcome]
    limits: SearchLimits
    objective: str = "throughput"
    latest: dict[ServerCandidate, RankedTrial] = field(default_factory=dict)
    rounds: int = 0
    candidates_in_round: int = 0
    """Number of candidates in the current round."""

    def run(self, candidates: Sequence[ServerCandidate]) -> RankedTrial | None:
        """Return the best trial that keeps the limits, or None.

        Updates `latest` after each trial. If a trial raises, `latest` keeps the earlier results.
        """
        left = list(candidates)
        while True:
            trials = []
            self.candidates_in_round = len(left)
            for candidate in left:
                trials.append(rank_trial(self.trial(candidate, self.rounds), self.limits, self.objective))
                self.latest[candidate] = trials[-1]
            self.rounds += 1
            measured = [item for item in trials if item.point is not None]
            ranked = sorted(measured, key=lambda item: item.rank, reverse=True)
            if len(ranked) <= FINALIST_COUNT:
                return self._best(ranked)
            kept = [item.outcome.candidate for item in ranked[: max(-(-len(ranked) // 2), FINALIST_COUNT)]]
            default = [item.outcome.candidate for item in ranked if item.outcome.candidate.is_default]
            if default and default[0] not in kept:
                kept[-1] = default[0]
            if len(kept) == len(ranked):
                return self._best(ranked)
            left = kept

    def _best(self, ranked: Sequence[RankedTrial]) -> RankedTrial | None:
        """Return the first trial, or the default configuration if it keeps the limits and is nearly as good."""
        if not ranked or not ranked[0].is_allowed:
            return None
        best = ranked[0]
        for item in ranked:
            if item.outcome.candidate.is_default and item.is_allowed:
                gain = best.score / item.score if self.objective == "throughput" else item.score / best.score
                if gain < 1 + MIN_GAIN:
                    return item
        return best
