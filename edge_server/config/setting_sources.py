"""Readers of the values of settings from the command-line flags, the environment variables and the TOML file.

Each reader returns texts by setting name, so that one parser converts them all. Unknown names are errors: a misspelt
limit that silently does nothing is found too late on a machine in the field.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import cast

from edge_server.config.server_config import DeclaredSettings
from edge_server.config.setting import VARIABLE_PREFIX, ConfigError, Setting, nearest
from edge_server.config.toml_file import read_toml
from edge_server.config.triton_flag_compatibility import DEPRECATED, IGNORED, TRACE_FLAGS
from edge_server.record import record

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = VARIABLE_PREFIX + "CONFIG"
PRINT_FLAG = "--print-config"
BACKENDS = "backends."

_OTHER_FLAGS = (*IGNORED, *TRACE_FLAGS, CONFIG_FLAG, PRINT_FLAG, "--help")

# Variables that Kubernetes sets in every container for a service called "edge-server".
_SERVICE_VARIABLE = re.compile(
    VARIABLE_PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

# Paths between colons. Addresses among them contain colons too: "/a:s3://host:9000/b:/c", "oci://host/b:v1@sha256:12".
_PATHS = re.compile(
    r"oci://(?:https?://)?[^/:]*(?::[0-9]+)?/[^:@]*(?::(?![a-z0-9+.-]+://)\w[\w.-]*)?(?:@sha256:[0-9a-f]*)?"
    r"|(?:[a-z][a-z0-9+.-]*://)+[^/:]*(?::[0-9]+)?[^:]*|[^:]+"
)


@record(frozen=True, slots=True)
class Given:
    """Texts given for one setting in one place. `origin` names the place for the operator."""

    texts: tuple[str, ...]
    origin: str


@record(slots=True)
class Flags:
    """Parsed command line. `warnings` are sentences for the log."""

    given: dict[str, Given] = field(default_factory=dict)
    config_file: str = ""
    asks_help: bool = False
    asks_print: bool = False
    warnings: list[str] = field(default_factory=list)


def process_environment() -> dict[str, str]:
    """Return a copy of the environment. No other function of the server reads it."""
    return dict(os.environ)


def set_library_defaults() -> None:
    """Set the environment variables that gRPC reads at its import, unless they are set.

    gRPC's fork handlers print a line whenever a library starts a process. Only programs that fork while serving need
    them.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def read_flags(argv: Sequence[str], declared: DeclaredSettings) -> Flags:
    """Read `--flag=value`, `--flag value` and, if the kind allows it, `--flag` alone.

    A value that starts with "--" needs the first form. A repeated flag adds a value to a repeatable setting, and
    replaces the value of any other. Raises ConfigError.
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
            text = f"{TRACE_FLAGS[flag]}={_required(flag, value, rest)}"
            _read_flag(flags, declared.by_flag["--trace-config"], "--trace-config", text, rest)
        elif flag in declared.by_flag:
            _read_flag(flags, declared.by_flag[flag], flag, value, rest)
        elif token.startswith("-"):
            hint = nearest(flag, (*declared.by_flag, *_OTHER_FLAGS)) or "; edge-server serve --help lists all"
            raise ConfigError(f"unknown flag {flag}{hint}")
        else:
            more = f", did you mean '--model-repository={token}'?" if os.path.isdir(token) else ""
            raise ConfigError(f"unexpected argument '{token}'{more}")
    return flags


def _read_flag(flags: Flags, setting: Setting, flag: str, value: str | None, rest: deque[str]) -> None:
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


def read_environment(environ: Mapping[str, str], declared: DeclaredSettings) -> dict[str, Given]:
    """Read the variables EDGE_SERVER_*. Empty ones count as not set. Raises ConfigError."""
    given = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        if _SERVICE_VARIABLE.fullmatch(variable):
            continue
        setting = declared.by_variable.get(variable)
        if setting is None:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, declared.by_variable)}")
        if setting.separator == ":":
            parts = _PATHS.findall(text)
        else:
            parts = text.split(setting.separator) if setting.separator else [text]
        texts = tuple(part.strip() if setting.separator else part for part in parts)
        if any(texts):
            given[setting.name] = Given(tuple(filter(None, texts)), f"environment {variable}")
    return given


def read_file(path: str, declared: DeclaredSettings) -> dict[str, Given]:
    """Read a TOML file. Its tables and keys are those of the declared settings. Raises ConfigError."""
    document = read_toml(path, CONFIG_FLAG)
    given: dict[str, Given] = {}
    for section, table in document.items():
        if section not in declared.titles and not isinstance(table, dict):
            names_in_tables = [name for name in declared.by_name if name.endswith(f".{section}")]
            hint = f", did you mean {' or '.join(names_in_tables)}?" if names_in_tables else ""
            raise ConfigError(f"{path}: key {section} is in no table{hint}")
        if section not in declared.titles:
            raise ConfigError(f"{path}: unknown table [{section}]{nearest(section, declared.titles)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} must be a table [{section}]")
        if section + "." == BACKENDS:
            given[BACKENDS] = Given(tuple(_backend_texts(path, table)), f"file {path}")
            continue
        names = [item.name for item in declared.settings if item.section == section]
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in names:
                raise ConfigError(f"{path}: unknown key {name}{nearest(name, names)}")
            setting = declared.by_name[name]
            values = cast("list[object]", value) if setting.separator and isinstance(value, list) else [value]
            given[name] = Given(tuple(_toml_text(path, setting, item) for item in values), f"file {path}")
    return given


def _backend_texts(path: str, table: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys of [backends] and [backends.NAME] in the form of --backend-config."""
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{_checked_backend_key(path, key)}={_scalar_text(path, BACKENDS + key, value)}"
            continue
        for inner, scalar in cast("dict[str, object]", value).items():
            text = _scalar_text(path, f"{BACKENDS}{key}.{inner}", scalar)
            yield f"{_checked_backend_key(path, key)},{_checked_backend_key(path, inner)}={text}"


def _checked_backend_key(path: str, word: str) -> str:
    if not word or "," in word or "=" in word:
        raise ConfigError(f"{path}: {BACKENDS}{word}: names of backends and settings have no ',' or '='")
    return word


def _toml_text(path: str, setting: Setting, value: object) -> str:
    # type() instead of isinstance(): a boolean is an int in Python, but not in TOML.
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
