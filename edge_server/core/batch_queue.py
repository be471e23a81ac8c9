"""The waiting line of one model version and the rule that forms batches from it.

The rule is Triton's dynamic batcher, told as a function of the entries and `now`: no threads, no clock, no callbacks.
The caller holds its own lock around every method. Times are nanoseconds of any monotonic clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import QueueFull

Item = TypeVar("Item")

_SLACK = 64
"""How many deadlines of entries that are gone may lie around, beyond one for each entry that waits."""


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """One waiting item: `rows` of it, mergeable with entries of equal `key`, arrived at `arrived_ns`.

    `priority` and `timeout_us` are as the request asked; 0 asks for the model's default. `start_by_ns` is when it is
    too late to begin, whatever the queue's policy says; 0: never. `item` is None when the entry does not wait: not yet,
    or not any more. `timed` holds the entry for the queue's deadlines while it waits, and is emptied then, so that no
    leftover of the queue keeps it alive.
    """

    rows: int
    key: Hashable
    arrived_ns: int
    priority: int = 0
    timeout_us: int = 0
    start_by_ns: int = 0
    level: int = 0
    item: Item | None = None
    timed: list[QueueEntry[Item]] | None = None


class _Level(Generic[Item]):
    """The queue of one priority level: those in time, then those that are late but still to be served."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # Ordered dictionaries: first and any other entry alike leave in constant time.
        self.in_time: OrderedDict[QueueEntry[Item], None] = OrderedDict()
        self.late: OrderedDict[QueueEntry[Item], None] = OrderedDict()

    def deadline_ns(self, entry: QueueEntry[Item]) -> int | None:
        limit_us = self.policy.default_timeout_us
        if self.policy.allow_timeout_override and entry.timeout_us > 0:
            # Triton lets a request only shorten a non-zero default; with no default the request's own limit holds.
            limit_us = min(limit_us, entry.timeout_us) if limit_us else entry.timeout_us
        if not limit_us:
            return entry.start_by_ns or None
        deadline_ns = entry.arrived_ns + limit_us * 1000
        return min(deadline_ns, entry.start_by_ns) if entry.start_by_ns else deadline_ns


