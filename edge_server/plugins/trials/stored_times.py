"""Measured times of runtimes that are stored, so that a server chooses the runtime of the model by them from its next
load on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_server.backends import ONNX_ORDER
from edge_server.backends.cuda import cuda_driver
from edge_server.plugins.trials.candidate_process import CandidateFailed, CandidateProcess, ChildLimits
from edge_server.plugins.trials.comparison import CandidateTrial
from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialRequest, make_plan
from edge_server.repository.backend_choice import GGUF_ORDER
from edge_server.repository.runtime_times import RuntimeTimes, runtime_version

_RUNS = 30
_MAX_RUN_S = 2.0
"""Limits of the measurement of one runtime."""
_LOWEST_PRIORITY = 19


def needs_measurement() -> bool:
    """Whether times choose between runtimes here: both are installed, and no NVIDIA GPU offers further ways."""
    return all(map(runtime_version, ONNX_ORDER)) and bool(cuda_driver.unavailable_reason())


def natural_trials(trials: Sequence[CandidateTrial]) -> dict[str, CandidateTrial]:
    """Return backend -> the trial that runs the file as the server does without a configuration."""
    found: dict[str, CandidateTrial] = {}
    for trial in trials:
        if trial.candidate.is_natural:
            found.setdefault(trial.candidate.runtime, trial)
    return found


def store_times(state_dir: str, file: Path, times_ms: Mapping[str, float | None], texts_at_once: int = 0) -> bool:
    """Store the shortest time of one inference with each backend, None for one that cannot run the file; of a GGUF file
    that of `texts_at_once` texts together.

    The shortest, because other programs only add to it. Returns whether it was stored: not without a state folder, or
    without a time of each runtime that reads such files. Of an ONNX file also not if `needs_measurement` is false.
    """
    if texts_at_once:
        if not state_dir or set(times_ms) != set(GGUF_ORDER) or not all(map(runtime_version, GGUF_ORDER)):
            return False
        return RuntimeTimes(Path(state_dir)).put(file, times_ms, texts_at_once)
    times = {name: times_ms[name] for name in ONNX_ORDER if name in times_ms}
    if not state_dir or file.suffix != ".onnx" or len(times) < len(ONNX_ORDER) or not needs_measurement():
        return False
    return RuntimeTimes(Path(state_dir)).put(file, times)


def measure_in_background(
    request: TrialRequest, environment: TrialEnvironment, limits: ChildLimits, check: Callable[[], None]
) -> dict[str, float | None]:
    """Return backend -> the shortest milliseconds of an inference with made-up inputs, None if it cannot run the file.

    The runtimes run one after the other, each in a process of the lowest priority. Returns {} for a model of free
    dimensions, whose usual sizes are unknown. `check` is called 20 times a second; its exceptions end the measurement.
    Raises EdgeServerError for a model that cannot be tried.
    """
    times: dict[str, float | None] = {}
    samples = str(environment.scratch / "samples.npz")
    for name, trial in natural_trials(make_plan(request, environment).trials).items():
        try:
            child = CandidateProcess(limits, check=check)
        except CandidateFailed:
            return {}  # the system has no process to give
        try:
            # It waits for its job, so that all threads of the runtime start with this priority.
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
            child.open(trial.job, lambda text, percent: None)
            if child.execute("make_samples", to=samples, input="", count=1)["open"]:
                return {}
            child.execute("load_samples", **{"from": samples})
            measured = child.execute("measure", rows=1, runs=_RUNS, first=0, seconds=_MAX_RUN_S)
            times[name] = min(map(float, measured["times_ms"]))
        except CandidateFailed:
            times[name] = None
        finally:
            child.kill()
    return times
