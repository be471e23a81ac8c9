"""Running the process that builds, and surviving whatever becomes of it: it is cancelled, paused, killed when it takes
too long or too much, and what it says last is told with the reason."""

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
from pathlib import Path
from typing import Any

MODULE = "edge_server.backends.tensorrt.builder"

_LOOK_S = 0.1
_CANCEL_PATIENCE_S = 10.0
"""How long a process that was asked to end may take; it writes its timing cache meanwhile."""

_KEPT_LINES = 5
_LONGEST_LINE = 300


@dataclass(frozen=True, slots=True)
class Bounds:
    """`timeout_s` counts what the process ran, pauses left out; `memory_bytes` is what it may keep in memory, 0: any.
    `floor_bytes`: it is ended when less than that is available to the whole box."""

    timeout_s: float
    memory_bytes: int = 0
    floor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`end` is "built", "verified", "cancelled" or "failed"; `facts` what the process said with it. `reason` says why
    it failed; `is_final`: the same again would fail again."""

    end: str
    facts: Mapping[str, Any]
    reason: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Orders:
    """What the process is asked at every look. `should_cancel` and `should_pause` return why, "" for no."""

    should_cancel: Callable[[], str]
    should_pause: Callable[[], str]
    report: Callable[[str, float], None]
    paused: Callable[[str], None]


def run_child(job: Mapping[str, object], bounds: Bounds, orders: Orders) -> Outcome:
    """Run one job to its end. Never raises for what the process does."""
    command = [sys.executable, "-m", MODULE]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return Outcome("failed", {}, f"the process that builds does not start: {error.strerror}")
    return _Run(process, bounds, orders).until_end({**job, "parent": os.getpid()})


class _Run:
    def __init__(self, process: subprocess.Popen[bytes], bounds: Bounds, orders: Orders) -> None:
        self._process = process
        self._bounds = bounds
        self._orders = orders
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ran_s = 0.0
        self._is_paused = False
        self._stop_reason = ""
        self._cancel_at_s: float | None = None

    def until_end(self, job: Mapping[str, object]) -> Outcome:
        readers = [
            threading.Thread(target=self._read_lines, name="edge-engine-out", daemon=True),
            threading.Thread(target=self._read_complaints, name="edge-engine-err", daemon=True),
        ]
        for reader in readers:
            reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(job).encode())
        end = self._follow()
        self._process.wait()
        for reader in readers:
            reader.join()
        return end or self._end_without_words()

    def _follow(self) -> Outcome | None:
        """Hand on what the process says until it has said its last, or is gone."""
        then_s = time.monotonic()
        while True:
            try:
                said = self._said.get(timeout=_LOOK_S)
            except queue.Empty:
                said = {}
            if said is None:
                return None
            if "end" in said:
                return self._as_outcome(said)
            if "phase" in said:
                self._orders.report(str(said["phase"]), float(said["percent"]))
            now_s = time.monotonic()
            if not self._is_paused:
                self._ran_s += now_s - then_s
            then_s = now_s
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Pause, cancel or kill, as it is time to."""
        if self._cancel_at_s is not None:
            if now_s - self._cancel_at_s > _CANCEL_PATIENCE_S:
                self._signal(signal.SIGKILL)
            return
        too_much = self._too_much()
        self._stop_reason = too_much or self._too_long()
        if self._stop_reason or self._orders.should_cancel():
            self._cancel_at_s = now_s
            self._resume()
            # What has run long enough may write down what it measured; what takes memory gives it back now.
            self._signal(signal.SIGKILL if too_much else signal.SIGTERM)
        else:
            self._keep_pace()

    def _keep_pace(self) -> None:
        why = self._orders.should_pause()
        if why and not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True
            self._orders.paused(why)
        elif not why and self._is_paused:
            self._resume()

    def _resume(self) -> None:
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False
            self._orders.paused("")

    def _too_long(self) -> str:
        if self._ran_s <= self._bounds.timeout_s:
            return ""
        return f"it took longer than {self._bounds.timeout_s:g} s (--engine-build-timeout-secs)"

    def _too_much(self) -> str:
        """Return which bound of memory was passed, "" when none."""
        bounds = self._bounds
        if bounds.memory_bytes:
            taken = resident_bytes(self._process.pid)
            if taken > bounds.memory_bytes:
                return (
                    f"it took {taken >> 20} MiB of memory, more than the {bounds.memory_bytes >> 20} MiB that it may "
                    "(--engine-build-memory-mb)"
                )
        if bounds.floor_bytes and 0 < available_bytes() < bounds.floor_bytes:
            return f"the box had less than {bounds.floor_bytes >> 20} MiB of memory left, out of memory"
        return ""

    def _as_outcome(self, said: dict[str, Any]) -> Outcome:
        if self._stop_reason and said["end"] == "cancelled":
            return Outcome("failed", said, self._stop_reason)
        return Outcome(str(said["end"]), said, str(said.get("reason", "")), bool(said.get("is_final", False)))

    def _end_without_words(self) -> Outcome:
        code = self._process.returncode
        if self._stop_reason:
            return Outcome("failed", {}, self._stop_reason)
        if self._cancel_at_s is not None:
            return Outcome("cancelled", {})
        tail = f": {' | '.join(self._complaints)}" if self._complaints else ""
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
            return Outcome("failed", {}, f"the process that builds was ended by {name}{hint}{tail}")
        return Outcome("failed", {}, f"the process that builds ended with code {code} and said nothing{tail}")

    def _signal(self, number: int) -> None:
        # `poll` and `wait` are this thread's alone, so the number cannot have been given to another process.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

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


def resident_bytes(pid: int) -> int:
    """Return what a process keeps in memory and in swap, 0 when that cannot be told. What CUDA takes on a board whose
    GPU shares the memory is not in it: `floor_bytes` is for that."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(_kilobytes(text, name) for name in ("VmRSS", "VmSwap")) << 10


def available_bytes() -> int:
    try:
        return _kilobytes(Path("/proc/meminfo").read_text(), "MemAvailable") << 10
    except OSError:
        return 0


def _kilobytes(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
