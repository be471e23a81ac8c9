"""Reader of the `parameters` in config.pbtxt that the fields of a dataclass declare (key, type, default), and the types
of their values.

The fields of such a class are settings (`config.setting.setting`), with the key in config.pbtxt as their flag. The
reader, the checks of spelling, the comments of `edge-server add` and docs/reference/model-parameters.md use them.
"""

from __future__ import annotations

import difflib
import enum
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from edge_server.config.setting import Kind, Setting, declared_setting
from edge_server.errors import BadModelConfig
from edge_server.record import record

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NOT_STATED: Any = None
"""Default of a key that must be stated, or whose default depends on another key."""

_MAX_LISTED = 8
"""Maximum number of values that an error lists."""
_MAX_SHOWN = 1000
"""Maximum number of characters of a value that an error repeats."""
_PAGE = "docs/reference/model-parameters.md"


@functools.cache
def settings_of(declaration: type[DataclassInstance]) -> Mapping[str, Setting]:
    """Return the settings that a class declares, by key."""
    items = (item for item in fields(declaration) if "setting" in item.metadata)
    return {item.metadata["setting"]["flag"]: declared_setting(item.name, item) for item in items}


def default_text(setting: Setting) -> str:
    """Return the default of a parameter as config.pbtxt would state it, or in words."""
    assert setting.kind.show is not None
    return str(setting.kind.show(setting.default))


@record(frozen=True, slots=True)
class ParameterReader:
    """Reads the parameters of one model. The methods raise BadModelConfig: model, key, expected, given."""

    model: str
    parameters: Mapping[str, str]

    def check_keys(self, prefixes: tuple[str, ...], known: Collection[str]) -> None:
        """Refuse keys that have one of the prefixes but are not known."""
        for key in self.parameters:
            if key.startswith(prefixes) and key not in known:
                raise self._error(key, describe_unknown(key, known))

    def read(self, declaration: type[DataclassInstance]) -> dict[str, Any]:
        """Return the values of the stated parameters of a class, by field."""
        settings = settings_of(declaration)
        return {
            setting.name: self.parse(key, setting.kind) for key, setting in settings.items() if key in self.parameters
        }

    def parse(self, key: str, kind: Kind) -> Any:
        try:
            return kind.parse(self.parameters[key])
        except ValueError as error:
            raise self._error(key, f"{error}, given '{self.parameters[key][:_MAX_SHOWN]}'") from None

    def refuse(self, key: str, expected: str, given: str | None = None) -> NoReturn:
        """Raise the error for a value, or for `given`, a part of it."""
        shown = self.parameters[key] if given is None else given
        raise self._error(key, f"expected {expected}, given '{shown[:_MAX_SHOWN]}'")

    def _error(self, key: str, message: str) -> BadModelConfig:
        return BadModelConfig(f"model '{self.model}', parameter '{key[:_MAX_SHOWN]}': {message}")


def describe_unknown(given: str, names: Iterable[str]) -> str:
    """Return the nearest of many names, if one is near, and the page that lists them, as the end of an error."""
    near = difflib.get_close_matches(given[:100], names, n=1)
    page = f"expected one of those in {_PAGE}"
    return f"did you mean '{near[0]}'? E{page[1:]}" if near else page


def kind_of(values: str, parse: Callable[[str], object], default: str = "") -> Kind:
    """Return a kind of parameter. `values` describes the values, `default` a default that is no value."""
    return Kind(values, parse, show=(lambda _: default) if default else as_text)


def as_text(value: object) -> str:
    """Return a value as config.pbtxt states it."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def text_kind(values: str, default: str) -> Kind:
    return kind_of(values, str, default)


def choice(kind: type[enum.Enum], default: str = "", values: str = "") -> Kind:
    """Return the kind of a member of an enumeration, by its value in any case."""
    members = {str(member.value): member for member in kind}
    *others, last = members

    def parse(given: str) -> enum.Enum:
        found = members.get(given.strip().lower())
        if found is not None:
            return found
        if len(members) > _MAX_LISTED:
            raise ValueError(describe_unknown(given, members))
        raise ValueError(f"expected {'one of ' if others else ''}{', '.join(members)}")

    return kind_of(values or (f"{', '.join(others)} or {last}" if others else last), parse, default)


def _parse_boolean(given: str) -> bool:
    word = given.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError("expected true or false")
    return word in ("true", "1")


BOOLEAN = kind_of("true or false", _parse_boolean)


def parse_whole(given: str) -> int:
    """Return the whole number in a text, -1 without one."""
    # isdecimal excludes signs, blanks and underscores; the length check excludes numbers that are slow to parse.
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else -1


def whole(low: int, high: int, values: str = "", default: str = "") -> Kind:
    def parse(given: str) -> int:
        if not low <= (value := parse_whole(given)) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return value

    return kind_of(values or f"{low} to {high}", parse, default)


def parse_decimal(given: str) -> float:
    """Return the number in a text, NaN without one."""
    try:
        return float(given) if len(given) <= 40 else math.nan
    except ValueError:
        return math.nan


def number(high: float, values: str = "", *, has_zero: bool = True) -> Kind:
    """Return the kind of a number from 0, or above it."""

    def parse(given: str) -> float:
        value = parse_decimal(given)
        if not 0 <= value <= high:  # false for NaN
            raise ValueError(f"expected a number from 0 to {high:g}")
        if not (value or has_zero):
            raise ValueError("expected a number above 0")
        return value

    return kind_of(values or (f"0 to {high:g}" if has_zero else "above 0"), parse)
