"""Detection of hung model instances: finds those whose current run has lasted longer than the limit. A thread inside a
runtime cannot be stopped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar


class WatchedVersion(Protocol):
    """A version whose instances count the beginnings and ends of their runs."""

    @property
    def run_numbers(self) -> Mapping[str, int]: ...


Version = TypeVar("Version", bound=WatchedVersion)


class HangWatchdog:
    """Finds instances that are in the same run for `timeout_s`. One thread calls it repeatedly.

    Between two calls it keeps (version, instance) -> (run, time first seen) of running instances only, and no reference
    to a version: the number of a version that is gone may be used again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._seen: dict[tuple[int, str], tuple[weakref.ref[WatchedVersion], int, int]] = {}

    def find_hung(self, versions: Iterable[Version], now_ns: int) -> list[tuple[Version, str]]:
        """Return the versions with a hanging instance, each with the name of one."""
        seen: dict[tuple[int, str], tuple[weakref.ref[WatchedVersion], int, int]] = {}
        hung: dict[int, tuple[Version, str]] = {}
        for version in versions:
            for name, number in version.run_numbers.items():
                if number % 2 == 0:
                    continue
                key = (id(version), name)
                before = self._seen.get(key)
                is_same = before is not None and before[0]() is version and before[1] == number
                since_ns = before[2] if before is not None and is_same else now_ns
                seen[key] = (weakref.ref(version), number, since_ns)
                if now_ns - since_ns >= self._timeout_ns:
                    hung[id(version)] = (version, name)
        self._seen = seen
        return list(hung.values())
