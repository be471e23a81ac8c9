"""The three places settings are read from: flags, environment variables, a TOML file.

Each reader gives texts by setting name, so that every value goes through one parser whatever its place. Unknown names
are errors: a misspelt limit that silently does nothing is found too late on a machine in the field.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from edge_server.config.kinds import ConfigError, nearest
from edge_server.config.setting import CONFIG_FLAG, CONFIG_VARIABLE, VARIABLE_PREFIX, Setting
from edge_server.config.table import SETTINGS
from edge_server.config.triton_flags import DEPRECATED, IGNORED, TRACE_FLAGS

PRINT_FLAG = "--print-config"
BACKENDS = "backends."

_BY_NAME = {setting.name: setting for setting in SETTINGS}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}
_BY_FLAG = {flag: setting for setting in SETTINGS for flag in (setting.flag, *setting.aliases)}
_ALL_FLAGS = (*_BY_FLAG, *IGNORED, *TRACE_FLAGS, CONFIG_FLAG, PRINT_FLAG, "--help")
_SECTIONS = tuple(dict.fromkeys(setting.section for setting in SETTINGS))

# What Kubernetes puts into every container's environment about a service called "edge-server".
_SERVICE_VARIABLE = re.compile(
    VARIABLE_PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


# Paths between colons, some of them addresses with colons of their own: "/a:s3://host:9000/b:/c".
_PATHS = re.compile(r"(?:[a-z][a-z0-9+.-]*://)+[^/:]*(?::[0-9]+)?[^:]*|[^:]+")


@dataclass(frozen=True, slots=True)
class Given:
    """The texts given for one setting in one place, and how an operator would find that place."""

    texts: tuple[str, ...]
    origin: str


@dataclass(slots=True)
class Flags:
    """What the command line said. `warnings` are sentences for the log."""

    given: dict[str, Given] = field(default_factory=dict)
    config_file: str = ""
    asks_help: bool = False
    asks_print: bool = False
    warnings: list[str] = field(default_factory=list)


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment: the one place that reads it."""
    return dict(os.environ)


def set_library_defaults() -> None:
    """Set what gRPC reads from the environment when it is first imported, unless the operator has set it.

    Its fork handlers are for programs that fork while serving; this one does not, and they print a line whenever a
    library starts a helper process.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def read_flags(argv: Sequence[str]) -> Flags:
    """Read `--flag=value`, `--flag value` and, where the kind allows, `--flag` alone.

    A value that starts with "--" needs the first form. A repeated flag adds to a repeatable setting and otherwise
    replaces what came before. Raises ConfigError.
    """
    flags = Flags()
    rest = deque(argv)
    while rest:
        token = rest.popleft()
        flag, equals, inline = token.partition("=")
        value = inline if equals else None
        if token in ("-h", "--help"):
            flags.asks_help = True
        elif flag == PRINT_FLAG:
            flags.asks_print = True
        elif flag == CONFIG_FLAG:
            flags.config_file = _required(flag, value, rest)
        elif flag in IGNORED:
            if value is None and rest and not rest[0].startswith("-"):
                rest.popleft()
            flags.warnings.append(f"{flag} is ignored: {IGNORED[flag]}")
        elif flag in TRACE_FLAGS:
            flags.warnings.append(f"{flag} is deprecated, use --trace-config {TRACE_FLAGS[flag]}=...")
            _read_flag(flags, "--trace-config", f"{TRACE_FLAGS[flag]}={_required(flag, value, rest)}", rest)
        elif flag in _BY_FLAG:
            _read_flag(flags, flag, value, rest)
        elif token.startswith("-"):
            raise ConfigError(f"unknown flag {flag}{nearest(flag, _ALL_FLAGS)}")
        else:
            more = f", did you mean '--model-repository={token}'?" if os.path.isdir(token) else ""
            raise ConfigError(f"unexpected argument '{token}'{more}")
    return flags


def _read_flag(flags: Flags, flag: str, value: str | None, rest: deque[str]) -> None:
    setting = _BY_FLAG[flag]
    if value is None and setting.kind.may_stand_alone:
        value = rest.popleft() if rest and _parses(setting, rest[0]) else "true"
    text = _required(flag, value, rest)
    if flag in DEPRECATED:
        flags.warnings.append(f"{flag} is deprecated, use {DEPRECATED[flag]}")
    before = flags.given.get(setting.name)
    earlier = before.texts if before and setting.separator else ()
    flags.given[setting.name] = Given((*earlier, text), f"flag {flag}")


def _parses(setting: Setting, text: str) -> bool:
    try:
        setting.kind.parse(text)
    except ValueError:
        return False
    return True


def _required(flag: str, value: str | None, rest: deque[str]) -> str:
    if value is not None:
        return value
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{flag} needs a value")
    return rest.popleft()


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Read EDGE_SERVER_*; a variable that is set but empty counts as not set. Raises ConfigError."""
    given = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if _SERVICE_VARIABLE.fullmatch(variable):
            continue
        setting = _BY_VARIABLE.get(variable)
        if setting is None:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, _BY_VARIABLE)}")
        texts = _split(setting, text)
        if texts:
            given[setting.name] = Given(texts, f"environment {variable}")
    return given


