"""Parser of the tables in the sources file: checks the keys of sources and sinks, and makes data classes of zones,
lines and questions, also from the page's JSON.

A table is a frozen dataclass whose fields are made by `table_key`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from edge_server.config.setting import nearest

MAX_CLASSES = 64

_MAX_LABEL_LENGTH = 100
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class NamedTable(Protocol):
    """A table below a source. `what` is its kind, in the singular."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    what: ClassVar[str]

    @property
    def name(self) -> str: ...


_Table = TypeVar("_Table", bound=NamedTable)


def table_key(parse: Callable[[object], Any], default: Any = MISSING) -> Any:
    """Return the field of a key. `parse` raises ValueError. Without a default, every table needs the key."""
    return field(default=default, metadata={"parse": parse})


def parse_name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("expected 1 to 64 letters, digits, '_', '-' and '.'")
    return value


def parse_labels(value: object) -> tuple[str, ...]:
    """Return names of classes. Raises ValueError."""
    if not isinstance(value, list) or not all(
        isinstance(item, str) and 0 < len(item) <= _MAX_LABEL_LENGTH and item.isprintable() for item in value
    ):
        raise ValueError("expected an array of names of classes")
    if len(value) > MAX_CLASSES:
        raise ValueError(f"expected at most {MAX_CLASSES} classes, given {len(value)}")
    return tuple(value)


def number_up_to(most: float) -> Callable[[object], float]:
    """Return the parser of a number from 0 to `most`."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise ValueError(f"expected a number from 0 to {most:g}")
        return float(value)

    return parse


def count_up_to(most: int, what: str = "whole number") -> Callable[[object], int]:
    """Return the parser of a whole number from 1 to `most`. Its error calls it `what`."""

    def parse(value: object) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"expected a {what} from 1 to {most}")
        return value

    return parse


def parse_tables(kind: type[_Table], value: object, max_count: int) -> tuple[_Table, ...]:
    """Return the tables of TOML or JSON values. Raises ValueError, which names the table and the key."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ValueError(f"expected tables [[sources.{kind.what}s]]")
    if len(value) > max_count:
        raise ValueError(f"expected at most {max_count} {kind.what}s, given {len(value)}")
    keys: dict[str, Field[Any]] = {item.name: item for item in fields(kind)}
    required = [key for key, item in keys.items() if item.default is MISSING]
    found: dict[str, _Table] = {}
    for number, table in enumerate(value, 1):
        try:
            entry = kind(**parse_keys(table, keys, lambda key, item: keys[key].metadata["parse"](item), required))
        except ValueError as error:
            raise ValueError(f"{kind.what} {table_label(table, number)}: {error}") from None
        if entry.name in found:
            raise ValueError(f"two {kind.what}s have the name '{entry.name}'")
        found[entry.name] = entry
    return tuple(found.values())


def table_label(table: Mapping[str, object], number: int) -> str:
    """Return how messages call a table: by its name, else by its number."""
    name = table.get("name")
    return f"'{name}'" if isinstance(name, str) and _NAME.fullmatch(name) else f"{number}"


def parse_keys(
    table: Mapping[str, object],
    keys: Collection[str],
    parse: Callable[[str, object], object],
    required: Iterable[str],
) -> dict[str, Any]:
    """Return the values of a table. Raises ValueError for unknown and missing keys, and that of `parse` with the
    key."""
    parsed: dict[str, Any] = {}
    for key, value in table.items():
        if key not in keys:
            shown = key[:40] if key.isidentifier() else "one with other characters"
            raise ValueError(f"unknown key {shown}{nearest(key, keys)}, expected {', '.join(keys)}")
        try:
            parsed[key] = parse(key, value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    missing = [key for key in required if key not in parsed]
    if missing:
        raise ValueError(f"needs {' and '.join(missing)}")
    return parsed
