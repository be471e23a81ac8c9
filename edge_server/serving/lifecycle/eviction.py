"""Eviction rule: which idle models are unloaded when memory or the model limit is reached; least recently used
first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class LoadedModel(Protocol):
    """A model that takes a place in memory."""

    def can_be_evicted(self) -> bool: ...

    def last_used_ns(self) -> int: ...


Item = TypeVar("Item", bound=LoadedModel)


def to_evict(staying: Sequence[Item], limit: int) -> list[Item]:
    """Return whom to evict so that one more fits: of `staying`, models that are to stay, `limit - 1` may.

    Models in use are left out, so that it may be fewer than needed.
    """
    excess = len(staying) - limit + 1
    free = sorted((item for item in staying if item.can_be_evicted()), key=lambda item: item.last_used_ns())
    return free[: max(excess, 0)]


def idle(residents: Iterable[Item], now_ns: int, idle_s_of: Callable[[Item], float | None]) -> list[Item]:
    """Return those that have not been used for `idle_s_of` seconds; None: they stay."""
    return [
        item
        for item in residents
        if (idle_s := idle_s_of(item)) is not None
        and now_ns - item.last_used_ns() >= idle_s * 1e9
        and item.can_be_evicted()
    ]
