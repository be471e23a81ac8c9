"""Measured times of runtimes, and whether they answer alike, which are stored, so that a server chooses the runtime of
the model by them from its next load on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_server.backends import ONNX_ORDER, onnx_file_info
from edge_server.backends.cuda import cuda_driver
from edge_server.plugins.trials.candidate_process import ChildLimits
from edge_server.plugins.trials.comparison import CandidateTrial, natural_trials
from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialRequest, make_plan
from edge_server.repository.choice.model_formats import format_of
from edge_server.repository.choice.runtime_times import RuntimeTimes, runtime_version

_RUNS = 30
_MAX_RUN_S = 2.0
"""Limits of the measurement of one runtime."""


_OPERATORS = {
    b"Attention": "it computes windows and completely masked rows differently",
    b"BitShift": "it shifts in another width",
    b"TopK": "it orders equal values differently",
    b"Tile": "with repeats that an input gives, its answer is memory that nothing was written to",
}
"""Operator -> what OpenVINO does otherwise than https://onnx.ai/onnx/operators/ says, where a comparison of a few
answers can miss it. All were seen with OpenVINO 2026.4 on a CPU, beside ONNX Runtime and the values of the package
`onnx`. Types that it computes in fewer bits are in `model_reader.wide_tensors`."""


def needs_measurement() -> bool:
    """Whether times choose between runtimes here: both are installed, and no NVIDIA GPU offers further ways."""
    return all(map(runtime_version, ONNX_ORDER)) and bool(cuda_driver.unavailable_reason())


def store_texts(store: RuntimeTimes, file: Path, times_ms: Mapping[str, float | None], texts_at_once: int) -> bool:
    """As `store_times` for a GGUF file: the shortest times of `texts_at_once` texts together."""
    found = format_of(file.name)
    if found is None or set(times_ms) != set(found.backends) or not all(map(runtime_version, found.backends)):
        return False
    return store.put(file, times_ms, texts_at_once)


def store_times(store: RuntimeTimes, file: Path, times_ms: Mapping[str, float | None], disagreement: str) -> bool:
    """Store the shortest time of one inference with each backend, None for one that cannot run the file, and whether
    they answer alike.

    The shortest, because other programs only add to it. `disagreement` is that of `find_disagreement`. Returns whether
    it was stored: not without a time of each runtime that reads ONNX files, and not if `needs_measurement` is false.
    """
    times = {name: times_ms[name] for name in ONNX_ORDER if name in times_ms}
    if file.suffix != ".onnx" or len(times) < len(ONNX_ORDER) or not needs_measurement():
        return False
    return store.put(file, times, disagreement=disagreement)


def shortest_times(trials: Mapping[str, CandidateTrial]) -> dict[str, float | None]:
    """Return the shortest time of each trial in milliseconds, None for one that failed."""
    return {name: min(trial.times_ms[1]) if trial.is_measured else None for name, trial in trials.items()}


def find_disagreement(file: Path, trials: Mapping[str, CandidateTrial]) -> str:
    """Return how OpenVINO's answers for an ONNX file differ from those of ONNX Runtime, "" if they agree, or if there
    is no trial of one of them."""
    if not trials.keys() >= set(ONNX_ORDER):
        return ""
    with contextlib.suppress(OSError, ValueError):  # the trials report it
        for operator, reason in _OPERATORS.items():
            if onnx_file_info.has_operator(file, frozenset((operator,))):
                return f"operator {operator.decode()}: {reason}"
    expected, found = trials["onnxruntime"].edge_answers, trials["openvino"].edge_answers
    if expected is None or found is None:
        return "no answers could be compared"
    return found.difference_to(expected)


def measure_in_background(
    request: TrialRequest, environment: TrialEnvironment, limits: ChildLimits, check: Callable[[], None]
) -> dict[str, CandidateTrial]:
    """Return backend -> the trial of a model with generated inputs.

    The runtimes run one after the other, each in a process of the lowest priority. Returns {} for a model of free
    dimensions, whose usual sizes are unknown. `check` is called 20 times a second; its exceptions end the measurement.
    Raises EdgeServerError for a model that cannot be tried.
    """
    trials = natural_trials(make_plan(request, environment).trials)
    samples = environment.scratch / "samples.npz"
    for trial in trials.values():
        try:
            trial.start(limits, check=check)
            made = trial.execute("make_samples", to=str(samples), input="", count=1)
            if made is not None and made["open"]:
                return {}
            trial.execute("load_samples", **{"from": str(samples)})
            trial.measure(rows=1, runs=_RUNS, first=0, seconds=_MAX_RUN_S)
            trial.answer_edge_samples(environment.scratch / "edges.npz", environment.scratch / "edge_answers.npz")
        finally:
            trial.kill()
    return trials
