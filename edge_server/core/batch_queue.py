"""Queue of the requests that wait for one model version, and the rule that decides when and from which of them a batch
is made.

The rule is Triton's dynamic batcher as a function of the entries and `now`: no threads, no clock, no callbacks. The
caller holds its own lock around every method. Times are nanoseconds of any monotonic clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import QueueFull
from edge_server.record import record

Item = TypeVar("Item")

_SLACK = 64
"""Most deadlines of removed entries that may stay in the heap, beyond one for each waiting entry."""


@record(slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """Entry of a waiting request with `item_count` items (its batch size) that arrived at `arrived_ns`. Entries with
    equal `key` can share a batch.

    `priority` and `timeout_us` come from the request; 0 means the model's default. `start_by_ns` is the latest start,
    independent of the queue's policy; 0: no limit. `item` is None while the entry is not in a queue. `timed` is a list
    that refers to the entry from the queue's deadline heap. It is emptied when the entry leaves, so that the heap does
    not keep the entry alive.
    """

    item_count: int
    key: Hashable
    arrived_ns: int
    priority: int = 0
    timeout_us: int = 0
    start_by_ns: int = 0
    level: int = 0
    item: Item | None = None
    timed: list[QueueEntry[Item]] | None = None


class _Level(Generic[Item]):
    """Queue of one priority level: entries in time first, then delayed ones (timeout action DELAY)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        # Ordered dictionaries: the first entry and any other entry leave in constant time.
        self.in_time: OrderedDict[QueueEntry[Item], None] = OrderedDict()
        self.delayed: OrderedDict[QueueEntry[Item], None] = OrderedDict()

    def deadline_ns(self, entry: QueueEntry[Item]) -> int | None:
        limit_us = self.policy.default_timeout_us
        if self.policy.allow_timeout_override and entry.timeout_us > 0:
            # As in Triton, a request can only shorten a non-zero default. Without a default its own limit applies.
            limit_us = min(limit_us, entry.timeout_us) if limit_us else entry.timeout_us
        if not limit_us:
            return entry.start_by_ns or None
        deadline_ns = entry.arrived_ns + limit_us * 1000
        return min(deadline_ns, entry.start_by_ns) if entry.start_by_ns else deadline_ns


