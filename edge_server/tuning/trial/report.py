"""Report of a comparison: rows for people and JSON for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from edge_server.tuning.trial.best_candidate import SelectionRule, percentile, rejection, rows_per_s
from edge_server.tuning.trial.comparison import CandidateTrial, ComparisonResult

_HEADS = ("RUNTIME", "ASKED", "IN FORCE", "LOAD MS", "P50 MS", "P99 MS", "1 ROW/S")
_MORE_HEADS = ("MEMORY MB", "MAX ABS", "MAX REL", "TOP-1", "")


def heads(outcome: ComparisonResult) -> tuple[str, ...]:
    return (*_HEADS, *_heads_of_batch(outcome), *_MORE_HEADS)


def _heads_of_batch(outcome: ComparisonResult) -> tuple[str, ...]:
    return (f"ROWS/S OF {outcome.batch}",) if outcome.batch > 1 else ()


def rows(outcome: ComparisonResult, chosen: CandidateTrial | None, terms: SelectionRule) -> list[tuple[str, ...]]:
    """Return a row for each candidate; those that failed say so at its end."""
    return [_row(outcome, trial, chosen, terms) for trial in outcome.trials]


def _row(
    outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, terms: SelectionRule
) -> tuple[str, ...]:
    candidate = trial.candidate
    start = (
        " ".join(filter(None, (candidate.runtime, candidate.where))),
        candidate.precision or "-",
        str(trial.facts.get("precision", "-")),
        f"{trial.facts['load_ms']:.0f}" if trial.facts else "-",
    )
    end = result(outcome, trial, chosen, terms)
    if not trial.is_measured or trial.difference is None:
        return (*start, *["-"] * (len(heads(outcome)) - len(start) - 1), end)
    times, apart = trial.times_ms[1], trial.difference
    batch = (f"{rows_per_s(trial, outcome.batch):.1f}",) if outcome.batch > 1 else ()
    return (
        *start,
        f"{statistics.median(times):.3g}",
        f"{percentile(times, 0.99):.3g}",
        f"{rows_per_s(trial, 1):.1f}",
        *batch,
        f"{trial.memory_bytes / 1e6:.0f}",
        f"{apart.absolute:.2g}",
        f"{apart.relative:.2g}",
        "-" if apart.top1 is None else f"{apart.top1:.0%}",
        end,
    )


def result(
    outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, terms: SelectionRule
) -> str:
    """Return in a few words what becomes of a candidate."""
    if not trial.is_measured:
        return "built, not run" if trial.kind == "BuiltNotRun" else "failed" if trial.facts else "not opened"
    words = ["chosen"] if trial is chosen else []
    words += ["reference"] if trial is outcome.reference else []
    return ", ".join(words) or rejection(trial, terms)


def reasons(trials: Sequence[CandidateTrial]) -> list[str]:
    """Return a line for each candidate that is out, with the reason."""
    return [f"{trial.candidate.title}: {trial.reason}" for trial in trials if trial.reason]


def as_json(outcome: ComparisonResult, chosen: CandidateTrial | None, terms: SelectionRule) -> dict[str, object]:
    """Return everything, in milliseconds and bytes; null for what is not known or not finite."""
    return {
        "objective": terms.objective.value,
        "tolerance": terms.tolerance,
        "samples": {"count": outcome.samples["count"], "source": outcome.samples["words"]},
        "reference": outcome.reference.candidate.title,
        "chosen": None if chosen is None else chosen.candidate.title,
        "candidates": [_as_json(outcome, trial, chosen, terms) for trial in outcome.trials],
    }


def _as_json(
    outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, terms: SelectionRule
) -> dict[str, object]:
    candidate, apart = trial.candidate, trial.difference
    return {
        "title": candidate.title,
        "runtime": candidate.runtime,
        "runtime_version": trial.facts.get("runtime"),
        "device": trial.facts.get("device", candidate.device),
        "precision_asked": candidate.precision,
        "precision": trial.facts.get("precision"),
        "result": result(outcome, trial, chosen, terms),
        "reason": trial.reason,
        "load_ms": trial.facts.get("load_ms"),
        "memory_bytes": trial.memory_bytes or None,
        "latency_ms": [
            {
                "rows": count,
                "runs": len(times),
                "p50": statistics.median(times),
                "p99": percentile(times, 0.99),
                "rows_per_s": rows_per_s(trial, count),
            }
            for count, times in sorted(trial.times_ms.items())
        ],
        "max_absolute_difference": None if apart is None else _finite(apart.absolute),
        "max_relative_difference": None if apart is None else _finite(apart.relative),
        "top1_agreement": None if apart is None else apart.top1,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
