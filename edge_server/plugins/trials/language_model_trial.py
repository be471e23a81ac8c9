"""Trial of the engines of a language model: each opens the model alone, and generates as many texts at once as the
model is configured for. Only times are compared: engines round differently, so their texts differ."""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import Array, RequestSession
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, EdgeServerError
from edge_server.plugins.trials.best_candidate import NOISE
from edge_server.plugins.trials.candidate_process import ChildLimits
from edge_server.plugins.trials.comparison import CandidateTrial, Report

TEXT_TOKENS = 64
ROUNDS = 3
_PROMPT = "Tell me about the history of bridges, from wood and stone to steel, and name the people. " * 5
"""About 100 tokens."""

TITLES = ("RUNTIME", "LOAD MS", "TEXTS MS", "TOKENS/S", "MEMORY MB", "")


class _TextExecution:
    """One request for a text, see backends.base.Execution. `ended` is set at its end; then `error` says whether it
    failed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = threading.Event()
        self.error: EdgeServerError | None = None

    def is_cancelled(self) -> bool:
        return False

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        if is_final:
            self.ended.set()

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        self.error = error
        self.ended.set()

    def finish(self) -> None:
        self.ended.set()

    def reschedule(self) -> None:
        self.fail(BackendError("the model rescheduled a text"))


def generate_texts(session: RequestSession, spec: ModelSpec, count: int) -> list[float]:
    """Return the milliseconds of each round of `count` texts at once, after a round that does not count. In the child.

    Raises the first error of a request.
    """
    times_ms = []
    for number in range(ROUNDS + 1):
        # Each prompt begins differently, so that none is in a cache of prefixes.
        executions = [_TextExecution(_request(spec, f"{number}.{index}: {_PROMPT}")) for index in range(count)]
        began_s = time.perf_counter()
        session.execute(executions)
        for execution in executions:
            execution.ended.wait()
            if execution.error is not None:
                raise execution.error
        times_ms.append((time.perf_counter() - began_s) * 1000)
    return times_ms[1:]


def peak_bytes(session: IsolatedSession) -> int:
    """Return the most memory that the model's process has had, 0 if it is unknown. In the child."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+)", Path(f"/proc/{session.pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def _request(spec: ModelSpec, prompt: str) -> Request:
    sampling = json.dumps({"max_tokens": TEXT_TOKENS, "ignore_eos": True, "temperature": 0})
    texts = {"text_input": prompt, "sampling_parameters": sampling}
    inputs = {name: Tensor(name, DType.BYTES, np.array([text.encode()], object)) for name, text in texts.items()}
    return Request(spec.name, inputs, id="optimize")


def compare_texts(trials: Sequence[CandidateTrial], limits: ChildLimits, report: Report) -> CandidateTrial | None:
    """Run the trials one after another, so that never two engines are in memory. Return the fastest, the first one if
    both are within noise, or None if all fail."""
    for number, trial in enumerate(trials):
        report(number / len(trials), f"{trial.candidate.title}: opening, and generating texts")
        try:
            trial.start(limits, lambda text, percent: None)
        finally:
            trial.kill()
        if trial.facts:
            trial.times_ms[1] = [float(item) for item in trial.facts["times_ms"]]
            trial.memory_bytes = int(trial.facts["memory_bytes"])
    report(1.0, "done")
    measured = [trial for trial in trials if trial.is_measured]
    if not measured:
        return None
    best_ms = min(map(_median_ms, measured))
    return next(trial for trial in measured if _median_ms(trial) <= best_ms * (1 + NOISE))


def rows(trials: Sequence[CandidateTrial], chosen: CandidateTrial | None, count: int) -> list[tuple[str, ...]]:
    """Return a row of the table for each engine, with columns `TITLES`."""
    return [
        (
            trial.candidate.runtime,
            f"{trial.facts['load_ms']:.0f}",
            f"{_median_ms(trial):.0f}",
            f"{_tokens_per_s(trial, count):.1f}",
            f"{trial.memory_bytes / 1e6:.0f}",
            "chosen" if trial is chosen else "",
        )
        if trial.is_measured
        else (trial.candidate.runtime, "-", "-", "-", "-", "failed")
        for trial in trials
    ]


def as_json(trials: Sequence[CandidateTrial], chosen: CandidateTrial | None, count: int) -> dict[str, Any]:
    return {
        "texts_at_once": count,
        "tokens_of_a_text": TEXT_TOKENS,
        "chosen": None if chosen is None else chosen.candidate.title,
        "candidates": [
            {
                "runtime": trial.candidate.runtime,
                "runtime_version": trial.facts.get("runtime"),
                "reason": trial.reason,
                "load_ms": trial.facts.get("load_ms"),
                "texts_ms": trial.times_ms.get(1),
                "tokens_per_s": _tokens_per_s(trial, count) if trial.is_measured else None,
                "memory_bytes": trial.memory_bytes or None,
            }
            for trial in trials
        ],
    }


def _median_ms(trial: CandidateTrial) -> float:
    return statistics.median(trial.times_ms[1])


def _tokens_per_s(trial: CandidateTrial, count: int) -> float:
    return TEXT_TOKENS * count * 1000 / _median_ms(trial)
