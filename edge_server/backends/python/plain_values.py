"""Conversion of a model's strings and numbers to plain Python values."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value", str, int, float)


def plain(value: Value) -> Value:
    """Return text or a number as an object of Python's own type, not of a subclass: a member of an Enum with a mixed-in
    type, say. A model may have defined that itself, and no other process could read it."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if isinstance(value, int):
        return value if type(value) in (int, bool) else int.__int__(value)
    return value if type(value) is float else float.__float__(value)