class BatchQueue(Generic[Item]):
    """First come, first served within a priority level; level 1 before level 2, and so on.

    `max_rows` is the model's max_batch_size. Without `batching` each item is a batch of its own, in order of arrival.
    `name` is the model's, for messages.
    """

    def __init__(self, max_rows: int, batching: DynamicBatching | None, name: str) -> None:
        self._batching = batching
        self._name = name
        levels = range(1, batching.priority_levels + 1) if batching and batching.priority_levels else range(1)
        self._levels: dict[int, _Level[Item]] = {level: _Level(self._policy(level)) for level in levels}
        self._deadlines: list[tuple[int, int, list[QueueEntry[Item]]]] = []
        self._offered = 0
        self._ripe_ns: int | None = None
        self.size = 0
        self.row_limit = max_rows
        """No batch of several requests gets larger than this: `max_rows`, or less while less than all is allowed."""

    @property
    def passes_lone(self) -> bool:
        """Whether an entry without a time of its own that meets an empty queue would be taken at once as a batch, if an
        instance is free: nobody then needs to ask."""
        batching = self._batching
        if batching is None:
            return True
        policies = (batching.default_queue_policy, *batching.queue_policies.values())
        return not batching.max_queue_delay_us and not any(policy.default_timeout_us for policy in policies)

    def offer(self, entry: QueueEntry[Item], item: Item) -> None:
        """Put an item at the end of its level's line. Raises QueueFull, and then it is not in the queue."""
        entry.level = self._level_of(entry.priority)
        level = self._levels[entry.level]
        limit = level.policy.max_queue_size
        if limit and len(level.in_time) + len(level.late) >= limit:
            raise QueueFull(
                f"Exceeds maximum queue size: {limit} requests are waiting for model '{self._name}' already"
            )
        deadline = level.deadline_ns(entry)
        if deadline is not None:
            self._push_deadline(deadline, entry)
        entry.item = item
        level.in_time[entry] = None
        self.size += 1

    def drop(self, entry: QueueEntry[Item]) -> bool:
        """Take a waiting entry out; False when it is no longer waiting."""
        if entry.item is None:
            return False
        self._remove(entry)
        return True

    def take(self, now_ns: int) -> list[Item]:
        """Remove and return the batch that should run now; empty when nothing should. Call `expire` first."""
        self._ripe_ns = None
        if not self.size:
            return []
        if self._batching is None:
            return [self._remove(next(self._waiting()))]
        return [self._remove(entry) for entry in self._choose(self._batching, now_ns)]

    def is_due(self, now_ns: int) -> bool:
        """Return whether `take` would return a batch now. Call `expire` first."""
        self._ripe_ns = None
        if self._batching is None or not self.size:
            return self.size > 0
        return bool(self._choose(self._batching, now_ns))

    def expire(self, now_ns: int) -> list[Item]:
        """Remove and return the items whose time ran out; those to be served late go to the end of their level."""
        expired: list[Item] = []
        while self._deadlines and (self._deadlines[0][0] <= now_ns or not self._deadlines[0][2]):
            timed = heapq.heappop(self._deadlines)[2]
            if not timed:
                continue
            entry = timed[0]
            level = self._levels[entry.level]
            is_too_late = 0 < entry.start_by_ns <= now_ns
            if is_too_late or level.policy.timeout_action is TimeoutAction.REJECT:
                expired.append(self._remove(entry))
            elif entry in level.in_time:
                del level.in_time[entry]
                level.late[entry] = None
                if entry.start_by_ns:
                    self._push_deadline(entry.start_by_ns, entry)
        return expired

    def clear(self) -> list[Item]:
        """Remove and return everything that waits, in the order in which it would have run."""
        return [self._remove(entry) for entry in list(self._waiting())]

    def next_deadline_ns(self) -> int | None:
        """Return when the next waiting entry's time runs out, or None when none has a limit."""
        while self._deadlines and not self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_wakeup_ns(self) -> int | None:
        """Return when `take` may decide otherwise than it did last, with nothing new offered; None when it never will.

        Meant to be asked after a `take` that returned no batch.
        """
        deadline, ripe = self.next_deadline_ns(), self._ripe_ns
        if deadline is None or ripe is None:
            return ripe if deadline is None else deadline
        return min(deadline, ripe)

    def _push_deadline(self, when_ns: int, entry: QueueEntry[Item]) -> None:
        self._offered += 1
        entry.timed = [entry]
        heapq.heappush(self._deadlines, (when_ns, self._offered, entry.timed))

    def _choose(self, batching: DynamicBatching, now_ns: int) -> list[QueueEntry[Item]]:
        pending: list[QueueEntry[Item]] = []
        rows = 0
        preferred_count = 0
        is_closed = False
        for entry in self._waiting():
            if pending and (rows + entry.rows > self.row_limit or entry.key != pending[0].key):
                is_closed = True
                break
            pending.append(entry)
            rows += entry.rows
            if rows in batching.preferred_batch_sizes:
                preferred_count = len(pending)
        delay_ns = batching.max_queue_delay_us * 1000
        ripe_ns = min(entry.arrived_ns for entry in pending) + delay_ns
        if preferred_count and (not delay_ns or now_ns < ripe_ns):
            return pending[:preferred_count]
        if is_closed or now_ns >= ripe_ns or rows >= min(batching.preferred_batch_sizes[-1], self.row_limit):
            return pending
        self._ripe_ns = ripe_ns
        return []

    def _waiting(self) -> Iterator[QueueEntry[Item]]:
        for level in self._levels.values():
            yield from level.in_time
            yield from level.late

    def _remove(self, entry: QueueEntry[Item]) -> Item:
        level = self._levels[entry.level]
        if entry in level.in_time:
            del level.in_time[entry]
        else:
            del level.late[entry]
        self.size -= 1
        item, entry.item = entry.item, None
        assert item is not None
        if entry.timed is not None:
            entry.timed.clear()
            entry.timed = None
        if len(self._deadlines) > 2 * self.size + _SLACK:
            # Entries left before their time; without this they would pile up until then.
            self._deadlines = [deadline for deadline in self._deadlines if deadline[2]]
            heapq.heapify(self._deadlines)
        return item

    def _level_of(self, priority: int) -> int:
        if self._batching is None or not self._batching.priority_levels:
            return 0
        if 1 <= priority <= self._batching.priority_levels:
            return priority
        return self._batching.default_priority_level

    def _policy(self, level: int) -> QueuePolicy:
        if self._batching is None:
            return QueuePolicy()
        return self._batching.queue_policies.get(level, self._batching.default_queue_policy)
