"""Calls that run at the same time: for tests of many cases that each mostly wait."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(function: Callable[[Any], object], cases: Collection[Any]) -> None:
    """Call `function` with each case, each on a thread of its own, and wait for all.

    Raises AssertionError with the names of the cases that failed, from the first one's error.

    >>> together(lambda name: read(name), ["a", "b"])
    """
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = [(case, pool.submit(function, case)) for case in cases]
    failed = [(case, error) for case, run in runs if (error := run.exception()) is not None]
    if failed:
        raise AssertionError(f"failed: {[case for case, _ in failed]}") from failed[0][1]
