"""Comparison of the ways to run one model (runtime, device, precision): opens each in its own process, compares its
outputs with the reference for the same samples, and measures time and memory.

All candidates stay open and run a few inferences in turn, so that heat or other programs slow all of them equally.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_server.backends.isolation.npz_tensor_files import Tensors, load_tensors
from edge_server.core.output_difference import OutputDifference, compare_outputs
from edge_server.errors import InvalidRequest, LoadError, Unsupported
from edge_server.plugins.trials.candidate import RuntimeCandidate
from edge_server.plugins.trials.candidate_process import CandidateFailed, CandidateProcess, ChildLimits
from edge_server.plugins.trials.edge_answers import EdgeAnswers
from edge_server.plugins.trials.picture_agreement import PictureAgreement, compare_answers

ROUNDS = 10
"""Rounds of measurement per batch size. In each round, all candidates run once."""

Report = Callable[[float, str], None]
"""Called with the completed fraction, 0 to 1, and a description of the current step."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Runs per candidate and batch size: `runs`, for at most `seconds`. `sample_count` is the number of random samples.

    `input_path` names a file with samples, or is "". `pictures` are those on which precisions are compared.
    """

    runs: int
    seconds: float
    sample_count: int
    input_path: str = ""
    pictures: tuple[Path, ...] = ()


@dataclass(slots=True)
class CandidateTrial:
    """Process and results of one candidate. `job` is sent to the process. `times_ms` maps rows to the time of each run.

    If the candidate failed, `reason` and `kind` are the message and the class name of its error, otherwise "".
    `agreement` is that of another precision than the reference's on pictures, None if none were compared.
    """

    candidate: RuntimeCandidate
    job: Mapping[str, object]
    facts: Mapping[str, Any] = field(default_factory=dict)
    difference: OutputDifference | None = None
    times_ms: dict[int, list[float]] = field(default_factory=dict)
    memory_bytes: int = 0
    reason: str = ""
    kind: str = ""
    edge_answers: EdgeAnswers | None = None
    agreement: PictureAgreement | None = None
    _child: CandidateProcess | None = None

    @property
    def is_open(self) -> bool:
        return self._child is not None

    @property
    def is_measured(self) -> bool:
        return not self.reason and bool(self.times_ms)

    def start(
        self,
        limits: ChildLimits,
        report: Callable[[str, float], None] = lambda text, percent: None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Start the process and open the model. A failure is recorded in `reason`. `check`: see CandidateProcess."""
        try:
            child = self._child = CandidateProcess(limits, check=check)
        except CandidateFailed as error:
            self.reason = error.reason
            return
        self.facts = self._record_failure(lambda: child.open(self.job, report)) or {}

    def start_in_place_of(self, other: CandidateTrial, limits: ChildLimits) -> None:
        """Close the model of `other`, and open this one in its process; in a new one if that has ended. A failure is
        recorded in `reason`."""
        self._child, other._child = other._child, None
        if self._child is None:
            self.start(limits)
            return
        opened = self.execute("reopen", job={**self.job, "parent": os.getpid()}) or {}
        self.facts = opened.get("facts", {})
        if "failed" in opened:  # the process lives, and opens others
            self.reason, self.kind = opened["failed"], opened["kind"]

    def execute(self, command: str, **fields: object) -> dict[str, Any] | None:
        """Execute a command and return its result; None if the candidate fails or has failed before."""
        child = self._child
        if child is None or self.reason:
            return None
        return self._record_failure(lambda: child.execute(command, **fields))

    def measure(self, *, rows: int, runs: int, first: int, seconds: float) -> None:
        """Add the times of up to `runs` runs of `rows` samples, from the sample `first` on, to `times_ms`."""
        measured = self.execute("measure", rows=rows, runs=runs, first=first, seconds=seconds)
        if measured is not None:
            self.times_ms.setdefault(rows, []).extend(map(float, measured["times_ms"]))

    def answer_edge_samples(self, samples: Path, to: Path) -> None:
        """Set `edge_answers` to the model's answers to `edge_samples`, which are made if there is no file of them. A
        process that ends at one is no failure of the candidate, but it answers nothing more."""
        if self._child is None:
            return
        try:
            done = self._child.execute("run_edge_samples", samples=str(samples), to=str(to))
        except CandidateFailed as error:
            self._child = None
            self.edge_answers = EdgeAnswers({}, {}, error.reason)
            return
        outputs = dict(zip(done["answered"], load_tensors(to), strict=True))
        errors = {int(number): text for number, text in done["errors"].items()}
        self.edge_answers = EdgeAnswers(outputs, errors)
        to.unlink()

    def answer_pictures(self, pictures: Sequence[Path], to: Path) -> Sequence[Tensors]:
        """Return the answer to each picture, in the form of `picture_agreement`; empty if the candidate fails."""
        if self.execute("answer_pictures", pictures=list(map(str, pictures)), to=str(to)) is None:
            return ()
        answers = load_tensors(to)
        to.unlink()
        return answers

    def compare_pictures(
        self, reference: CandidateTrial, expected: Sequence[Tensors], found: Sequence[Tensors]
    ) -> None:
        """Set `agreement` from the answers to the same pictures, if this is another precision than the reference's."""
        if expected and found and self.facts.get("precision") != reference.facts.get("precision"):
            self.agreement = compare_answers(expected, found)

    def read_memory(self) -> None:
        if self._child is not None:
            self.memory_bytes = self._child.resident_bytes()

    def end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _record_failure(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return action()
        except CandidateFailed as error:
            self._child = None
            self.reason, self.kind = error.reason, error.kind
            return None


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """`samples` describes the inputs of all candidates. `batch` is the largest measured batch, 0 without batching."""

    trials: tuple[CandidateTrial, ...]
    reference: CandidateTrial
    samples: Mapping[str, Any]
    batch: int


def natural_trials(trials: Sequence[CandidateTrial]) -> dict[str, CandidateTrial]:
    """Return backend -> the trial that runs the file as the server does without a configuration."""
    found: dict[str, CandidateTrial] = {}
    for trial in trials:
        if trial.candidate.is_natural:
            found.setdefault(trial.candidate.runtime, trial)
    return found


class Comparison:
    """Runs the trials. At the end of `run` all processes have ended, also after an error."""

    def __init__(
        self, trials: Sequence[CandidateTrial], limits: ChildLimits, run_limits: RunLimits, folder: Path, report: Report
    ) -> None:
        self._trials = tuple(trials)
        self._limits = limits
        self._run_limits = run_limits
        self._folder = folder
        self._report = report
        self._done = 0
        self._steps = len(trials) + 2 * ROUNDS

    def run(
        self, choose: Callable[[ComparisonResult], CandidateTrial | None]
    ) -> tuple[ComparisonResult, CandidateTrial | None]:
        """Open, compare and measure all candidates. Return the result and the candidate that `choose` selects.

        The engine of the chosen candidate is put into the server's cache. Raises LoadError with all reasons if no
        candidate opens, and if the engine cannot be cached. Raises InvalidRequest for unusable inputs.
        """
        try:
            samples = self._open_all()
            reference = self._compare_outputs(samples)
            batch = int(reference.facts["max_batch_size"])
            self._measure(1)
            if batch > 1:
                self._measure(batch)
            for trial in self._trials:
                trial.read_memory()
            for trial in natural_trials(self._trials).values():
                trial.answer_edge_samples(self._folder / "edges.npz", self._folder / "edge_answers.npz")
            outcome = ComparisonResult(self._trials, reference, samples, batch)
            chosen = choose(outcome)
            if chosen is not None and chosen.candidate.is_engine:
                difference = chosen.difference.relative if chosen.difference is not None else 0.0
                title = reference.candidate.title
                if chosen.execute("keep_engine", difference=difference, reference=title) is None:
                    raise LoadError(f"{chosen.candidate.title}: its engine cannot be kept: {chosen.reason}")
            for trial in self._trials:
                trial.end()
            self._report(1.0, "done")
            return outcome, chosen
        finally:
            for trial in self._trials:
                trial.kill()

    def _open_all(self) -> Mapping[str, Any]:
        """Open all candidates; the first that opens makes the samples. Return the description of the samples.

        Raises LoadError, InvalidRequest and Unsupported.
        """
        samples: dict[str, Any] | None = None
        path = self._folder / "samples.npz"
        for trial in self._trials:
            title = trial.candidate.title
            self._report_step(f"{title}: opening")

            def report(text: str, percent: float, title: str = title) -> None:
                self._report((self._done - 1 + percent / 100) / self._steps, f"{title}: {text}, {percent:.0f} %")

            limits = self._limits
            trial.start(limits if trial.candidate.is_engine else replace(limits, open_s=limits.answer_s), report)
            if trial.kind == Unsupported.__name__:
                raise Unsupported(trial.reason)
            if not trial.is_open:
                continue
            if samples is None:
                run_limits = self._run_limits
                samples = trial.execute(
                    "make_samples", to=str(path), input=run_limits.input_path, count=run_limits.sample_count
                )
                if trial.kind in (InvalidRequest.__name__, "WarmupFailed", "BadModelConfig"):
                    raise InvalidRequest(trial.reason)
            if samples is not None:
                trial.execute("load_samples", **{"from": str(path)})
        if samples is None:
            reasons = "".join(f"\n  {trial.candidate.title}: {trial.reason}" for trial in self._trials)
            raise LoadError(f"no runtime opens it:{reasons}")
        return samples

    def _compare_outputs(self, samples: Mapping[str, Any]) -> CandidateTrial:
        """Run all candidates on the samples and compare the outputs. Return the reference.

        Raises LoadError, and InvalidRequest for a picture that cannot be read, or a model that takes none."""
        answered: list[tuple[CandidateTrial, Path]] = []
        for number, trial in enumerate(self._trials):
            path = self._folder / f"answers-{number}.npz"
            if trial.execute("run_samples", to=str(path)) is not None:
                answered.append((trial, path))
        if not answered:
            reasons = "".join(f"\n  {trial.candidate.title}: {trial.reason}" for trial in self._trials)
            raise LoadError(f"no runtime answers with it:{reasons}{_advice(samples)}")
        # Candidates are ordered by preference as the reference.
        reference, path = answered[0]
        expected = load_tensors(path)
        bf16 = frozenset(reference.facts["bf16_outputs"])
        for trial, other in answered:
            trial.difference = compare_outputs(expected, load_tensors(other), bf16)
            other.unlink()
        if self._run_limits.pictures:
            self._compare_pictures(reference)
        return reference

    def _compare_pictures(self, reference: CandidateTrial) -> None:
        pictures, path = self._run_limits.pictures, self._folder / "picture_answers.npz"
        expected = reference.answer_pictures(pictures, path)
        if reference.kind == InvalidRequest.__name__:
            raise InvalidRequest(reference.reason)
        for trial in self._trials:
            if trial is not reference:
                trial.compare_pictures(reference, expected, trial.answer_pictures(pictures, path))

    def _measure(self, rows: int) -> None:
        runs = max(1, -(-self._run_limits.runs // ROUNDS))
        for round_number in range(ROUNDS):
            # Rotate the order, so that no candidate always runs after the same one.
            shift = round_number % len(self._trials)
            order = (*self._trials[shift:], *self._trials[:shift])
            self._report_step(f"batch of {rows}: round {round_number + 1} of {ROUNDS}")
            for trial in order:
                seconds = self._run_limits.seconds / ROUNDS
                trial.measure(rows=rows, runs=runs, first=round_number * runs, seconds=seconds)

    def _report_step(self, text: str) -> None:
        self._done += 1
        self._report((self._done - 1) / self._steps, text)


def _advice(samples: Mapping[str, Any]) -> str:
    """Return advice for the case that the sizes of generated inputs do not fit the model, or ""."""
    if not samples["open"]:
        return ""
    names = ", ".join(f"'{name}'" for name in samples["open"])
    return (
        f"\n  the configuration leaves the shape of {names} open, and each free dimension was set to 1: give inputs"
        " with --input-data FILE.npz, or sizes with a model_warmup in config.pbtxt"
    )
