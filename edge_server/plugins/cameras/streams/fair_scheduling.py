"""Fair scheduler of the camera streams that share a model: by strict or weighted priority, and by weight within one
priority.

The algorithm is start-time fair queueing. Each turn advances its stream by 1 / weight in virtual time. A stream that
was idle continues at the current virtual time: idle time neither saves nor loses turns. Priorities with a weight take
turns in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


@dataclass(slots=True)
class _Share:
    """Priority of a member, its advance per turn (1 / weight), and the virtual end of its last turn."""

    priority: int
    step: float
    finish: float = 0.0
    last_turn: int = 0


@dataclass(slots=True)
class _Level:
    """Advance per turn of a priority, and the virtual end of its last turn. Integers: they stay exact for ever."""

    step: int
    finish: int = 0


class FairChoice(Generic[Member]):
    """Chooses the next member by priority and weight. The caller holds its own lock around every method.

    `priority_weight` 0: a member goes before all of lower priority. From 1 on: while members of several priorities
    wait, each priority gets this many turns for one turn of the next lower priority.
    """

    def __init__(self, priority_weight: int = 0) -> None:
        self._priority_weight = priority_weight
        self._priorities: dict[int, _Level] = {}
        self._priorities_now = 0
        self._shares: dict[Member, _Share] = {}
        self._now: dict[int, float] = {}
        self._turn = 0

    def add(self, member: Member, priority: int, weight: float) -> None:
        """Add a member. `weight` is above 0; priority 1 goes before 2."""
        self._shares[member] = _Share(priority, 1 / weight)
        if self._priority_weight and priority not in self._priorities:
            self._priorities[priority] = _Level(self._priority_weight ** (priority - 1))

    def remove(self, member: Member) -> None:
        self._shares.pop(member, None)
        if not self._shares:
            self._now.clear()
            self._priorities.clear()
            self._priorities_now = 0

    def choose(self, eligible: Iterable[Member]) -> Member | None:
        """Return the member whose turn is next, or None if `eligible` is empty. Call `charge` if it uses the turn.

        Between members with equal shares, the member whose last turn is longest ago goes first.
        """
        return min(eligible, key=self._rank, default=None)

    def charge(self, member: Member) -> None:
        """Count one turn for the chosen member."""
        share = self._shares[member]
        start = self._start(share)
        self._now[share.priority] = start
        share.finish = start + share.step
        self._turn += 1
        share.last_turn = self._turn
        if (level := self._priorities.get(share.priority)) is not None:
            self._priorities_now = max(level.finish, self._priorities_now)
            level.finish = self._priorities_now + level.step

    def _rank(self, member: Member) -> tuple[int, int, float, int]:
        share = self._shares[member]
        level = self._priorities.get(share.priority)
        first = 0 if level is None else max(level.finish, self._priorities_now)
        return first, share.priority, self._start(share), share.last_turn

    def _start(self, share: _Share) -> float:
        return max(share.finish, self._now.get(share.priority, 0.0))
