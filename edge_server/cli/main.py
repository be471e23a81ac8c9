"""Main program `edge-server`: runs a command and turns its errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from edge_server import __version__
from edge_server.config import ConfigError, nearest
from edge_server.core.exit_code import ExitCode
from edge_server.errors import EdgeServerError

COMMANDS = {
    "serve": "serve the models of one or more repositories until told to stop",
    "check": "load and warm every model of a repository, run one inference each, and print a table",
    "optimize": "try every runtime and precision for a model on this box, compare them, and write down the best",
    "doctor": "look at this box: what it is, what keeps models from being served well on it, and what to do about it",
    "status": "ask a running server what it serves, and print a table",
    "models": "ask a running server for all versions of its models, their states and why",
    "events": "follow what happens in a running server",
    "sign": "list and sign the files of models, for servers that serve nothing unsigned",
    "rollback": "pin a model of a running server to an earlier version, or undo that",
    "stream": "send a video, pictures, a camera or a test pattern through a model, and watch the figures",
    "governor": "try the law that keeps a box within its heat: on a simulated box, or on recorded temperatures",
    "chat": "talk to a language model of a running server",
    "perf": "measure a model of a running server under load: latency, throughput, and where the time goes",
    "analyze": "search the configuration that serves a model best on this box, within limits of latency and memory",
    "ros": "bridge camera topics of ROS 1 and ROS 2, or recordings of them, to the models of a running server",
}
"""Command -> what it does; each is `run(arguments) -> exit code` in the module of its name."""

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What no command can help: told in a line, where any other error of the system is a fault of ours with its stack."""

USAGE = "usage: edge-server COMMAND [OPTIONS]\n\n" + "\n".join(
    f"  {name:9} {text}" for name, text in COMMANDS.items()
) + "\n\n  edge-server COMMAND --help tells the options; edge-server --version tells the version."  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Whoever reads the output may leave at any time, as `head` does: the command ends without a word then, with the code
    that a shell gives a tool which SIGPIPE has ended. So does one that Ctrl-C ends, with one line and SIGINT's code.
    """
    try:
        try:
            return _run(arguments)
        finally:
            # What is buffered is written here and not by the interpreter's end, which would complain.
            _flush()
    except OSError as error:
        if error.errno in _OF_DISKS:
            print(f"edge-server: cannot write the output: {error.strerror}", file=sys.stderr)
            _drop(sys.stdout)
            return ExitCode.FAILED
        if not isinstance(error, BrokenPipeError):
            raise
        left = [stream for stream in (sys.stdout, sys.stderr) if _is_left(stream)]
        if not left:
            raise
        for stream in left:
            _drop(stream)
        return 128 + signal.SIGPIPE


def _drop(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: the interpreter's end would try to write it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _is_left(stream: TextIO | None) -> bool:
    """Return whether this is a pipe or a socket that nobody reads any more."""
    if stream is None:
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(told & (select.POLLERR | select.POLLHUP) for _, told in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return ExitCode.OK if arguments else ExitCode.USAGE
    if arguments[0] == "--version":
        print(f"edge-server {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        # One line where a letter is wrong; who does not know the commands is shown them.
        more = nearest(name, COMMANDS) or f"\n{USAGE}"
        print(f"edge-server: there is no command '{name}'{more}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        code: int = importlib.import_module(f"edge_server.cli.{name}").run(rest)
    except (ConfigError, EdgeServerError) as error:
        print(f"edge-server {name}: {error}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.CANNOT_START
    except OSError as error:
        if error.errno not in _OF_DISKS:
            raise
        where = f"'{error.filename}': " if error.filename else ""
        print(f"edge-server {name}: cannot write: {where}{error.strerror}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print(f"edge-server {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code
