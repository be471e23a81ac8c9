"""The places of sequences: rows of instances, the lowest row of any instance first, so that all fill evenly."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceSlot:
    """A row of an instance; both count from 0."""

    instance: int
    row: int


class _Rows:
    """The rows of one instance. Knows those that were ever used, not all that there may be: that may be billions."""

    def __init__(self) -> None:
        self.returned: list[int] = []
        self.used: set[int] = set()
        self._fresh = 0

    @property
    def lowest(self) -> int:
        return self.returned[0] if self.returned else self._fresh

    def take(self) -> int:
        if self.returned:
            row = heapq.heappop(self.returned)
        else:
            row, self._fresh = self._fresh, self._fresh + 1
        self.used.add(row)
        return row


class SequenceSlots:
    """`rows` slots on each of `instance_count` instances."""

    def __init__(self, instance_count: int, rows: int) -> None:
        self._limit = rows
        self._instances = [_Rows() for _ in range(instance_count)]

    @property
    def count(self) -> int:
        return self._limit * len(self._instances)

    @property
    def used_count(self) -> int:
        return sum(len(rows.used) for rows in self._instances)

    def take(self) -> SequenceSlot | None:
        """Return the slot with the lowest row that is free; None when all are in use."""
        if not self._instances:
            return None
        lowest, instance = min((rows.lowest, number) for number, rows in enumerate(self._instances))
        if lowest >= self._limit:
            return None
        return SequenceSlot(instance, self._instances[instance].take())

    def give_back(self, slot: SequenceSlot) -> None:
        rows = self._instances[slot.instance]
        rows.used.remove(slot.row)
        heapq.heappush(rows.returned, slot.row)
