"""Child process that exchanges lines of JSON with its parent: start, send, receive with a timeout, and a limit on
memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_server.child_command import child_command

_MAX_STDERR_LINES = 5
_MAX_STDERR_LINE_LENGTH = 300


class ReceiveTimeout(Exception):
    """The process runs and sent no message within the time."""


class JsonProcess:
    """`python -m MODULE`: JSON on its standard input and output, error texts on its standard error.

    Two threads read its output, so that it never waits for a reader. One thread uses everything else, and must call
    `end`, `kill` or `join` at last.
    """

    def __init__(self, module: str) -> None:
        """Start it. Raises OSError."""
        self._process = subprocess.Popen(
            child_command(module),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr_lines: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self._readers = [
            threading.Thread(target=read, name=f"edge-child-{name}", daemon=True)
            for name, read in (("out", self._read_lines), ("err", self._read_stderr))
        ]
        try:
            for reader in self._readers:
                reader.start()
        except RuntimeError as error:
            self._release()
            raise OSError(errno.EAGAIN, f"the system grants no thread to read from it: {error}") from None

    def _release(self) -> None:
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

    def send(self, message: Mapping[str, object]) -> None:
        """Write one line. Does nothing if the process has ended; reading its messages shows that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def close_stdin(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next message, None after the process closed its output. Raises ReceiveTimeout, but not with
        `timeout_s` None."""
        try:
            return self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise ReceiveTimeout from None

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
        self.close_stdin()

    def end(self, timeout_s: float) -> None:
        """Close its input, and kill it if it does not end in this time."""
        self.close_stdin()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it at once. May be called again."""
        self.signal(signal.SIGKILL)
        self.join()

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it. Unless it was killed here, the kernel did it, as memory ran out."""
        return self._process.returncode == -signal.SIGKILL

    def exit_description(self) -> str:
        """Return how it ended ("ended with code 3: ...", "was ended by SIGKILL, ...") and its last error lines. Called
        after `join`."""
        code = self._process.returncode
        tail = f": {' | '.join(self._stderr_lines)}" if self._stderr_lines else ""
        if code >= 0:
            return f"ended with code {code}{tail}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ", as the kernel does when memory runs out" if self.was_killed else ""
        return f"was ended by {name}{hint}{tail}"

    def memory_problem(self, memory_bytes: int, floor_bytes: int, flag: str) -> str:
        """Return which limit of memory was exceeded, "" if none.

        `memory_bytes`: most memory of the process, set by `flag`; 0: any. `floor_bytes`: least available memory of the
        machine; 0: any.
        """
        used = self.resident_bytes() if memory_bytes else 0
        if used > memory_bytes:
            return f"it took {used >> 20} MiB of memory, more than the {memory_bytes >> 20} MiB that it may ({flag})"
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
                        message = json.loads(line)
                        if isinstance(message, dict):
                            self._messages.put(message)
        finally:
            self._messages.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                if text:
                    self._stderr_lines.append(text[:_MAX_STDERR_LINE_LENGTH])


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
