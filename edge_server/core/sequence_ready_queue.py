"""Queues of sequence requests that can run now: they choose the requests of an instance's next batch, by Triton's
strategies `direct` and `oldest`.

See core.sequence_batcher for the whole rule.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.ensemble_and_sequence_spec import DirectStrategy, OldestStrategy
from edge_server.core.model_spec import DynamicBatching
from edge_server.record import record

Step = TypeVar("Step")


class SequenceReadyQueue(Protocol[Step]):
    """Queue with at most one step of each sequence that is bound to the instance. Steps with equal keys can share a
    batch."""

    @property
    def next_due_ns(self) -> int | None:
        """The time at which `is_due` becomes true without a new step; None: never."""

    def add(self, step: Step, row: int, key: Hashable, now_ns: int) -> None: ...

    def remove(self, step: Step) -> None: ...

    def is_due(self, now_ns: int, item_limit: int) -> bool:
        """Return whether `take` would return a batch."""

    def take(self, now_ns: int, item_limit: int) -> list[tuple[int, Step]]:
        """Remove and return the batch to run now: each step with its row, in ascending order. May be empty."""


@record(slots=True)
class _ReadyStep(Generic[Step]):
    """A step that can run, its batch key, and the time since which it can run."""

    step: Step
    key: Hashable
    since_ns: int


class DirectReadyQueue(Generic[Step]):
    """Direct strategy: each sequence has its row, so all ready steps with the same key run together.

    The governor's row limit does not apply: the batch always has as many rows as its highest row.
    """

    def __init__(self, rows: int, strategy: DirectStrategy) -> None:
        self.next_due_ns: int | None = None
        self._needed_count = math.ceil(rows * strategy.minimum_slot_utilization)
        self._delay_ns = strategy.max_queue_delay_us * 1000
        self._ready: OrderedDict[int, _ReadyStep[Step]] = OrderedDict()

    def add(self, step: Step, row: int, key: Hashable, now_ns: int) -> None:
        self._ready[row] = _ReadyStep(step, key, now_ns)

    def remove(self, step: Step) -> None:
        row = next(row for row, ready in self._ready.items() if ready.step is step)
        del self._ready[row]

    def is_due(self, now_ns: int, item_limit: int) -> bool:
        return bool(self._choose(now_ns))

    def take(self, now_ns: int, item_limit: int) -> list[tuple[int, Step]]:
        return [(row, self._ready.pop(row).step) for row in sorted(self._choose(now_ns))]

    def _choose(self, now_ns: int) -> list[int]:
        self.next_due_ns = None
        if not self._ready:
            return []
        first = next(iter(self._ready.values()))
        rows = [row for row, ready in self._ready.items() if ready.key == first.key]
        if len(rows) < self._needed_count and now_ns < first.since_ns + self._delay_ns:
            self.next_due_ns = first.since_ns + self._delay_ns
            return []
        return rows


class OldestReadyQueue(Generic[Step]):
    """Oldest strategy: the dynamic batcher over the first waiting step of each sequence, in the order of readiness."""

    def __init__(self, max_items: int, strategy: OldestStrategy, name: str) -> None:
        preferred = strategy.preferred_batch_sizes or (max_items,)
        batching = DynamicBatching(preferred, strategy.max_queue_delay_us) if max_items > 1 else None
        self._queue: BatchQueue[Step] = BatchQueue(max_items, batching, name)
        self._max_items = max_items
        self._entries: dict[Step, QueueEntry[Step]] = {}

    @property
    def next_due_ns(self) -> int | None:
        return self._queue.next_wakeup_ns()

    def add(self, step: Step, row: int, key: Hashable, now_ns: int) -> None:
        entry = self._entries[step] = QueueEntry(1, key, now_ns)
        self._queue.offer(entry, step)

    def remove(self, step: Step) -> None:
        self._queue.drop(self._entries.pop(step))

    def is_due(self, now_ns: int, item_limit: int) -> bool:
        self._queue.item_limit = min(self._max_items, item_limit)
        return self._queue.is_due(now_ns)

    def take(self, now_ns: int, item_limit: int) -> list[tuple[int, Step]]:
        self._queue.item_limit = min(self._max_items, item_limit)
        steps = self._queue.take(now_ns)
        for step in steps:
            del self._entries[step]
        return list(enumerate(steps))
