"""Comparison of candidates: each is opened, answers the samples, and runs in turns with the others.

All that open stay open and take turns of a few runs each, so that another program, or heat, slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_server.errors import InvalidRequest, LoadError, Unsupported
from edge_server.tuning.trial.candidate import RuntimeCandidate
from edge_server.tuning.trial.child_process import CandidateFailed, CandidateProcess, ChildLimits
from edge_server.tuning.trial.output_difference import OutputDifference, compare
from edge_server.tuning.trial.tensor_files import load

ROUNDS = 10
"""Turns that each candidate has for each batch size."""

Report = Callable[[float, str], None]
"""Is given how much of all is done, 0 to 1, and what is done now."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """`runs` of each candidate and batch size, at most `seconds` long. `sample_count` is that of made-up samples."""

    runs: int
    seconds: float
    sample_count: int
    input_path: str = ""


@dataclass(slots=True)
class CandidateTrial:
    """What came of one candidate. `job` opens it. `times_ms` maps rows to what each run took, in milliseconds.

    `reason` says why it is out, "" while it is not; `kind` is the class of the error that it ended with.
    """

    candidate: RuntimeCandidate
    job: Mapping[str, object]
    facts: Mapping[str, Any] = field(default_factory=dict)
    difference: OutputDifference | None = None
    times_ms: dict[int, list[float]] = field(default_factory=dict)
    memory_bytes: int = 0
    reason: str = ""
    kind: str = ""
    _child: CandidateProcess | None = None

    @property
    def is_in(self) -> bool:
        return self._child is not None

    @property
    def is_measured(self) -> bool:
        return not self.reason and bool(self.times_ms)

    def start(self, limits: ChildLimits, report: Callable[[str, float], None]) -> None:
        child = self._begin(limits)
        if child is not None:
            self.facts = self._guarded(lambda: child.open(self.job, report)) or {}

    def ask(self, do: str, **fields: object) -> dict[str, Any] | None:
        """Return the answer; None when the candidate is out, now or before."""
        child = self._child
        return None if child is None else self._guarded(lambda: child.ask(do, **fields))

    def weigh(self) -> None:
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

    def _begin(self, limits: ChildLimits) -> CandidateProcess | None:
        try:
            self._child = CandidateProcess(limits)
        except CandidateFailed as error:
            self.reason = error.reason
        return self._child

    def _guarded(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return act()
        except CandidateFailed as error:
            self._child = None
            self.reason, self.kind = error.reason, error.kind
            return None


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """`samples` says what the candidates were given; `batch` is the largest batch that was run, 0 without batches."""

    trials: tuple[CandidateTrial, ...]
    reference: CandidateTrial
    samples: Mapping[str, Any]
    batch: int


class Comparison:
    """Runs the trials. Whatever ends `run`, no process is left behind by it."""

    def __init__(
        self, trials: Sequence[CandidateTrial], limits: ChildLimits, effort: RunLimits, folder: Path, report: Report
    ) -> None:
        self._trials = tuple(trials)
        self._limits = limits
        self._effort = effort
        self._folder = folder
        self._report = report
        self._done = 0
        self._steps = len(trials) + 2 * ROUNDS

    def run(
        self, keep: Callable[[ComparisonResult], CandidateTrial | None]
    ) -> tuple[ComparisonResult, CandidateTrial | None]:
        """Open, compare and measure; return that with what `keep` chose, whose engine is kept.

        Raises LoadError with every candidate's reason when none opens, and for an engine that cannot be kept;
        InvalidRequest for unusable inputs.
        """
        try:
            samples = self._open_all()
            reference = self._compare(samples)
            batch = int(reference.facts["max_batch_size"])
            self._measure(1)
            if batch > 1:
                self._measure(batch)
            for trial in self._trials:
                trial.weigh()
            outcome = ComparisonResult(self._trials, reference, samples, batch)
            chosen = keep(outcome)
            if chosen is not None and chosen.candidate.is_engine:
                apart = chosen.difference.relative if chosen.difference is not None else 0.0
                if chosen.ask("keep", difference=apart, reference=reference.candidate.title) is None:
                    raise LoadError(f"{chosen.candidate.title}: its engine cannot be kept: {chosen.reason}")
            for trial in self._trials:
                trial.end()
            self._report(1.0, "done")
            return outcome, chosen
        finally:
            for trial in self._trials:
                trial.kill()

    def _open_all(self) -> Mapping[str, Any]:
        """Open one after the other; the first that opens makes the samples. Raises LoadError, InvalidRequest."""
        made: dict[str, Any] | None = None
        path = self._folder / "samples.npz"
        for trial in self._trials:
            title = trial.candidate.title
            self._step(f"{title}: opening")

            def tell(text: str, percent: float, title: str = title) -> None:
                self._report((self._done - 1 + percent / 100) / self._steps, f"{title}: {text}, {percent:.0f} %")

            trial.start(self._limits_of(trial), tell)
            if trial.kind == Unsupported.__name__:
                raise Unsupported(trial.reason)
            if not trial.is_in:
                continue
            if made is None:
                effort = self._effort
                made = trial.ask("samples", to=str(path), input=effort.input_path, count=effort.sample_count)
                if trial.kind in (InvalidRequest.__name__, "WarmupFailed", "BadModelConfig"):
                    raise InvalidRequest(trial.reason)
            if made is not None:
                trial.ask("load", **{"from": str(path)})
        if made is None:
            reasons = "".join(f"\n  {trial.candidate.title}: {trial.reason}" for trial in self._trials)
            raise LoadError(f"no runtime opens it:{reasons}")
        return made

    def _limits_of(self, trial: CandidateTrial) -> ChildLimits:
        limits = self._limits
        return limits if trial.candidate.is_engine else replace(limits, open_s=limits.answer_s)

    def _compare(self, samples: Mapping[str, Any]) -> CandidateTrial:
        """Have all answer the samples; return the trial that the others were compared with. Raises LoadError."""
        answered: list[tuple[CandidateTrial, Path]] = []
        for number, trial in enumerate(self._trials):
            path = self._folder / f"answers-{number}.npz"
            if trial.ask("answer", to=str(path)) is not None:
                answered.append((trial, path))
        if not answered:
            reasons = "".join(f"\n  {trial.candidate.title}: {trial.reason}" for trial in self._trials)
            raise LoadError(f"no runtime answers with it:{reasons}{_advice(samples)}")
        # Candidates are in order of preference as references.
        reference, path = answered[0]
        expected = load(path)
        bf16 = frozenset(reference.facts["bf16_outputs"])
        for trial, other in answered:
            trial.difference = compare(expected, load(other), bf16)
            other.unlink()
        return reference

    def _measure(self, rows: int) -> None:
        runs = max(1, -(-self._effort.runs // ROUNDS))
        for round_number in range(ROUNDS):
            # Nobody runs always behind the same neighbour.
            shift = round_number % len(self._trials)
            order = (*self._trials[shift:], *self._trials[:shift])
            self._step(f"batch of {rows}: round {round_number + 1} of {ROUNDS}")
            for trial in order:
                said = trial.ask(
                    "turn", rows=rows, runs=runs, first=round_number * runs, seconds=self._effort.seconds / ROUNDS
                )
                if said is not None:
                    trial.times_ms.setdefault(rows, []).extend(map(float, said["times_ms"]))

    def _step(self, text: str) -> None:
        self._done += 1
        self._report((self._done - 1) / self._steps, text)


def _advice(samples: Mapping[str, Any]) -> str:
    """Return the advice for generated inputs, whose size may not fit the model."""
    if not samples["open"]:
        return ""
    names = ", ".join(f"'{name}'" for name in samples["open"])
    return (
        f"\n  the configuration leaves the shape of {names} open, and 1 was made up for each free dimension: give"
        " inputs of yours with --input FILE.npz, or sizes with a model_warmup in config.pbtxt"
    )
