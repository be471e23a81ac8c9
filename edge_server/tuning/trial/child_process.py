"""Candidate process as its parent sees it: one question at a time, with limits on time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.engines.json_child_process import JsonProcess, NoAnswer

MODULE = "edge_server.tuning.trial.child_main"

_LOOK_S = 0.05
_END_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """`answer_s`: how long one answer may take; `open_s`: how long opening may, an engine's build included.
    `memory_bytes`: what a process may keep in memory, 0: any. `floor_bytes`: it is ended when less than that is
    available to the whole box."""

    answer_s: float
    open_s: float
    memory_bytes: int = 0
    floor_bytes: int = 0


class CandidateFailed(Exception):
    """The candidate is out, and its process gone; says why. `kind` is the class of its error, "" when it said none."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class CandidateProcess:
    """One candidate's process. Used by one thread; `end` must be called, and may be again."""

    def __init__(self, limits: ChildLimits, module: str = MODULE) -> None:
        """Start it. Raises CandidateFailed."""
        self._limits = limits
        try:
            self._process = JsonProcess(module)
        except OSError as error:
            raise CandidateFailed(f"its process does not start: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, job: Mapping[str, object], report: Callable[[str, float], None]) -> dict[str, Any]:
        """Hand over the job; return what is known of the opened model. `report` is given the progress of a build.

        Raises CandidateFailed, as `ask` does.
        """
        return self._exchange({**job, "parent": os.getpid()}, self._limits.open_s, report)

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Return the answer to one command. What raises, KeyboardInterrupt aside, has ended the process."""
        return self._exchange({"do": do, **fields}, self._limits.answer_s, lambda text, percent: None)

    def resident_bytes(self) -> int:
        """Return the memory and swap of the process in bytes, 0 if unknown."""
        return self._process.resident_bytes()

    def end(self) -> None:
        """Make sure that it is gone."""
        self._process.end(_END_PATIENCE_S)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def _exchange(
        self, message: Mapping[str, object], limit_s: float, report: Callable[[str, float], None]
    ) -> dict[str, Any]:
        self._process.tell(message)
        end_s = time.monotonic() + limit_s
        while True:
            try:
                said = self._process.hear(_LOOK_S)
            except NoAnswer:
                self._look(end_s, limit_s)
                continue
            if said is None:
                self.kill()
                raise CandidateFailed(f"its process {self._process.end_in_words()}")
            if "progress" in said:
                report(str(said["progress"]), float(said["percent"]))
                continue
            if "failed" in said:
                self.end()
                raise CandidateFailed(str(said["failed"]), str(said["kind"]))
            done: dict[str, Any] = said["done"]
            return done

    def _look(self, end_s: float, limit_s: float) -> None:
        """End the process that takes too long, or too much."""
        reason = self._process.too_much(self._limits.memory_bytes, self._limits.floor_bytes, "--memory-mb")
        if not reason and time.monotonic() > end_s:
            reason = f"it took longer than {limit_s:g} s (--timeout-secs)"
        if reason:
            self.kill()
            raise CandidateFailed(reason)
