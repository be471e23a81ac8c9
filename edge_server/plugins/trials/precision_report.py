"""Report of a model's trials in other precisions than its usual one: speed, agreement on pictures, and how to turn one
on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from edge_server.plugins.trials.candidate import RuntimeCandidate
from edge_server.plugins.trials.comparison import CandidateTrial
from edge_server.repository.choice.runtime_times import MIN_RATIO


class PrecisionReport(NamedTuple):
    """How other precisions do beside the usual one.

    `lines` has a sentence for each. `advice` says how to turn on the fastest of those that agree and are faster by
    `MIN_RATIO`, or is "". `note` is one line for `status` and the page.
    """

    lines: Sequence[str]
    advice: str
    note: str


def report_precisions(
    trials: Sequence[CandidateTrial], reference: CandidateTrial, stated_backend: str, usual_ms: float = math.inf
) -> PrecisionReport:
    """Report the trials of other precisions than that of `reference`, which have compared pictures.

    `stated_backend` is that of the configuration, or "". `usual_ms` is the shortest time of other trials in the usual
    precision.
    """
    usual = str(reference.facts.get("precision", ""))
    equal = [trial for trial in trials if trial.is_measured and trial.facts.get("precision") == usual]
    usual_ms = min(usual_ms, *map(_shortest_ms, equal))
    lines: list[str] = []
    compared: list[tuple[float, str]] = []
    best: CandidateTrial | None = None
    for trial in trials:
        candidate, agreement = trial.candidate, trial.agreement
        if trial.reason and candidate.precision not in ("", usual) and not candidate.is_engine:
            lines.append(f"{candidate.title}: {trial.reason}")
        if not trial.is_measured or agreement is None:
            continue
        ratio = usual_ms / _shortest_ms(trial)
        problem = f" ({agreement.problem})" if agreement.problem else ""
        speed = f"{ratio:.1f} times as fast as {usual}" if ratio >= MIN_RATIO else f"not 20 % faster than {usual}"
        text = f"{speed} ({_shortest_ms(trial):.3g} and {usual_ms:.3g} ms): {agreement.text}{problem}"
        lines.append(f"{candidate.title}: {text}")
        compared.append((ratio, f"{candidate.title} is {text}"))
        agrees = not agreement.problem and ratio >= MIN_RATIO
        if agrees and (best is None or _shortest_ms(trial) < _shortest_ms(best)):
            best = trial
    faster = [text for ratio, text in compared if ratio >= MIN_RATIO] or [text for _, text in sorted(compared)[-1:]]
    note = "; ".join(faster) or f"there is only {usual} here"
    advice = "" if best is None else _advise(best.candidate, stated_backend)
    return PrecisionReport(lines, advice, f"precision: {note}, measured {time.strftime('%Y-%m-%d')}")


def _advise(candidate: RuntimeCandidate, stated_backend: str) -> str:
    is_other = stated_backend not in ("", candidate.runtime)
    needs = f', with backend: "{candidate.runtime}" in place of the one there' if is_other else ""
    line = f'parameters {{ key: "precision" value {{ string_value: "{candidate.precision}" }} }}'
    return f"This line in config.pbtxt turns {candidate.precision} on{needs}:\n  {line}"


def _shortest_ms(trial: CandidateTrial) -> float:
    # The shortest, because other programs only add to it.
    return min(trial.times_ms[1])
