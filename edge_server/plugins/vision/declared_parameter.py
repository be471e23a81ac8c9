"""Data class of a key that image models may have among the `parameters` of their configuration."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Collection
from typing import NamedTuple

_PAGE = "docs/reference/model-parameters.md"


class DeclaredParameter(NamedTuple):
    """A key, its values, its default, and what it does. docs/reference/model-parameters.md is generated from these."""

    key: str
    value: str
    default: str
    meaning: str


def describe_unknown(given: str, names: Collection[str]) -> str:
    """Return the nearest of many names, if one is near, and the page that lists them, as the end of an error."""
    near = difflib.get_close_matches(given[:100], names, n=1)
    page = f"expected one of those in {_PAGE}"
    return f"did you mean '{near[0]}'? E{page[1:]}" if near else page


def join_values(kind: type[enum.Enum]) -> str:
    """Return the values of a choice as "a, b or c"."""
    *others, last = (str(member.value) for member in kind)
    return f"{', '.join(others)} or {last}" if others else last
