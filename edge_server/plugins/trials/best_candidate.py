"""Selection of the best way to run a model (fastest, or by another objective) among those whose outputs are close
enough to the reference."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_server.plugins.trials.comparison import CandidateTrial, ComparisonResult

NOISE = 0.03
"""Relative difference within which two candidates count as equal. The first of equal candidates wins, because it is
closer to the default configuration."""


class Objective(enum.Enum):
    LATENCY = "latency"
    """Median time of one row."""
    THROUGHPUT = "throughput"
    """Rows per second, with one row or the largest batch, whichever is better."""
    MEMORY = "memory"
    """Host memory of the process, including the interpreter and the runtime, but not GPU memory."""


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Objective and limits. `tolerance` is the largest allowed relative difference of the outputs; of another precision
    that was compared on pictures, those of `picture_agreement` hold instead.

    `min_top1` is the smallest allowed fraction of rows with the same best class as the reference.
    """

    objective: Objective
    tolerance: float
    min_top1: float = 0.0


def rejection(trial: CandidateTrial, rule: SelectionRule) -> str:
    """Return the reason why a measured candidate must not be chosen, or ""."""
    difference = trial.difference
    if difference is None:
        return "it gave no outputs"
    if trial.agreement is not None and math.isfinite(difference.relative):
        if trial.agreement.problem:
            return trial.agreement.problem
    elif not difference.relative <= rule.tolerance:
        return "beyond tolerance"
    if difference.top1 is not None and difference.top1 < rule.min_top1:
        return "too few best classes agree"
    return ""


def choose(outcome: ComparisonResult, rule: SelectionRule) -> CandidateTrial | None:
    """Return the best candidate within the limits, or None."""
    left = [trial for trial in outcome.trials if trial.is_measured and not rejection(trial, rule)]
    if not left:
        return None
    cost: Callable[[CandidateTrial], float] = {
        Objective.LATENCY: lambda trial: statistics.median(trial.times_ms[1]),
        Objective.THROUGHPUT: lambda trial: 1.0 / max(rows_per_s(trial, rows) for rows in trial.times_ms),
        Objective.MEMORY: lambda trial: float(trial.memory_bytes),
    }[rule.objective]
    limit = min(map(cost, left)) * (1.0 + NOISE)
    return next(trial for trial in left if cost(trial) <= limit)


def rows_per_s(trial: CandidateTrial, rows: int) -> float:
    """Return the rows per second of a candidate with batches of `rows`."""
    times = trial.times_ms[rows]
    return rows * len(times) / max(sum(times) / 1000, 1e-9)


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank percentile; `fraction` is between 0 and 1."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
