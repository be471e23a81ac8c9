"""Child process of an isolated model: start, connection, and exit reason."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
from typing import Any

from edge_server.backends.base import ModelFile
from edge_server.backends.python.process_channel import Channel
from edge_server.backends.python.shared_arena import Arena
from edge_server.backends.runtime_library import file_title, words
from edge_server.errors import LoadError

log = logging.getLogger(__name__)

END_S = 10.0
"""How long a process may take to finalize its model before it is killed."""


class ModelChildProcess:
    """One process of this package's `worker`, spoken to by messages through `channel`."""

    def __init__(self, file: ModelFile) -> None:
        """Start it. Raises LoadError when the system does not give a process, or the descriptors that it takes."""
        self._title = file_title(file)
        self._is_closed = False
        try:
            with contextlib.ExitStack() as undo:
                mine, theirs = map(undo.enter_context, socket.socketpair())
                own = undo.enter_context(contextlib.closing(Arena()))
                other = undo.enter_context(contextlib.closing(Arena()))
                self._process = start_process(own, other, theirs)
                undo.pop_all()
        except OSError as error:
            failure = LoadError(f"{self._title}: a process for it cannot be started: {words(error)}")
        else:
            # Only the process writes to it; here it stays open as the reader's file descriptor.
            other.forget()
            self.channel = Channel(mine, own, other.fd)
            return
        raise failure

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: tuple[Any, ...]) -> int | None:
        """Send, unless the process is gone, and return what the channel returns.

        A message that cannot be sent to a living process costs the process: its connection is cut, so that whoever
        receives answers for everything that waits.
        """
        try:
            return self.channel.send(message)
        except ConnectionError:
            return None
        except (OSError, ValueError) as error:
            self._give_up(error)
            return None

    def send_within(self, message: tuple[Any, ...], limit_s: float) -> bool:
        """Send a message without arrays as `send` does, or return False: the process has read nothing for so long."""
        try:
            return self.channel.send_within(message, limit_s)
        except ConnectionError:
            return True
        except (OSError, ValueError) as error:
            self._give_up(error)
            return True

    def _give_up(self, error: Exception) -> None:
        # Once closed, the connection and its memory are gone, which nobody needs to hear of.
        if not self._is_closed:
            log.error("%s: nothing can be sent to its process any more: %s", self._title, words(error))
            self.channel.cut()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> bool:
        """Wait for its end. False: it did not end by itself in time, and was killed."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def end(self) -> str:
        """Wait for the end of a process whose connection broke, and return how it ended."""
        if not self.wait():
            return "closed its connection without ending, and was killed"
        code = self._process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by signal {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def close(self) -> None:
        """Give the connection and its memory back. The process has ended, and nobody receives any more."""
        self._is_closed = True
        self.channel.close()


def start_process(arena: Arena, other: Arena, line: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process with the other end of a connection, which is given up here. Spawned, not forked: this process
    has threads, and runtimes that do not survive a fork."""
    fds = (line.fileno(), other.fd, arena.fd)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "edge_server.backends.python.process_main", *map(str, fds), str(log_level())],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
    finally:
        line.close()


def log_level() -> int:
    """Return the least level that models may log at, which may change while the server runs."""
    return logging.getLogger("edge_server.model").getEffectiveLevel()
