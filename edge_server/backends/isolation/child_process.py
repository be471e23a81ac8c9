"""Start and end of a model's child process, its connection to the server, and the list of requests that the process has
not answered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_server.backends.base import Execution, ModelFile
from edge_server.backends.isolation.process_channel import Arena, Channel
from edge_server.backends.runtime_errors import file_title, log_with_traceback, message_line
from edge_server.child_command import child_command
from edge_server.core.request_response import Request
from edge_server.errors import LoadError

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0
"""Time that a process has to finalize its model before it is killed."""

_EXIT_CHECK_S = 0.01


class ModelChildProcess:
    """One process of `process_main`. Messages go both ways through `channel`.

    Processes that the model starts are in the group of this one and are killed when it has ended. Only those that leave
    the group, such as by `setsid`, live on.
    """

    def __init__(self, file: ModelFile) -> None:
        """Start the process. Raises LoadError when the system refuses a process or file descriptors."""
        self._title = file_title(file)
        self._is_closed = False
        self._lock = threading.Lock()
        """Held to kill the process and to ask for its exit code, after which its id may become another's."""
        try:
            with contextlib.ExitStack() as undo:
                socket_here, socket_there = map(undo.enter_context, socket.socketpair())
                own = undo.enter_context(contextlib.closing(Arena()))
                other = undo.enter_context(contextlib.closing(Arena()))
                fds = (socket_there.fileno(), other.fd, own.fd)
                module = "edge_server.backends.isolation.process_main"
                try:
                    # Spawned, not forked: this process has threads, and runtimes that do not survive a fork.
                    self._process = subprocess.Popen(
                        child_command(module, *map(str, fds), str(log_level())),
                        stdin=subprocess.DEVNULL,
                        pass_fds=fds,
                        start_new_session=True,
                    )
                finally:
                    socket_there.close()
                undo.pop_all()
        except OSError as error:
            failure = LoadError(f"{self._title}: a process for it cannot be started: {message_line(error)}")
        else:
            # Only the process writes to it. Here its file descriptor stays open for the reader.
            other.unmap()
            self.channel = Channel(socket_here, own, other.fd)
            return
        raise failure

    @property
    def pid(self) -> int:
        return self._process.pid

    def loaded_bytes(self) -> int:
        """Return how much the process has read so far, plus its highest memory; 0 if the system does not tell."""
        try:
            io = Path(f"/proc/{self.pid}/io").read_text()
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        read, peak_kib = (
            re.search(r"^rchar: (\d+)", io, re.MULTILINE),
            re.search(r"^VmHWM:\s*(\d+)", status, re.MULTILINE),
        )
        return (int(read[1]) if read else 0) + (int(peak_kib[1]) << 10 if peak_kib else 0)

    def send(self, message: tuple[Any, ...]) -> int | None:
        """Send a message, unless the process has ended, and return the result of `Channel.send`.

        If the message cannot be sent although the process lives, the connection is cut. The receiving thread then fails
        all pending requests.
        """
        try:
            return self.channel.send(message)
        except ConnectionError:
            return None
        except (OSError, ValueError) as error:
            self._cut_after(error)
            return None

    def send_within(self, message: tuple[Any, ...], limit_s: float) -> bool:
        """Send a message without arrays as `send` does. Return False if the process reads nothing for `limit_s`."""
        try:
            return self.channel.send_within(message, limit_s)
        except ConnectionError:
            return True
        except (OSError, ValueError) as error:
            self._cut_after(error)
            return True

    def _cut_after(self, error: Exception) -> None:
        # After `close` such errors are expected: the connection and its memory are released.
        if not self._is_closed:
            log.error("%s: nothing can be sent to its process any more: %s", self._title, message_line(error))
            self.channel.cut()

    def kill(self) -> None:
        """Kill the process and those that its model started."""
        # ProcessLookupError: this program ignores SIGCHLD, so that the system keeps no process that has ended.
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)

    def wait_or_kill(self) -> bool:
        """Wait for the exit, and kill what is left of the group. Return False if the process did not exit within
        EXIT_TIMEOUT_S and was killed."""
        end_s = time.monotonic() + EXIT_TIMEOUT_S
        while not (has_exited := self._has_exited(os.WNOHANG)) and time.monotonic() < end_s:
            time.sleep(_EXIT_CHECK_S)
        self.kill()
        self._has_exited()
        with self._lock:
            self._process.wait()
        return has_exited

    def _has_exited(self, options: int = 0) -> bool:
        """Wait for the exit, with os.WNOHANG only look. The process keeps its id, which is that of its group."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options) is not None
        except ChildProcessError:  # another thread has asked for the exit code
            return True

    def wait_for_exit(self) -> str:
        """Wait for the exit of a process whose connection broke, and return how it ended, as a part of a sentence."""
        if not self.wait_or_kill():
            return "closed its connection without ending, and was killed"
        code = self._process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by signal {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def close(self) -> None:
        """Release the connection and its memory. Call it after the exit, when no thread receives any more."""
        self._is_closed = True
        self.channel.close()


def log_level() -> int:
    """Return the lowest level at which models may log. It may change while the server runs."""
    return logging.getLogger("edge_server.model").getEffectiveLevel()


def log_from_process(name: str, level: int, text: str, traceback: str) -> None:
    """Log a record that a child process sent: its logger, level, message, and its traceback or ""."""
    log_with_traceback(logging.getLogger(name), level, text, traceback)


class ProcessEnded(Exception):
    """The process had ended before it got the batch."""


class BatchInProcess:
    """A batch that was sent to the process. `taken` is set when the model's `execute` has returned."""

    __slots__ = ("left", "number", "offset", "taken")

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.taken = threading.Event()
        self.left = count
        """Number of requests without a final response."""
        self.offset: int | None = None
        """Place of the inputs in shared memory, once it is known. It is freed when the last request is answered and
        `execute` has returned, because `execute` may read the inputs until then."""

    @property
    def is_done(self) -> bool:
        return self.left == 0 and self.taken.is_set()


