"""Fair choice between camera streams that share a model: higher priority first, and turns by weight within one
priority.

The algorithm is start-time fair queueing. Each turn advances its stream by 1 / weight in virtual time. A stream that
was idle continues at the current virtual time: idle time neither saves nor loses turns.
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


class FairChoice(Generic[Member]):
    """Chooses the next member by priority and weight. The caller holds its own lock around every method."""

    def __init__(self) -> None:
        self._shares: dict[Member, _Share] = {}
        self._now: dict[int, float] = {}
        self._turn = 0

    def add(self, member: Member, priority: int, weight: float) -> None:
        """Add a member. `weight` is above 0; priority 1 goes before 2."""
        self._shares[member] = _Share(priority, 1 / weight)

    def remove(self, member: Member) -> None:
        self._shares.pop(member, None)
        if not self._shares:
            self._now.clear()

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

    def _rank(self, member: Member) -> tuple[int, float, int]:
        share = self._shares[member]
        return share.priority, self._start(share), share.last_turn

    def _start(self, share: _Share) -> float:
        return max(share.finish, self._now.get(share.priority, 0.0))
