"""Whose turn it is among streams that share a model: strict priority first, fair shares by weight within one.

Start-time fair queueing: each turn moves its stream forward by 1 / weight on a clock that only turns move. A stream
that was away is put where the others stand now: it gains nothing by having waited, and loses nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


@dataclass(slots=True)
class _Share:
    priority: int
    step: float
    finish: float = 0.0
    last_turn: int = 0


class FairChoice(Generic[Member]):
    """Holds what each member got so far. The caller holds its own lock around every method."""

    def __init__(self) -> None:
        self._shares: dict[Member, _Share] = {}
        self._now: dict[int, float] = {}
        self._turn = 0

    def add(self, member: Member, priority: int, weight: float) -> None:
        """Let a member take part. `weight` is above 0; priority 1 goes before 2."""
        self._shares[member] = _Share(priority, 1 / weight)

    def remove(self, member: Member) -> None:
        self._shares.pop(member, None)
        if not self._shares:
            self._now.clear()

    def choose(self, eligible: Iterable[Member]) -> Member | None:
        """Return whose turn it is among those that could use one; None when there are none. `charge` it if it did.

        Where shares say nothing it is the one whose last turn lies longest back.
        """
        return min(eligible, key=self._rank, default=None)

    def charge(self, member: Member) -> None:
        """Count one turn for a member that was just chosen."""
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
