"""Ownership test: whether anything else still refers to an array, so that its memory may change."""

from __future__ import annotations

import sys

import numpy as np

from edge_server.backends.base import Array


def owned(array: Array, known_references: int) -> Array:
    """Return the array where nobody but the caller refers to it and its memory is its own; else a copy.

    Models keep output buffers, answer with their inputs, or with views of tables, and what a response carries is read
    later, on other threads. `known_references` is how many the caller holds, local variables left out: pass the array
    as `owned(holder.attribute, 1)`.
    """
    is_sole = sys.getrefcount(array) - known_references <= _OF_ARGUMENT
    return array if is_sole and _is_chain_sole(array) else np.array(array, order="C")


def _is_chain_sole(array: Array) -> bool:
    """Return whether the memory belongs to numpy, and to arrays that only `array` refers to."""
    link = array
    while not link.flags.owndata:
        base = link.base
        if not isinstance(base, np.ndarray) or sys.getrefcount(base) > _OF_BASE:
            return False
        link = base
        del base
    return True


class _Holder:
    array: Array


def _count_of_argument() -> int:
    """Return the count of the function above for an array that only `_Holder` refers to, less that reference."""
    holder = _Holder()
    holder.array = np.zeros(1)

    def look(array: Array, known_references: int) -> int:
        return sys.getrefcount(array) - known_references

    return look(holder.array, 1)


def _count_of_base() -> int:
    view = np.zeros((2, 2))[1:]
    base = view.base
    return sys.getrefcount(base)


_OF_ARGUMENT = _count_of_argument()
_OF_BASE = _count_of_base()
