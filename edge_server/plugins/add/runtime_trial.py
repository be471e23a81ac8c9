"""Trial of a new model: runs it with each installed runtime, each in a process of its own, for outputs and times.

The processes are those of `edge-server optimize`, which also tries other devices.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.backends import ONNX_ORDER
from edge_server.backends.isolation.npz_tensor_files import Tensors, load_tensors, save_tensors
from edge_server.errors import BackendMissing, InvalidRequest, LoadError, OutOfMemory, Unsupported
from edge_server.plugins.trials.candidate_process import ChildLimits
from edge_server.plugins.trials.comparison import CandidateTrial, natural_trials
from edge_server.plugins.trials.precision_report import PrecisionReport, report_precisions
from edge_server.plugins.trials.stored_times import find_disagreement
from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialRequest, make_plan

RUNS = 30
MAX_SECONDS = 2.0
"""Limits of the measurement of one runtime: runs, and seconds."""
_LIMITS = ChildLimits(answer_s=120.0, open_s=120.0, floor_bytes=128 << 20)
_LANGUAGE_MODEL_LIMITS = dataclasses.replace(_LIMITS, open_s=300.0)


class RuntimeTrial(NamedTuple):
    """Result of one runtime. `times_ms` are empty if it failed, for the `reason`, or was only opened.

    `outputs` are those for the samples, empty for samples that were generated. The first one that works has them all.
    `disagreement`: how its answers differ from those of ONNX Runtime, or "".
    """

    backend: str
    runtime: str
    device: str
    precision: str
    load_ms: float
    times_ms: Sequence[float]
    outputs: Sequence[Tensors]
    reason: str
    disagreement: str = ""

    @property
    def title(self) -> str:
        """Name and version of the runtime. Of a backend that runs another library also its own name."""
        is_own = not self.runtime or self.runtime.startswith(self.backend)
        return self.runtime if is_own else f"{self.backend} ({self.runtime})"

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


def try_runtimes(
    root: Path,
    name: str,
    first: str,
    samples: Sequence[Tensors],
    settings: Mapping[str, Mapping[str, str]],
    scratch: Path,
) -> list[RuntimeTrial]:
    """Run the model `name` of the repository `root` with each installed runtime, the backend `first` first.

    Without `samples` they are generated. `settings` are the server's for each backend. Omitted are runtimes that are
    not installed, that build an engine first, or that take requests and not batches. Raises LoadError if none opens it,
    and InvalidRequest for a model that chooses its runtime itself.
    """
    environment = TrialEnvironment(settings, scratch, lambda runtime: {})
    plan = make_plan(TrialRequest(root, name), environment)
    chosen = natural_trials(plan.trials)
    path = scratch / "samples.npz"
    ordered = sorted(chosen.values(), key=lambda trial: trial.candidate.runtime != first)
    found: list[RuntimeTrial] = []
    for number, trial in enumerate(ordered):
        if samples:  # the outputs of one runtime are enough
            save_tensors(path, samples[:1] if any(item.outputs for item in found) else samples)
        try:
            tried = _run(trial, path, scratch / f"outputs-{number}.npz", has_samples=bool(samples))
            if set(chosen) >= set(ONNX_ORDER):
                trial.answer_edge_samples(scratch / "edges.npz", scratch / "edge_answers.npz")
        finally:
            trial.kill()
        if trial.kind not in (BackendMissing.__name__, Unsupported.__name__):
            found.append(tried)
    file = plan.model_dir / str(plan.version) / plan.file_name
    if disagreement := find_disagreement(file, chosen):
        found = [item._replace(disagreement=disagreement if item.backend == "openvino" else "") for item in found]
    if found and not any(item.load_ms for item in found):
        reasons = "".join(f"\n  {item.backend}: {item.reason}" for item in found)
        raise LoadError(f"no runtime opens it:{reasons}")
    return found


def try_precisions(
    root: Path,
    name: str,
    tried: Sequence[RuntimeTrial],
    pictures: Sequence[Path],
    settings: Mapping[str, Mapping[str, str]],
    scratch: Path,
) -> PrecisionReport | None:
    """Run a model that takes pictures in each precision that its runtimes have on the processor, one after the other.

    `tried` are those of `try_runtimes`. Returns None if there is only one precision, or none works. Raises
    InvalidRequest for a picture that cannot be read.
    """
    environment = TrialEnvironment(settings, scratch, lambda runtime: {})
    plan = make_plan(TrialRequest(root, name), environment)
    usual = plan.trials[0].candidate.precision
    others = [trial for trial in plan.trials if trial.candidate.precision != usual and not trial.candidate.is_engine]
    trials = (plan.trials[0], *others) if others else ()
    samples = scratch / "precision_samples.npz"
    reference: CandidateTrial | None = None
    expected: Sequence[Tensors] = ()
    try:
        for number, trial in enumerate(trials):
            # One process for all: most of a process's time is the import of its runtime.
            if number:
                trial.start_in_place_of(trials[number - 1], _LIMITS)
            else:
                trial.start(_LIMITS)
            trial.execute("make_samples", to=str(samples), input="", count=1)
            trial.execute("load_samples", **{"from": str(samples)})
            trial.measure(rows=1, runs=RUNS, first=0, seconds=MAX_SECONDS)
            found = trial.answer_pictures(pictures, scratch / "picture_answers.npz")
            if trial.kind == InvalidRequest.__name__:
                raise InvalidRequest(trial.reason)
            if reference is not None:
                trial.compare_pictures(reference, expected, found)
            elif found:
                reference, expected = trial, found
            else:
                break
    finally:
        for trial in trials:
            trial.kill()
    if reference is None:
        return None
    in_force = reference.facts["precision"]
    equal = (min(item.times_ms) for item in tried if item.times_ms and item.precision == in_force)
    return report_precisions((reference, *others), reference, plan.stated_backend, min(equal, default=math.inf))


def try_opening(root: Path, name: str, settings: Mapping[str, Mapping[str, str]], scratch: Path) -> RuntimeTrial:
    """Open the language model `name` of the repository `root`, and close it. The result has no times, and a reason if
    this machine has too little memory for it.

    Raises LoadError if it cannot be opened, and InvalidRequest for a model that chooses its runtime itself.
    """
    environment = TrialEnvironment(settings, scratch, lambda runtime: {})
    trial = make_plan(TrialRequest(root, name, is_opened_only=True), environment).trials[0]
    try:
        trial.start(_LANGUAGE_MODEL_LIMITS, lambda text, percent: None)
    finally:
        trial.kill()
    if trial.reason and trial.kind != OutOfMemory.__name__:
        raise LoadError(trial.reason)
    return _result(trial, (), ())


def _run(trial: CandidateTrial, samples: Path, outputs: Path, *, has_samples: bool) -> RuntimeTrial:
    trial.start(_LIMITS, lambda text, percent: None)
    if not has_samples:
        trial.execute("make_samples", to=str(samples), input="", count=1)
    trial.execute("load_samples", **{"from": str(samples)})
    trial.execute("run_samples", to=str(outputs))
    trial.measure(rows=1, runs=RUNS, first=0, seconds=MAX_SECONDS)
    return _result(trial, trial.times_ms.get(1, ()), load_tensors(outputs) if has_samples and outputs.exists() else ())


def _result(trial: CandidateTrial, times_ms: Sequence[float], outputs: Sequence[Tensors]) -> RuntimeTrial:
    facts = trial.facts
    return RuntimeTrial(
        trial.candidate.runtime,
        str(facts.get("runtime", trial.candidate.runtime)),
        str(facts.get("device", "")),
        str(facts.get("precision", "")),
        float(facts.get("load_ms", 0.0)),
        times_ms,
        outputs,
        trial.reason,
    )
