"""The settings as text: --help, and --print-config in a form that --config reads back."""

from __future__ import annotations

import json
import re
import textwrap

from edge_server.config.load import ServeArguments
from edge_server.config.setting import CONFIG_FLAG, CONFIG_VARIABLE, Setting
from edge_server.config.slices import CacheSettings, RestrictedGroup, ServerConfig
from edge_server.config.sources import BACKENDS, PRINT_FLAG
from edge_server.config.table import SETTINGS

TITLES = {
    "repository": "Models",
    "backends": "Backends",
    "http": "HTTP",
    "grpc": "gRPC",
    "auth": "Access",
    "frames": "Frame streams",
    "metrics": "Metrics",
    "governor": "Governor",
    "rate_limit": "Rate limiter",
    "memory": "Shared memory",
    "cache": "Response cache",
    "engines": "TensorRT engines",
    "log": "Log",
    "trace": "Trace",
    "lifecycle": "Server",
}
_SECRET = "***"


def help_text() -> str:
    """Return the text of `serve --help`."""
    lines = [
        "usage: edge-server serve --model-repository=FOLDER [--flag=value ...]",
        "",
        "A flag goes before its environment variable, that before the configuration file, that before the default.",
        "An empty variable counts as not set. A boolean flag may stand without a value, meaning true.",
        "",
        f"  {CONFIG_FLAG} <path>",
        f"        Configuration file in TOML. [{CONFIG_VARIABLE}]",
        f"  {PRINT_FLAG}",
        "        Print the settings in force, and where each comes from, as a configuration file.",
        "  --help",
    ]
    defaults = ServerConfig()
    section = ""
    for setting in SETTINGS:
        if setting.section != section:
            section = setting.section
            lines += ["", f"{TITLES[section]} (table [{section}] of a configuration file):"]
        lines += _help_lines(setting, defaults)
    return "\n".join(lines) + "\n"


def _help_lines(setting: Setting, defaults: ServerConfig) -> list[str]:
    lines = [f"  {setting.flag} <{setting.kind.metavar}>"]
    lines += textwrap.wrap(setting.help, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    variable = setting.variable
    if setting.separator:
        between = "spaces" if setting.separator == " " else f"'{setting.separator}'"
        variable += f", {between} in between"
    key = f"; {setting.name}" if setting.field else ""
    default = default_text(setting, defaults)
    shown = f"; default {default}" if default else ""
    return [*lines, f"        [{variable}{key}{shown}]"]


def default_text(setting: Setting, defaults: ServerConfig) -> str:
    """Return the default of a setting as TOML, "" if it is empty."""
    default = _toml(_value(defaults, setting)) if setting.field else ""
    return "" if default in ('""', "[]") else default


def describe(arguments: ServeArguments) -> str:
    """Return the effective settings as TOML, each with its origin as a comment. Secrets are masked."""
    lines: list[str] = []
    section = ""
    for setting in SETTINGS:
        if setting.name == BACKENDS:
            continue
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        origin = arguments.origins.get(setting.name, "default")
        lines.append(f"{setting.field} = {_toml(_value(arguments.config, setting))}  # {origin}")
    for backend, settings in sorted(arguments.config.backends.items()):
        name = f"backends.{_key(backend)}" if backend else "backends"
        lines += ["", f"[{name}]  # {arguments.origins[BACKENDS]}"]
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in sorted(settings.items())]
    return "\n".join(lines[1:]) + "\n"


def _value(config: ServerConfig, setting: Setting) -> object:
    value: object = getattr(getattr(config, setting.section), setting.field)
    return value


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else json.dumps(word, ensure_ascii=False)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, RestrictedGroup):
        value = f"{','.join(value.categories)}:{value.key}={_SECRET}"
    elif isinstance(value, CacheSettings):
        pairs = [f"{key}={_SECRET if key == 'password' else text}" for key, text in value.values]
        value = ",".join([value.cache, *pairs])
    elif isinstance(value, re.Pattern):
        value = value.pattern if value.flags & re.IGNORECASE else f"(?-i){value.pattern}"
    elif value is None:
        value = ""
    return json.dumps(value, ensure_ascii=False)
