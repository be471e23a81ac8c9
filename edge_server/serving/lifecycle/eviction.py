"""Eviction rule: which idle models are unloaded when memory or the model limit is reached; least recently used
first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class LoadedModel(Protocol):
    """A model that is in memory."""

    def can_be_evicted(self) -> bool: ...

    def last_used_ns(self) -> int: ...


Item = TypeVar("Item", bound=LoadedModel)


def to_evict(staying: Sequence[Item], limit: int) -> list[Item]:
    """Return the models to evict so that one more fits: of `staying`, `limit - 1` may stay.

    Models in use are left out, so there may be fewer than needed.
    """
    excess = len(staying) - limit + 1
    free = sorted((item for item in staying if item.can_be_evicted()), key=lambda item: item.last_used_ns())
    return free[: max(excess, 0)]


def idle(residents: Iterable[Item], now_ns: int, idle_s_of: Callable[[Item], float | None]) -> list[Item]:
    """Return the models that have not been used for `idle_s_of` seconds; None: the model stays."""
    return [
        item
        for item in residents
        if (idle_s := idle_s_of(item)) is not None
        and now_ns - item.last_used_ns() >= idle_s * 1e9
        and item.can_be_evicted()
    ]
