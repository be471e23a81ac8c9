"""Main program `edge-server`: runs a command and reports its errors as one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from edge_server.config import ConfigError, nearest
from edge_server.core.exit_code import ExitCode
from edge_server.errors import EdgeServerError
from edge_server.plugin import COMMAND_GROUPS, Command, Plugin, find_plugins, own_plugins
from edge_server.version import __version__

COMMANDS = tuple(
    Command(name, summary, f"edge_server.cli.{name}", group)
    for group, summaries in (
        (
            "Models",
            {
                "serve": "serve the models of one or more repositories until stopped",
                "check": "load and warm up every model of a repository, run one inference each, and print a table",
                "sign": "list and sign the files of models, for servers that accept only signed models",
            },
        ),
        (
            "A running server",
            {
                "status": "show the models of a running server",
                "models": "show all versions of the models of a running server, with states and reasons",
                "events": "follow the events of a running server",
                "rollback": "pin a model of a running server to an earlier version, or remove the pin",
            },
        ),
        ("Shell", {"completion": "print the completion of commands and options for bash, zsh or fish"}),
    )
    for name, summary in summaries.items()
)
"""The commands of the core."""

_OTHER_COMMANDS = {
    "list": "models",
    "ls": "models",
    "ps": "status",
    "run": "chat",
    "show": "status -v",
    "start": "serve",
}
"""Commands of other servers and container tools -> those that do the same here."""

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of the environment, reported in one line. Any other OSError is a defect and keeps its stack trace."""


def find_all_commands(plugins: Sequence[Plugin]) -> dict[str, Command]:
    """Return the commands of the core and of plugins, by name."""
    return {command.name: command for command in (*COMMANDS, *(item for plugin in plugins for item in plugin.commands))}


def usage(commands: Mapping[str, Command]) -> str:
    """Return the commands under the headings of their groups, in 80 columns."""
    lines: list[str] = []
    for group in dict.fromkeys((*COMMAND_GROUPS, *(command.group for command in commands.values()))):
        members = [command for command in commands.values() if command.group == group]
        lines += ["", f"{group}:"] if members else []
        for command in members:
            lines += textwrap.wrap(
                command.summary, 80, initial_indent=f"  {command.name:9} ", subsequent_indent=" " * 12
            )
    return "\n".join(
        [
            "usage: edge-server COMMAND [OPTIONS]",
            *lines,
            "",
            "edge-server COMMAND --help shows the options of a command.",
            "edge-server --version shows the version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    If the reader of the output closes the pipe, as `head` does, the command ends silently with the shell's exit code
    for SIGPIPE. After Ctrl-C it ends with one line and the exit code for SIGINT.
    """
    try:
        try:
            return _run(arguments)
        finally:
            # Flush here, because a failing flush at interpreter exit prints a traceback.
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            print(f"edge-server: cannot write the output: {error.strerror}", file=sys.stderr)
            _discard_output(sys.stdout)
            return ExitCode.FAILED
        if not isinstance(error, BrokenPipeError):
            raise
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_reader_gone(stream)]
        if not closed:
            raise
        for stream in closed:
            _discard_output(stream)
        return 128 + signal.SIGPIPE


def _discard_output(stream: TextIO) -> None:
    """Redirect the stream to /dev/null, because the interpreter writes the buffered rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_reader_gone(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe or socket whose reader has closed it."""
    if stream is None:
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
        # As Triton's Python backend has it: a model's argparse would read the server's options.
        sys.argv = [""]
    arguments = list(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(find_all_commands(find_plugins().plugins)))
        return ExitCode.OK if arguments else ExitCode.USAGE
    if arguments[0] == "--version":
        print(f"edge-server {__version__}")
        return 0
    name, *rest = arguments
    command = _find_command(name)
    if command is None:
        commands = find_all_commands(find_plugins().plugins)
        other = _OTHER_COMMANDS.get(name)
        hint = f", did you mean '{other}'?" if other else nearest(name, commands) or "; edge-server --help lists all"
        print(f"edge-server: there is no command '{name}'{hint}", file=sys.stderr)
        return ExitCode.USAGE
    try:
        code: int = importlib.import_module(command.module).run(rest)
    except (ConfigError, EdgeServerError) as error:
        print(f"edge-server {name}: {error}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.CANNOT_START
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f"'{error.filename}': " if error.filename else ""
        print(f"edge-server {name}: cannot write: {where}{error.strerror}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print(f"edge-server {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _find_command(name: str) -> Command | None:
    """Look where it costs least first: in the core, in this package's plugins, in other packages."""
    places: tuple[Callable[[], Sequence[Plugin]], ...] = (tuple, own_plugins, lambda: find_plugins().plugins)
    for plugins in places:
        command = find_all_commands(plugins()).get(name)
        if command is not None:
            return command
    return None
