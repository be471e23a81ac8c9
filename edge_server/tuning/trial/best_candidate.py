"""Selection of the best candidate by one measure, among those with close enough answers."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_server.tuning.trial.comparison import CandidateTrial, ComparisonResult

NOISE = 0.03
"""Part of the best figure within which another counts as equal; of equals the first candidate is taken, for it is the
default or nearer to it."""


class Objective(enum.Enum):
    LATENCY = "latency"
    """Median time of one row."""
    THROUGHPUT = "throughput"
    """Rows a second, at the better of one row and the largest batch."""
    MEMORY = "memory"
    """What the process keeps in memory, the interpreter and the runtime included; a GPU's own memory is not in it."""


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """`tolerance`: the largest relative difference; `least_top1`: the least share of rows with the same best class."""

    objective: Objective
    tolerance: float
    least_top1: float = 0.0


def rejection(trial: CandidateTrial, terms: SelectionRule) -> str:
    """Return why a measured candidate is not to be taken, "" when it may be."""
    apart = trial.difference
    if apart is None:
        return "it gave no answers"
    if not apart.relative <= terms.tolerance:
        return "beyond tolerance"
    if apart.top1 is not None and apart.top1 < terms.least_top1:
        return "too few best classes agree"
    return ""


def choose(outcome: ComparisonResult, terms: SelectionRule) -> CandidateTrial | None:
    """Return the candidate to serve with; None when none is left."""
    left = [trial for trial in outcome.trials if trial.is_measured and not rejection(trial, terms)]
    if not left:
        return None
    cost: Callable[[CandidateTrial], float] = {
        Objective.LATENCY: lambda trial: statistics.median(trial.times_ms[1]),
        Objective.THROUGHPUT: lambda trial: 1.0 / max(rows_per_s(trial, rows) for rows in trial.times_ms),
        Objective.MEMORY: lambda trial: float(trial.memory_bytes),
    }[terms.objective]
    limit = min(map(cost, left)) * (1.0 + NOISE)
    return next(trial for trial in left if cost(trial) <= limit)


def rows_per_s(trial: CandidateTrial, rows: int) -> float:
    """Return how many rows a second it answered in batches of that many."""
    times = trial.times_ms[rows]
    return rows * len(times) / max(sum(times) / 1000, 1e-9)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least that share of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
