"""Report of a comparison of runtimes, devices and precisions for one model: a table for people, and JSON for
programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from edge_server.plugins.trials.best_candidate import SelectionRule, percentile, rejection, rows_per_s
from edge_server.plugins.trials.comparison import CandidateTrial, ComparisonResult

_FIRST_COLUMNS = ("RUNTIME", "ASKED", "IN FORCE", "LOAD MS", "P50 MS", "P99 MS", "1 ROW/S")
_LAST_COLUMNS = ("MEMORY MB", "MAX ABS", "MAX REL", "TOP-1", "")


def column_titles(outcome: ComparisonResult) -> tuple[str, ...]:
    of_batch = (f"ROWS/S OF {outcome.batch}",) if outcome.batch > 1 else ()
    return (*_FIRST_COLUMNS, *of_batch, *_LAST_COLUMNS)


def row(
    outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, rule: SelectionRule
) -> tuple[str, ...]:
    """Return the table's row of a candidate. The last column is its result."""
    candidate = trial.candidate
    start = (
        " ".join(filter(None, (candidate.runtime, candidate.where))),
        candidate.precision or "-",
        str(trial.facts.get("precision", "-")),
        f"{trial.facts['load_ms']:.0f}" if trial.facts else "-",
    )
    verdict = result(outcome, trial, chosen, rule)
    if not trial.is_measured or trial.difference is None:
        return (*start, *["-"] * (len(column_titles(outcome)) - len(start) - 1), verdict)
    times, difference = trial.times_ms[1], trial.difference
    batch = (f"{rows_per_s(trial, outcome.batch):.1f}",) if outcome.batch > 1 else ()
    return (
        *start,
        f"{statistics.median(times):.3g}",
        f"{percentile(times, 0.99):.3g}",
        f"{rows_per_s(trial, 1):.1f}",
        *batch,
        f"{trial.memory_bytes / 1e6:.0f}",
        f"{difference.absolute:.2g}",
        f"{difference.relative:.2g}",
        "-" if difference.top1 is None else f"{difference.top1:.0%}",
        verdict,
    )


def result(outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, rule: SelectionRule) -> str:
    """Return a candidate's result in a few parts."""
    if not trial.is_measured:
        return "built, not run" if trial.kind == "BuiltNotRun" else "failed" if trial.facts else "not opened"
    parts = ["chosen"] if trial is chosen else []
    parts += ["reference"] if trial is outcome.reference else []
    return ", ".join(parts) or rejection(trial, rule)


def failure_lines(trials: Sequence[CandidateTrial]) -> list[str]:
    """Return a line with the reason for each failed candidate."""
    return [f"{trial.candidate.title}: {trial.reason}" for trial in trials if trial.reason]


def as_json(outcome: ComparisonResult, chosen: CandidateTrial | None, rule: SelectionRule) -> dict[str, object]:
    """Return the full report. Times are in milliseconds; unknown values and values that are not finite are null."""
    return {
        "objective": rule.objective.value,
        "tolerance": rule.tolerance,
        "samples": {"count": outcome.samples["count"], "source": outcome.samples["source"]},
        "reference": outcome.reference.candidate.title,
        "chosen": None if chosen is None else chosen.candidate.title,
        "candidates": [_as_json(outcome, trial, chosen, rule) for trial in outcome.trials],
    }


def _as_json(
    outcome: ComparisonResult, trial: CandidateTrial, chosen: CandidateTrial | None, rule: SelectionRule
) -> dict[str, object]:
    candidate, difference = trial.candidate, trial.difference
    return {
        "title": candidate.title,
        "runtime": candidate.runtime,
        "runtime_version": trial.facts.get("runtime"),
        "device": trial.facts.get("device", candidate.device),
        "precision_asked": candidate.precision,
        "precision": trial.facts.get("precision"),
        "result": result(outcome, trial, chosen, rule),
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
        "max_absolute_difference": None if difference is None else _finite(difference.absolute),
        "max_relative_difference": None if difference is None else _finite(difference.relative),
        "top1_agreement": None if difference is None else difference.top1,
        "pictures": None if trial.agreement is None else trial.agreement._asdict(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
