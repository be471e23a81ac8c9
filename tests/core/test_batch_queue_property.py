"""Batch queue compared with a plain list: nothing lost, nothing twice, order kept."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server.core.batch_queue import BatchQueue, QueueEntry
from edge_server.core.model_spec import DynamicBatching, QueuePolicy, TimeoutAction
from edge_server.errors import QueueFull

MAX_ROWS = 6
LEVELS = 3
LIMIT = 9
POLICY = QueuePolicy(TimeoutAction.REJECT, 50, True, LIMIT)
LATE = QueuePolicy(TimeoutAction.DELAY, 30, False, LIMIT)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        batching = DynamicBatching(
            (3, 6), 20, priority_levels=LEVELS, default_priority_level=2, default_queue_policy=POLICY,
            queue_policies={3: LATE},
        )  # fmt: skip
        self.queue: BatchQueue[int] = BatchQueue(MAX_ROWS, batching, "m")
        self.waiting: dict[int, QueueEntry[int]] = {}
        self.gone: set[int] = set()
        self.now_ns = 0
        self.count = 0

    @rule(
        rows=st.integers(1, MAX_ROWS),
        key=st.integers(0, 1),
        priority=st.integers(0, LEVELS + 1),
        timeout_us=st.integers(0, 80),
        latest_us=st.one_of(st.just(0), st.integers(1, 120)),
    )
    def offer(self, rows: int, key: int, priority: int, timeout_us: int, latest_us: int) -> None:
        start_by_ns = self.now_ns + latest_us * 1000 if latest_us else 0
        entry: QueueEntry[int] = QueueEntry(rows, key, self.now_ns, priority, timeout_us, start_by_ns)
        level = priority if 1 <= priority <= LEVELS else 2
        self.count += 1
        is_full = sum(other.level == level for other in self.waiting.values()) >= LIMIT
        try:
            self.queue.offer(entry, self.count)
        except QueueFull:
            assert is_full
        else:
            assert not is_full
            assert entry.level == level
            self.waiting[self.count] = entry

    @rule(us=st.integers(1, 40))
    def time_passes(self, us: int) -> None:
        self.now_ns += us * 1000

    @rule()
    def take(self) -> None:
        for number in self.queue.expire(self.now_ns):
            assert self.ends_ns(self.leave(number)) <= self.now_ns
        assert all(self.now_ns < self.ends_ns(entry) for entry in self.waiting.values())
        before = dict(self.waiting)
        is_due = self.queue.is_due(self.now_ns)
        assert self.queue.size == len(before)
        numbers = self.queue.take(self.now_ns)
        assert bool(numbers) is is_due
        batch = [self.leave(number) for number in numbers]
        assert len(batch) == 1 or sum(entry.item_count for entry in batch) <= self.queue.item_limit
        assert len({entry.key for entry in batch}) <= 1
        if batch:
            self.check_order(numbers, before)
        elif before:
            wakeup = self.queue.next_wakeup_ns()
            assert wakeup is not None
            assert self.now_ns < wakeup <= min(entry.arrived_ns for entry in before.values()) + 20_000
            assert wakeup <= min(self.ends_ns(entry) for entry in before.values())
            assert sum(entry.item_count for entry in before.values()) < self.queue.item_limit or (
                len({entry.key for entry in before.values()}) > 1
            )

    def ends_ns(self, entry: QueueEntry[int]) -> float:
        """Return when it is of no use any more to let the entry wait."""
        latest_ns = entry.start_by_ns or float("inf")
        if entry.level == 3:
            return latest_ns
        return min(latest_ns, entry.arrived_ns + (min(50, entry.timeout_us) or 50) * 1000)

    @rule(rows=st.integers(1, MAX_ROWS))
    def limit_rows(self, rows: int) -> None:
        self.queue.item_limit = rows

    @rule()
    def look(self) -> None:
        """Whoever only asks changes nothing: the next wake-up holds for who then does not take."""
        if not self.queue.is_due(self.now_ns) and self.waiting:
            assert self.queue.next_wakeup_ns() is not None
        assert self.queue.size == len(self.waiting)

    def check_order(self, numbers: list[int], before: dict[int, QueueEntry[int]]) -> None:
        """Whoever overtook another of its level did so only because that one was late."""
        for level in range(1, LEVELS + 1):
            mine = [number for number in numbers if before[number].level == level]
            in_time = [number for number in mine if not self.is_late(before[number])]
            assert in_time == sorted(in_time)
            left = [number for number, entry in self.waiting.items() if entry.level == level]
            fresh_left = [number for number in left if not self.is_late(self.waiting[number])]
            assert not in_time or not fresh_left or max(in_time) < min(fresh_left)
            if mine and len(mine) > len(in_time):
                assert not fresh_left
        last = max(before[number].level for number in numbers)
        assert not any(entry.level < last for entry in self.waiting.values())

    def is_late(self, entry: QueueEntry[int]) -> bool:
        return entry.level == 3 and self.now_ns >= entry.arrived_ns + 30_000

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        entry = self.waiting[number]
        assert self.queue.drop(entry)
        self.leave(number)
        assert not self.queue.drop(entry)

    @rule()
    def clear(self) -> None:
        cleared = self.queue.clear()
        assert sorted(cleared) == sorted(self.waiting)
        levels = [self.waiting[number].level for number in cleared]
        assert levels == sorted(levels)
        for number in cleared:
            self.leave(number)

    @invariant()
    def the_size_is_what_waits(self) -> None:
        assert self.queue.size == len(self.waiting)

    def leave(self, number: int) -> QueueEntry[int]:
        assert number not in self.gone
        self.gone.add(number)
        return self.waiting.pop(number)


TestBatchQueue = QueueMachine.TestCase
