"""Parent's side of a child process that runs a model in one way (runtime, device, precision): sends it commands, and
limits its time and memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.backends.isolation.json_child_process import JsonProcess, ReceiveTimeout

MODULE = "edge_server.plugins.trials.candidate_process_main"

_POLL_S = 0.05
_END_TIMEOUT_S = 5.0
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a candidate process. `answer_s` limits one command, and `open_s` the opening with an engine build.

    `memory_bytes` limits the memory of the process; 0 means no limit. The process is ended if the machine has less than
    `floor_bytes` of available memory.
    """

    answer_s: float
    open_s: float
    memory_bytes: int = 0
    floor_bytes: int = 0


class CandidateFailed(Exception):
    """The candidate failed and its process has ended. `kind` is the class name of the error in the process, or "".
    `was_killed`: the kernel ended it, as memory ran out."""

    def __init__(self, reason: str, kind: str = "", *, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        self.was_killed = was_killed


class CandidateProcess:
    """One candidate's process. Use in one thread. `end` or `kill` must be called, and may be called again.

    `check` is called 20 times a second during `open` and `execute`, which raise what it raises. With it, the process
    has the priority `niceness`, by default the lowest.
    """

    def __init__(
        self,
        limits: ChildLimits,
        module: str = MODULE,
        check: Callable[[], None] | None = None,
        niceness: int = _LOWEST_PRIORITY,
    ) -> None:
        """Start the process. Raises CandidateFailed."""
        self._limits = limits
        self._check = check
        try:
            self._process = JsonProcess(module)
        except OSError as error:
            raise CandidateFailed(f"its process does not start: {error.strerror}") from error
        if check is not None:
            # It waits for its job, so that all threads of the runtime start with this priority.
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)

    def open(self, job: Mapping[str, object], report: Callable[[str, float], None]) -> dict[str, Any]:
        """Send the job and return the facts of the opened model. Calls `report` with the progress of an engine build.

        Raises CandidateFailed.
        """
        return self._exchange({**job, "parent": os.getpid()}, self._limits.open_s, report)

    def execute(self, command: str, **fields: object) -> dict[str, Any]:
        """Execute one command and return its result. Raises CandidateFailed; the process has then ended."""
        return self._exchange({"command": command, **fields}, self._limits.answer_s, lambda text, percent: None)

    def resident_bytes(self) -> int:
        """Return the memory and swap of the process in bytes, 0 if unknown."""
        return self._process.resident_bytes()

    def end(self) -> None:
        """End the process, and kill it if it does not exit in time."""
        self._process.end(_END_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _exchange(
        self, message: Mapping[str, object], limit_s: float, report: Callable[[str, float], None]
    ) -> dict[str, Any]:
        self._process.send(message)
        end_s = time.monotonic() + limit_s
        while True:
            try:
                reply = self._process.receive(_POLL_S)
            except ReceiveTimeout:
                self._enforce_limits(end_s, limit_s)
                continue
            if reply is None:
                self.end()  # it ends by itself, and its code tells how
                was_killed = self._process.was_killed
                raise CandidateFailed(f"its process {self._process.exit_description()}", was_killed=was_killed)
            if "progress" in reply:
                report(str(reply["progress"]), float(reply["percent"]))
                continue
            if "failed" in reply:
                self.end()
                raise CandidateFailed(str(reply["failed"]), str(reply["kind"]))
            result: dict[str, Any] = reply["done"]
            return result

    def _enforce_limits(self, end_s: float, limit_s: float) -> None:
        """Kill the process and raise CandidateFailed if it exceeds its time or memory."""
        if self._check is not None:
            self._check()
        reason = self._process.memory_problem(self._limits.memory_bytes, self._limits.floor_bytes, "--memory-mb")
        if not reason and time.monotonic() > end_s:
            reason = f"it took longer than {limit_s:g} s (--timeout)"
        if reason:
            self.kill()
            raise CandidateFailed(reason)
