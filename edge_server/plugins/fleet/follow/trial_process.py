"""Process of one trial: reads a job of `trial.py`, and writes the verdict. `reason` "" accepts the release."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import edge_server
from edge_server.backends.isolation.json_child_side import exit_at_once, start_child, write_message
from edge_server.core.output_difference import compare_arrays
from edge_server.core.status_reports import find_failed
from edge_server.errors import EdgeServerError

_EXPECTED = "expected."
_WARM_RUNS = 3
_RUNS = 20
"""Measured runs of each version, in turns, unless they take longer than _MEASURE_S together."""
_MEASURE_S = 30.0

Arrays = Mapping[str, Any]


class _MachineFault(EdgeServerError):
    """This machine cannot load the release now, which says nothing against the release."""


def main() -> int:
    out, job = start_child()
    try:
        reason, note = _try(job)
        verdict = {"reason": reason, "note": note}
    except _MachineFault as error:
        verdict = {"machine_fault": error.message}
    except EdgeServerError as error:
        verdict = {"reason": error.message}
    write_message(out, verdict)
    return exit_at_once()


def _try(job: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason against the release, or "" and a note. Raises EdgeServerError for a model that fails, and
    _MachineFault."""
    model = job["model"]
    with ExitStack() as servers:
        new = servers.enter_context(_server(job["repository"], model))
        if failed := [entry for entry in find_failed(new.models()) if entry.name == model]:
            reason = f"it cannot be loaded: {failed[0].reason}"
            if failed[0].is_machines_fault:
                raise _MachineFault(reason)
            return reason, ""
        if not any(entry.name == model and entry.state == "READY" for entry in new.models()):
            return "it cannot be loaded: no version of it is ready", ""
        if not job["sample"]:
            return "", "it loads"
        inputs, expected = _read_sample(Path(job["sample"]))
        outputs = new.infer(model, inputs).outputs
        old = None
        if job["serving"] and (job["max_slowdown"] is not None or (job["tolerance"] is not None and not expected)):
            old = servers.enter_context(_server(job["serving"], model))
            if not any(entry.name == model and entry.state == "READY" for entry in old.models()):
                old = None
        if job["tolerance"] is not None:
            reference = expected or (old.infer(model, inputs).outputs if old is not None else {})
            whose = "the expected ones" if expected else "those of the version that serves"
            if reason := describe_difference(reference, outputs, job["tolerance"], whose):
                return reason, ""
        return _check_time(job, new, old, inputs)


def _server(repository: str, model: str) -> edge_server.Server:
    # The repository of a trial consists of links to models that are elsewhere.
    return edge_server.Server(
        repository,
        model_control_mode="explicit",
        load_model=[model],
        allow_external_links=True,
        governor=False,
        exit_on_error=False,
    )


def _read_sample(path: Path) -> tuple[Arrays, Arrays]:
    """Return inputs and expected outputs by name. A file that is damaged raises ValueError, and so rejects."""
    with np.load(path) as arrays:
        names = arrays.files
        inputs = {name: arrays[name] for name in names if not name.startswith(_EXPECTED)}
        expected = {name.removeprefix(_EXPECTED): arrays[name] for name in names if name.startswith(_EXPECTED)}
    return inputs, expected


def describe_difference(reference: Arrays, outputs: Arrays, tolerance: float, whose: str) -> str:
    """Return why outputs differ too much, "" if they do not."""
    for name, expected in reference.items():
        if name not in outputs:
            return f"it has no output '{name}'"
        found = outputs[name]
        if found.shape != expected.shape:
            return f"output '{name}' has the shape {list(found.shape)}, expected {list(expected.shape)}"
        is_number = all(one.dtype.kind in "fiub" for one in (expected, found))
        # The types may differ: NumPy makes doubles and long integers of numbers in a program.
        common = np.float64 if is_number else object
        difference = compare_arrays(expected.astype(common), found.astype(common)).relative
        if difference == float("inf"):
            return f"output '{name}' is not finite where {whose} is, or the reverse"
        if not is_number and difference > 0:
            return f"output '{name}' differs from {whose}"
        if difference > tolerance:
            much = f"{difference:.3g} of its largest value, more than {tolerance:g}"
            return f"output '{name}' differs from {whose} by {much}"
    return ""


def _check_time(
    job: Mapping[str, Any], new: edge_server.Server, old: edge_server.Server | None, inputs: Arrays
) -> tuple[str, str]:
    servers = [new] if old is None else [new, old]
    for server in servers:
        for _ in range(_WARM_RUNS):
            server.infer(job["model"], inputs)
    times: list[list[float]] = [[] for _ in servers]
    end_s = time.monotonic() + _MEASURE_S
    while len(times[0]) < _RUNS and (not times[0] or time.monotonic() < end_s):
        for server, taken in zip(servers, times, strict=True):
            begin_s = time.monotonic()
            server.infer(job["model"], inputs)
            taken.append((time.monotonic() - begin_s) * 1000)
    new_ms, *rest = (statistics.median(taken) for taken in times)
    note = f"it loads, and answers the sample in {new_ms:.2f} ms" + (f" beside {rest[0]:.2f} ms" if rest else "")
    limit = job["max_latency_ms"]
    if limit is not None and new_ms > limit:
        return f"it answers the sample in {new_ms:.2f} ms, more than {limit:g} ms", ""
    slowdown = job["max_slowdown"]
    if rest and slowdown is not None and new_ms > rest[0] * slowdown:
        ratio = f"the version that serves in {rest[0]:.2f} ms: more than {slowdown:g} times"
        return f"it answers the sample in {new_ms:.2f} ms, {ratio}", ""
    return "", note


if __name__ == "__main__":
    sys.exit(main())