class RequestsInProcess:
    """The requests that the process holds, by their numbers in messages, until the final response. Thread-safe."""

    def __init__(self, arena: Arena) -> None:
        self.is_over = False
        """Whether the process has ended. Nothing is sent to it any more then."""
        self._arena = arena
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Execution, BatchInProcess]] = {}
        self._batches: dict[int, BatchInProcess] = {}
        """Batches whose `execute` has not returned."""

    def add(self, executions: Sequence[Execution]) -> tuple[BatchInProcess, list[tuple[int, Request]]]:
        """Return a new batch, and its requests with their numbers as they are sent. Raises ProcessEnded."""
        batch = BatchInProcess(next(self._numbers), len(executions))
        numbered = [(next(self._numbers), execution) for execution in executions]
        with self._lock:
            if self.is_over:
                raise ProcessEnded
            self._batches[batch.number] = batch
            self._open.update((number, (execution, batch)) for number, execution in numbered)
        return batch, [
            (number, dataclasses.replace(item.request, release=None, targets=None, memo=None))
            for number, item in numbered
        ]

    def remove(self, batch: BatchInProcess) -> None:
        """Remove a batch that could not be sent."""
        with self._lock:
            self._batches.pop(batch.number, None)
            for number in [number for number, (_, other) in self._open.items() if other is batch]:
                del self._open[number]

    def set_offset(self, batch: BatchInProcess, offset: int) -> None:
        """Record the place of a batch's inputs. The batch may be answered already; the memory is freed then."""
        with self._lock:
            batch.offset = offset
            is_done = batch.is_done
        if is_done:
            self._arena.free(offset)

    def find(self, number: int, is_final: bool) -> Execution | None:
        """Return the execution that a response is for, None after its final response. `is_final` ends it."""
        with self._lock:
            found = self._open.pop(number, None) if is_final else self._open.get(number)
            if found is None:
                return None
            execution, batch = found
            batch.left -= is_final
            offset = batch.offset if batch.is_done else None
        if offset is not None:
            self._arena.free(offset)
        return execution

    def set_taken(self, number: int) -> None:
        """Wake the thread that waits for the model's `execute` to return for this batch."""
        with self._lock:
            batch = self._batches.pop(number, None)
            if batch is None:
                return
            batch.taken.set()
            offset = batch.offset if batch.is_done else None
        if offset is not None:
            self._arena.free(offset)

    def open_executions(self) -> dict[int, Execution]:
        with self._lock:
            return {number: execution for number, (execution, _) in self._open.items()}

    def end(self) -> tuple[list[Execution], list[BatchInProcess]]:
        """Refuse new batches. Return the requests without a final response, and the batches still in `execute`."""
        with self._lock:
            self.is_over = True
            left, self._open = [execution for execution, _ in self._open.values()], {}
            batches, self._batches = list(self._batches.values()), {}
        return left, batches
