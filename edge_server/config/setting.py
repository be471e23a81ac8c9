"""Classes that declare a setting: a dataclass field with its flag, its help text, and the parser of its value.

The environment variable follows from the flag, the TOML key from the field's name. A kind turns the text of a flag,
variable or TOML key into a value and checks its range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from edge_server.errors import SUGGESTION
from edge_server.record import record

T = TypeVar("T")

VARIABLE_PREFIX = "EDGE_SERVER_"

SHOWN_SECRET = "***"
"""Stands for a secret in --print-config."""


class ConfigError(Exception):
    """The settings cannot be used. The message names the setting and where it was given."""


@record(frozen=True, slots=True)
class Kind:
    """Kind of value. `parse` raises ValueError with the expected form. `toml_types`: types allowed in a TOML file.

    `may_stand_alone`: a flag without a value means "true". `is_secret`: error messages do not repeat the text.
    `show` returns a value as --print-config writes it, without secrets; None: as it is.
    """

    metavar: str
    parse: Callable[[str], object]
    toml_types: tuple[type, ...] = (str,)
    may_stand_alone: bool = False
    is_secret: bool = False
    show: Callable[[Any], object] | None = None


@record(frozen=True, slots=True)
class Setting:
    """One setting. `name` is TABLE.KEY of the TOML file; the key of `--backend-config` is empty.

    `default` is a value, or a function that returns it if it depends on the machine. A setting with a `separator` is
    repeatable; the separator stands between the values in its environment variable. `aliases` are other flags for it.
    `cache_folder`: an empty value becomes this folder, in the cache folder of the service manager or the user.
    Plugins declare the parameters of models in the same form: the flag is the key in config.pbtxt, the name the field.
    """

    name: str
    default: object
    flag: str
    kind: Kind
    help: str
    separator: str
    aliases: tuple[str, ...]
    cache_folder: str

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.flag.removeprefix("--").upper().replace("-", "_")

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        return self.name.partition(".")[2]


def setting(
    default: T | Callable[[], Any],
    flag: str,
    kind: Kind,
    help: str,
    *,
    separator: str = "",
    aliases: tuple[str, ...] = (),
    cache_folder: str = "",
    title: str = "",
) -> T:
    """Return a dataclass field that declares a setting; see Setting. `title`: heading, if it is a table of its own."""
    declaration = {
        "flag": flag, "kind": kind, "help": help, "separator": separator, "aliases": aliases,
        "cache_folder": cache_folder,
    }  # fmt: skip
    metadata = {"setting": declaration, "title": title}
    if callable(default):
        made: Any = field(default_factory=default, metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    return made  # type: ignore[no-any-return]


def declared_setting(name: str, item: Field[Any]) -> Setting:
    """Return the setting that a dataclass field declares."""
    default = item.default if item.default_factory is MISSING else item.default_factory
    return Setting(name, default, **item.metadata["setting"])


@record(frozen=True, slots=True)
class SettingTable:
    """Table of settings: its name in the TOML file, its heading in --help, and the dataclass of its settings."""

    name: str
    title: str
    settings: type[Any]

    def declared(self) -> list[Setting]:
        return [
            declared_setting(f"{self.name}.{item.name}", item)
            for item in fields(self.settings)
            if "setting" in item.metadata
        ]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` with the nearest spelling, or "" if none is near or the word is known.

    A beginning of at least 3 letters is nearer than other spellings. Upper and lower case count as the same.
    """
    import difflib

    folded = {name.lower(): name for name in known}
    given = word.lower()
    # First, as a comparison of whole words prefers another short name to the rest of a long one.
    longer = [name for name in folded if name.startswith(given)] if len(given.lstrip("-")) >= 3 else []
    close = [min(longer, key=len)] if longer else difflib.get_close_matches(given, list(folded), n=1, cutoff=0.6)
    return f"{SUGGESTION} '{folded[close[0]]}'?" if close and folded[close[0]] != word else ""


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: only scheme, host and port. A path or a word is returned unchanged.

    Cameras take passwords as user, in the query, and in the path.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    # After the last "@", as a password may contain "/" and "@".
    host = re.split(r"[/?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    return f"{scheme}://{host}"


def parse_boolean(text: str) -> bool:
    """Parse a boolean as Triton does, in any case."""
    word = text.lower()
    if word in ("true", "on", "1"):
        return True
    if word in ("false", "off", "0"):
        return False
    raise ValueError("expected true, false, on, off, 1 or 0")


def integer(low: int, high: int) -> Kind:
    def parse(text: str) -> int:
        # Count the digits first: int() takes quadratic time, and accepts spaces, underscores and other scripts' digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) <= high:
            raise ValueError(f"expected an integer of {low} to {high}")
        return int(text)

    return Kind("integer", parse, (int,))


def number(low: float, high: float) -> Kind:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # false for nan
            raise ValueError(f"expected a number of {low:g} to {high:g}")
        return value

    return Kind("number", parse, (int, float))


def choice(*words: str) -> Kind:
    """Return the kind of one of `words`, in any case."""
    by_folded = {word.lower(): word for word in words}

    def parse(text: str) -> str:
        if text.lower() not in by_folded:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}{nearest(text, words)}")
        return by_folded[text.lower()]

    return Kind("|".join(words), parse)


def _parse_optional_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError("expected some text")
    return _parse_optional_text(text)


BOOLEAN = Kind("boolean", parse_boolean, (bool,), may_stand_alone=True)
TEXT = Kind("text", _parse_text)


def _parse_address(text: str) -> str:
    found = re.fullmatch(r"([^\s\[\]/:]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", text)
    if text and (found is None or int(found[2]) > 65535):
        raise ValueError("expected HOST:PORT")
    return text


OPTIONAL_TEXT = Kind("text", _parse_optional_text)
OPTIONAL_ADDRESS = Kind("host:port", _parse_address)
"""Address to listen at, also [IPV6]:PORT; empty: none."""
PATH = Kind("path", _parse_text)
OPTIONAL_PATH = Kind("path", _parse_optional_text)
PORT = integer(0, 65535)
COUNT = integer(0, 2**31 - 1)
