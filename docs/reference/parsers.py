"""The commands of edge-server and their options, read from the argparse parsers and the settings of `serve`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from dataclasses import dataclass
from unittest import mock

from edge_server.cli.main import find_all_commands
from edge_server.config.server_config import DeclaredSettings
from edge_server.config.setting_sources import CONFIG_FLAG, PRINT_FLAG
from edge_server.plugin import own_plugins

COMMANDS = find_all_commands(own_plugins())
SETTINGS = DeclaredSettings(own_plugins())


@dataclass(frozen=True)
class Option:
    """An option, or a positional argument, which has no names.

    `value` is what stands for its value, "" if it takes none. Without `choices` a value may be a file.
    """

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Command:
    """A command, `words` such as ("fleet", "status"). `description` is empty for one that only has sub-commands."""

    words: tuple[str, ...]
    summary: str
    description: str
    options: tuple[Option, ...]


_DIRECTORIES = {"serve": (), "check": (Option((), "DIR ...", (), "Model repositories."),)}
"""Arguments that are not settings."""


class _ParserFound(Exception):
    """Carries the parser of a command out of its `run`."""


class _ActionRecorder(argparse.HelpFormatter):
    """Help formatter that keeps the options instead of formatting them."""

    recorded: list[argparse.Action]

    def add_argument(self, action: argparse.Action) -> None:
        type(self).recorded.append(action)


def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of a command's module."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _ParserFound(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            importlib.import_module(module).run([])
        except _ParserFound as found:
            parser: argparse.ArgumentParser = found.args[0]
            return parser
    raise RuntimeError(f"{module} parses no arguments")


def parsers_of(command: str) -> list[argparse.ArgumentParser]:
    """Return the parsers of a command; none for `serve` and `check`, whose options are the settings."""
    if command in ("serve", "check"):
        return []
    module = COMMANDS[command].module
    return [parser_of(name) for name in ((f"{module}_bridge", f"{module}_replay") if command == "ros" else (module,))]


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser, in the order of its help."""
    recorder = type("_Recorder", (_ActionRecorder,), {"recorded": []})
    formatter, parser.formatter_class = parser.formatter_class, recorder
    parser.format_help()
    parser.formatter_class = formatter
    return recorder.recorded


def inner_parsers(actions: list[argparse.Action]) -> dict[str, argparse.ArgumentParser]:
    """Return the sub-commands among the actions of a parser, by name."""
    return next((dict(action.choices) for action in actions if is_command(action)), {})  # type: ignore[arg-type]


def is_command(action: argparse.Action) -> bool:
    """Return whether the choices of an argument are sub-commands."""
    return isinstance(action.choices, dict) and all(
        isinstance(choice, argparse.ArgumentParser) for choice in action.choices.values()
    )


def shown_value(action: argparse.Action) -> str:
    """Return what stands for the value of an option, or for an argument."""
    shown = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    return " ".join(shown) if isinstance(shown, tuple) else str(shown)


def takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""
    # Python 3.13 stopped writing the default into the help of a BooleanOptionalAction.
    return " ".join(text.removesuffix(f" (default: {action.default})").split())


def commands() -> list[Command]:
    """Return all commands, a command with sub-commands before these."""
    found = []
    for name, command in COMMANDS.items():
        summary, parsers = command.summary, parsers_of(name)
        if name in ("serve", "check"):
            found.append(Command((name,), summary, _description_of(name), (*_DIRECTORIES[name], *_settings())))
        elif name == "ros":
            found.append(Command((name,), summary, "", ()))
            for parser in parsers:
                found += _from_parser((name, parser.prog.split()[-1]), parser.description or "", parser)
        else:
            found += _from_parser((name,), summary, parsers[0])
    return found


def _from_parser(words: tuple[str, ...], summary: str, parser: argparse.ArgumentParser) -> list[Command]:
    actions = actions_of(parser)
    options = tuple(
        Option(
            tuple(action.option_strings),
            shown_value(action) if takes_value(action) else "",
            tuple(map(str, action.choices or ())),
            help_of(action, parser),
        )
        for action in actions
        if action.help != argparse.SUPPRESS and not is_command(action)
    )
    inner = inner_parsers(actions)
    found = [Command(words, summary, "" if inner else " ".join((parser.description or "").split()), options)]
    for name, sub in inner.items():
        found += _from_parser((*words, name), sub.description or summary, sub)
    return found


def _description_of(name: str) -> str:
    if name == "serve":
        return (
            "Flags override environment variables, which override the configuration file, which overrides the "
            "defaults. The server stops at SIGTERM or SIGINT: it finishes the requests that run, and ends with code 0."
        )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        importlib.import_module("edge_server.cli.check").run(["--help"])
    return " ".join(out.getvalue().partition("\n\n")[2].split())


def _settings() -> list[Option]:
    found = [Option((CONFIG_FLAG,), "path", (), "Configuration file in TOML.")]
    found.append(Option((PRINT_FLAG,), "", (), "Print the effective settings, each with its origin."))
    for setting in SETTINGS.settings:
        names = (setting.flag, *setting.aliases)
        value = setting.kind.metavar
        choices = tuple(value.split("|")) if "|" in value else ("true", "false") if value == "boolean" else ()
        found.append(Option(names, value, choices, setting.help))
    return [*found, Option(("--help",), "", (), "Print the options.")]