class BatchQueue(Generic[Item]):
    """Queue in order of arrival within a priority level; level 1 runs before level 2, and so on.

    `max_items` is the model's max_batch_size. Without `batching` each item is a batch, in order of arrival. `name` is
    the model's name for error messages.
    """

    def __init__(self, max_items: int, batching: DynamicBatching | None, name: str) -> None:
        self._batching = batching
        self._name = name
        levels = range(1, batching.priority_levels + 1) if batching and batching.priority_levels else range(1)
        self._levels: dict[int, _Level[Item]] = {level: _Level(self._policy(level)) for level in levels}
        self._deadlines: list[tuple[int, int, list[QueueEntry[Item]]]] = []
        self._deadline_count = 0
        self._batch_due_ns: int | None = None
        self.size = 0
        self.item_limit = max_items
        """Most items of a batch of several requests: `max_items`, or less while the governor allows less."""

    @property
    def runs_single_requests(self) -> bool:
        """Whether a single entry without a time limit in an empty queue is a batch at once. The scheduler then runs it
        without the queue if an instance is free."""
        batching = self._batching
        if batching is None:
            return True
        policies = (batching.default_queue_policy, *batching.queue_policies.values())
        return not batching.max_queue_delay_us and not any(policy.default_timeout_us for policy in policies)

    def offer(self, entry: QueueEntry[Item], item: Item) -> None:
        """Append an item to the queue of its priority level. Raises QueueFull; the item is then not in the queue."""
        batching = self._batching
        if batching is None or not batching.priority_levels:
            entry.level = 0
        elif 1 <= entry.priority <= batching.priority_levels:
            entry.level = entry.priority
        else:
            entry.level = batching.default_priority_level
        level = self._levels[entry.level]
        limit = level.policy.max_queue_size
        if limit and len(level.in_time) + len(level.delayed) >= limit:
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
        """Remove a waiting entry. Return False if it does not wait any more."""
        if entry.item is None:
            return False
        self._remove(entry)
        return True

    def take(self, now_ns: int) -> list[Item]:
        """Remove and return the batch to run now, or an empty list. Call `expire` first."""
        self._batch_due_ns = None
        if not self.size:
            return []
        if self._batching is None:
            return [self._remove(next(self._waiting()))]
        return [self._remove(entry) for entry in self._choose(self._batching, now_ns)]

    def is_due(self, now_ns: int) -> bool:
        """Return whether `take` would return a batch now. Call `expire` first."""
        self._batch_due_ns = None
        if self._batching is None or not self.size:
            return self.size > 0
        return bool(self._choose(self._batching, now_ns))

    def expire(self, now_ns: int) -> list[Item]:
        """Remove and return the items whose time limit passed. Items to delay move to the end of their level."""
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
                level.delayed[entry] = None
                if entry.start_by_ns:
                    self._push_deadline(entry.start_by_ns, entry)
        return expired

    def clear(self) -> list[Item]:
        """Remove and return all waiting items, in the order in which they would run."""
        return [self._remove(entry) for entry in list(self._waiting())]

    def next_deadline_ns(self) -> int | None:
        """Return the next deadline of a waiting entry, or None if no entry has a limit."""
        while self._deadlines and not self._deadlines[0][2]:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_wakeup_ns(self) -> int | None:
        """Return the next time at which `take` or `expire` may return items without a new offer; None: never.

        Call it after a `take` that returned no batch.
        """
        deadline, due = self.next_deadline_ns(), self._batch_due_ns
        if deadline is None or due is None:
            return due if deadline is None else deadline
        return min(deadline, due)

    def _push_deadline(self, when_ns: int, entry: QueueEntry[Item]) -> None:
        self._deadline_count += 1
        entry.timed = [entry]
        heapq.heappush(self._deadlines, (when_ns, self._deadline_count, entry.timed))

    def _choose(self, batching: DynamicBatching, now_ns: int) -> list[QueueEntry[Item]]:
        pending: list[QueueEntry[Item]] = []
        item_count = 0
        preferred_count = 0
        is_closed = False
        for entry in self._waiting():
            if pending and (item_count + entry.item_count > self.item_limit or entry.key != pending[0].key):
                is_closed = True
                break
            pending.append(entry)
            item_count += entry.item_count
            if item_count in batching.preferred_batch_sizes:
                preferred_count = len(pending)
        delay_ns = batching.max_queue_delay_us * 1000
        due_ns = min(entry.arrived_ns for entry in pending) + delay_ns
        if preferred_count and (not delay_ns or now_ns < due_ns):
            return pending[:preferred_count]
        if is_closed or now_ns >= due_ns or item_count >= min(batching.preferred_batch_sizes[-1], self.item_limit):
            return pending
        self._batch_due_ns = due_ns
        return []

    def _waiting(self) -> Iterator[QueueEntry[Item]]:
        for level in self._levels.values():
            yield from level.in_time
            yield from level.delayed

    def _remove(self, entry: QueueEntry[Item]) -> Item:
        level = self._levels[entry.level]
        if entry in level.in_time:
            del level.in_time[entry]
        else:
            del level.delayed[entry]
        self.size -= 1
        item, entry.item = entry.item, None
        assert item is not None
        if entry.timed is not None:
            entry.timed.clear()
            entry.timed = None
        if len(self._deadlines) > 2 * self.size + _SLACK:
            # Drop the deadlines of entries that left early; else they stay in the heap until they pass.
            self._deadlines = [deadline for deadline in self._deadlines if deadline[2]]
            heapq.heapify(self._deadlines)
        return item

    def _policy(self, level: int) -> QueuePolicy:
        if self._batching is None:
            return QueuePolicy()
        return self._batching.queue_policies.get(level, self._batching.default_queue_policy)
