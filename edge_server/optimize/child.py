"""The asking end of a candidate's process: one question at a time, bounded in time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edge_server.engines.child import available_bytes, resident_bytes

MODULE = "edge_server.optimize.worker"

_LOOK_S = 0.05
_KEPT_LINES = 5
_LONGEST_LINE = 300
_END_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
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


class Child:
    """One candidate's process. Used by one thread; `end` must be called, and may be again."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        command = [sys.executable, "-m", MODULE]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise CandidateFailed(f"its process does not start: {error.strerror}") from error
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_lines, self._read_complaints)
        ]
        for reader in self._readers:
            reader.start()

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
        """Return what the process keeps in memory and in swap, 0 when that cannot be told."""
        return resident_bytes(self._process.pid)

    def end(self) -> None:
        """Make sure that it is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _exchange(
        self, message: Mapping[str, object], limit_s: float, report: Callable[[str, float], None]
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        end_s = time.monotonic() + limit_s
        while True:
            try:
                said = self._said.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look(end_s, limit_s)
                continue
            if said is None:
                raise self._gone()
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
        reason = self._too_much()
        if not reason and time.monotonic() > end_s:
            reason = f"it took longer than {limit_s:g} s (--timeout-secs)"
        if reason:
            self.kill()
            raise CandidateFailed(reason)

    def _too_much(self) -> str:
        limits = self._limits
        taken = self.resident_bytes() if limits.memory_bytes else 0
        if taken > limits.memory_bytes:
            return (
                f"it took {taken >> 20} MiB of memory, more than the {limits.memory_bytes >> 20} MiB that it may "
                "(--memory-mb)"
            )
        if 0 < available_bytes() < limits.floor_bytes:
            return f"the box had less than {limits.floor_bytes >> 20} MiB of memory left"
        return ""

    def _gone(self) -> CandidateFailed:
        self.kill()
        code = self._process.returncode
        tail = f": {' | '.join(self._complaints)}" if self._complaints else ""
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            return CandidateFailed(f"its process was ended by {name}{hint}{tail}")
        return CandidateFailed(f"its process ended with code {code}{tail}")

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if isinstance(said, dict):
                        self._said.put(said)
        self._said.put(None)

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                if text:
                    self._complaints.append(text[:_LONGEST_LINE])
