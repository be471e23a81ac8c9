"""Data class of a key that image models may have among the `parameters` of their configuration."""

from __future__ import annotations

import enum
from typing import NamedTuple


class DeclaredParameter(NamedTuple):
    """A key, its values, its default, and what it does. docs/reference/model-parameters.md is generated from these."""

    key: str
    value: str
    default: str
    meaning: str


def join_values(kind: type[enum.Enum]) -> str:
    """Return the values of a choice as "a, b or c"."""
    *others, last = (str(member.value) for member in kind)
    return f"{', '.join(others)} or {last}" if others else last