def _split(setting: Setting, text: str) -> tuple[str, ...]:
    if not setting.separator:
        return (text,) if text else ()
    parts = _PATHS.findall(text) if setting.separator == ":" else text.split(setting.separator)
    return tuple(part.strip() for part in parts if part.strip())


def read_file(path: str) -> dict[str, Given]:
    """Read a TOML file whose tables are slices and whose keys are fields. Raises ConfigError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG}: cannot read '{path}': {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FLAG}: '{path}' is not TOML: {error}") from error
    given: dict[str, Given] = {}
    for section, table in document.items():
        if section not in _SECTIONS and not isinstance(table, dict):
            homes = [item.name for item in SETTINGS if item.name == f"{item.section}.{section}"]
            hint = f", did you mean {' or '.join(homes)}?" if homes else ""
            raise ConfigError(f"{path}: key {section} is in no table{hint}")
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown table [{section}]{nearest(section, _SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a table [{section}]")
        if section + "." == BACKENDS:
            given[BACKENDS] = Given(tuple(_backend_texts(path, table)), f"file {path}")
            continue
        given.update(_section_texts(path, section, table))
    return given


def _section_texts(path: str, section: str, table: Mapping[str, object]) -> Iterator[tuple[str, Given]]:
    names = [setting.name for setting in SETTINGS if setting.section == section]
    for key, value in table.items():
        name = f"{section}.{key}"
        if name not in names:
            raise ConfigError(f"{path}: unknown key {name}{nearest(name, names)}")
        setting = _BY_NAME[name]
        values = cast("list[object]", value) if setting.separator and isinstance(value, list) else [value]
        yield name, Given(tuple(_toml_text(path, setting, item) for item in values), f"file {path}")


def _backend_texts(path: str, table: Mapping[str, object]) -> Iterator[str]:
    """Spell [backends] and [backends.NAME] as --backend-config would be."""
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{_backend_word(path, key)}={_scalar_text(path, BACKENDS + key, value)}"
            continue
        for inner, scalar in cast("dict[str, object]", value).items():
            text = _scalar_text(path, f"{BACKENDS}{key}.{inner}", scalar)
            yield f"{_backend_word(path, key)},{_backend_word(path, inner)}={text}"


def _backend_word(path: str, word: str) -> str:
    if not word or "," in word or "=" in word:
        raise ConfigError(f"{path}: {BACKENDS}{word}: names of backends and settings have no ',' or '='")
    return word


def _toml_text(path: str, setting: Setting, value: object) -> str:
    # type() and not isinstance(): a boolean is an int to Python, but not to the operator.
    if type(value) not in setting.kind.toml_types:
        given = type(value).__name__
        expected = " or ".join(kind.__name__ for kind in setting.kind.toml_types)
        raise ConfigError(f"{path}: {setting.name}: expected {expected}, got {given}")
    return _scalar_text(path, setting.name, value)


def _scalar_text(path: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"{path}: {name}: expected a string, number or boolean, got {type(value).__name__}")
