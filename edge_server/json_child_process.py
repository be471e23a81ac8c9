"""Child process that exchanges JSON lines with the server, for engine builds and tuning trials."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KEPT_LINES = 5
_LONGEST_LINE = 300


class NoAnswer(Exception):
    """The process lives and sent no message within the time."""


class JsonProcess:
    """`python -m MODULE`: JSON on its standard input and output, error texts on its standard error.

    Two threads read its output, so that it never waits for a reader. One thread uses everything else. After
    construction `end`, `kill` or `join` must be called.
    """

    def __init__(self, module: str) -> None:
        """Start it. Raises OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readers = [
            threading.Thread(target=read, name=f"edge-child-{name}", daemon=True)
            for name, read in (("out", self._read_lines), ("err", self._read_complaints))
        ]
        try:
            for reader in self._readers:
                reader.start()
        except RuntimeError as error:
            self._let_go()
            raise OSError(errno.EAGAIN, f"the system grants no thread to read from it: {error}") from None

    def _let_go(self) -> None:
        """End a process for which not all reader threads could be started."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            if reader.ident is not None:
                reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Mapping[str, object]) -> None:
        """Write one line. Does nothing if the process has ended; reading its messages shows that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def tell_no_more(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, None after the process closed its output. Raises NoAnswer."""
        try:
            return self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise NoAnswer from None

    def signal(self, number: int) -> None:
        # Only the using thread calls `wait`, so the process number cannot belong to another process yet.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def join(self) -> None:
        """Wait until it has ended and all its output was read."""
        self._process.wait()
        for reader in self._readers:
            reader.join()
        self.tell_no_more()

    def end(self, patience_s: float) -> None:
        """Close its input, and kill it if it does not end in this time."""
        self.tell_no_more()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it at once. May be called again."""
        self.signal(signal.SIGKILL)
        self.join()

    def end_in_words(self) -> str:
        """Return how it ended ("ended with code 3: ...", "was ended by SIGKILL, ..."), and its last complaints. Once it
        is gone."""
        code = self._process.returncode
        tail = f": {' | '.join(self._complaints)}" if self._complaints else ""
        if code >= 0:
            return f"ended with code {code}{tail}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        return f"was ended by {name}{hint}{tail}"

    def too_much(self, memory_bytes: int, floor_bytes: int, flag: str) -> str:
        """Return which bound of memory was passed, "" when none. `memory_bytes` is what it may keep, 0: any, as `flag`
        says; `floor_bytes` is what must be left to the whole box, 0: nothing."""
        taken = self.resident_bytes() if memory_bytes else 0
        if taken > memory_bytes:
            return f"it took {taken >> 20} MiB of memory, more than the {memory_bytes >> 20} MiB that it may ({flag})"
        if floor_bytes and 0 < available_bytes() < floor_bytes:
            return f"the box had less than {floor_bytes >> 20} MiB of memory left, out of memory"
        return ""

    def resident_bytes(self) -> int:
        """Return the memory and swap of the process in bytes, 0 if unknown. What CUDA takes on a board whose GPU
        shares the memory is not in it."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0
        return sum(_kilobytes(text, name) for name in ("VmRSS", "VmSwap")) << 10

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines:
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):
                        said = json.loads(line)
                        if isinstance(said, dict):
                            self._said.put(said)
        finally:
            self._said.put(None)

    def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                if text:
                    self._complaints.append(text[:_LONGEST_LINE])


def available_bytes() -> int:
    """Return the available memory of the machine in bytes, 0 if unknown."""
    try:
        return _kilobytes(Path("/proc/meminfo").read_text(), "MemAvailable") << 10
    except OSError:
        return 0


def _kilobytes(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
