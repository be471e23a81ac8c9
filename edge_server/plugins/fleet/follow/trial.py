"""Test of a downloaded release before it serves: the release is loaded beside the running server, in a process of its
own, runs its sample, and its outputs and its time are compared with what the release allows."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np

from edge_server.backends.isolation.npz_tensor_files import Tensors, load_tensors
from edge_server.core.output_difference import describe_difference
from edge_server.errors import EdgeServerError, ServingFault
from edge_server.plugins.fleet.release import SAMPLE_NAME, Release
from edge_server.plugins.trials.candidate_process import CandidateFailed, CandidateProcess, ChildLimits

_EXPECTED_PREFIX = "expected."
_TENSORS = ".tensors"
"""Folder of the sample and the answers, beside the models and none itself."""
_MAX_REASON_CHARS = 500
_ROUNDS = 4
_RUNS = 5
"""Measured runs of each version in a round, unless they take longer than their part of _MEASURE_S."""
_MEASURE_S = 30.0
_NICENESS = 10
"""Below what serves, but not the lowest: a trial ends also on a box whose cores are always busy."""


class Rejected(EdgeServerError):
    """The release is not fit for this box. The message is the reason."""


class Trial:
    """Tries releases in `folder`, which it may fill. `stop` ends a trial of another thread."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True

    def run(self, release: Release, staged: Path, repository: Path, *, is_return: bool) -> str:
        """Try the release in `staged`. Return the result as a sentence for the log.

        The other models of `repository` are there for ensembles. `is_return`: the release that serves is newer and was
        withdrawn, so this one is not compared with it. Raises Rejected; ServingFault if this machine cannot try it now,
        as for full memory or a missing runtime; OSError, and InterruptedError after `stop`.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        for entry in repository.iterdir():
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != release.model:
                os.symlink(entry.absolute(), self._folder / entry.name)
        os.symlink(staged.absolute(), self._folder / release.model)
        (self._folder / _TENSORS).mkdir()
        try:
            with ExitStack() as children:
                open_model = partial(_open, release.model, children, self._check())
                return self._try(release, None if is_return else repository, open_model)
        except CandidateFailed as error:
            reason = error.reason[:_MAX_REASON_CHARS]
            raise ServingFault(reason) if error.was_killed else Rejected(reason) from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self) -> Callable[[], None]:
        """Return a function to call while a child process works. It raises when the trial must end."""
        end_s = time.monotonic() + self._timeout_s

        def check() -> None:
            if self._is_stopping:
                raise InterruptedError
            if time.monotonic() > end_s:
                raise Rejected(f"its trial took longer than {self._timeout_s:g} s")

        return check

    def _try(self, release: Release, serving: Path | None, open_model: Callable[[Path], CandidateProcess]) -> str:
        """Return the result as a sentence. `serving`: repository with the version to compare with. Raises as `run`, and
        CandidateFailed."""
        try:
            new = open_model(self._folder)
        except CandidateFailed as error:
            if error.kind == ServingFault.__name__:
                raise ServingFault(error.reason[:_MAX_REASON_CHARS]) from None
            raise
        sample = self._folder / release.model / SAMPLE_NAME
        if not sample.is_file():
            return "it loads"
        tensors = self._folder / _TENSORS
        inputs, expected = str(tensors / "inputs.npz"), tensors / "expected.npz"
        new.execute("make_samples", input=str(sample), to=inputs, expected=str(expected), prefix=_EXPECTED_PREFIX)
        outputs = _answer(new, inputs, tensors)
        reference: Tensors = next(iter(load_tensors(expected)), {})
        whose = "the expected ones"
        children = [new]
        needs_old = release.max_slowdown is not None or (release.tolerance is not None and not reference)
        if needs_old and serving is not None and (serving / release.model).is_dir():
            with suppress(CandidateFailed):  # a version that does not load is no measure
                children.append(open_model(serving))
        if len(children) > 1:
            answer = _answer(children[1], inputs, tensors)
            if not reference:
                reference, whose = answer, "those of the version that serves"
        if release.tolerance is not None:
            reason = describe_difference(*as_comparable(reference, outputs), release.tolerance, whose)
            if reason:
                raise Rejected(reason[:_MAX_REASON_CHARS])
        return check_time(release, children)


def _open(model: str, children: ExitStack, check: Callable[[], None], repository: Path) -> CandidateProcess:
    """Open the model of a repository in a process, which ends with `children`. Raises CandidateFailed."""
    child = CandidateProcess(ChildLimits(math.inf, math.inf), check=check, niceness=_NICENESS)
    children.callback(child.end)
    # In a server, because a release may be an ensemble, or a Python model that calls others, and must load with the
    # checks and the warm-up of the server that will serve it.
    child.open({"is_served": True, "root": str(repository), "model": model}, lambda text, percent: None)
    return child


def _answer(child: CandidateProcess, inputs: str, folder: Path) -> Tensors:
    """Return the outputs for the sample of a file. Raises CandidateFailed."""
    answers = folder / "answers.npz"
    child.execute("load_samples", **{"from": inputs})
    child.execute("run_samples", to=str(answers))
    return load_tensors(answers)[0]


def as_comparable(expected: Tensors, found: Tensors) -> tuple[Tensors, Tensors]:
    """Return the tensors in types that both have: NumPy makes doubles and long integers of numbers in a program."""
    pairs = {name: (array, found.get(name, array[:0])) for name, array in expected.items()}
    types = {
        name: np.float64 if all(one.dtype.kind in "fiub" for one in pair) else object for name, pair in pairs.items()
    }
    one, two = (
        {name: side[name].astype(of) for name, of in types.items() if name in side} for side in (expected, found)
    )
    return one, two


def check_time(release: Release, children: Sequence[CandidateProcess]) -> str:
    """Measure the new version, and beside it the one that serves if there is one, in turns. Return the result as a
    sentence. Raises Rejected and CandidateFailed."""
    medians_ms: list[list[float]] = [[] for _ in children]
    for _ in range(_ROUNDS):
        for child, medians in zip(children, medians_ms, strict=True):
            seconds = _MEASURE_S / _ROUNDS / len(children)
            taken = child.execute("measure", rows=1, runs=_RUNS, first=0, seconds=seconds)["times_ms"]
            medians.append(statistics.median(taken))
    # Other work of the box makes a round slower, never faster.
    new_ms, *rest = map(min, medians_ms)
    limit, slowdown = release.max_latency_ms, release.max_slowdown
    if limit is not None and new_ms > limit:
        raise Rejected(f"it answers the sample in {new_ms:.2f} ms, more than {limit:g} ms")
    if rest and slowdown is not None and new_ms > rest[0] * slowdown:
        ratio = f"the version that serves in {rest[0]:.2f} ms: more than {slowdown:g} times"
        raise Rejected(f"it answers the sample in {new_ms:.2f} ms, {ratio}")
    return f"it loads, and answers the sample in {new_ms:.2f} ms" + (f" beside {rest[0]:.2f} ms" if rest else "")
