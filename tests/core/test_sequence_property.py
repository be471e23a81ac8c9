"""Sequence queue compared with plain lists: order kept, one entry at a time, slots never shared."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_server.core.ensemble_and_sequence_spec import DirectStrategy, OldestStrategy, SequenceBatching
from edge_server.core.sequence_batcher import SequenceEntry, SequenceQueue, WaitingLimits
from edge_server.errors import InvalidRequest, QueueFull

INSTANCES = 2
MAX_ROWS = 3
CANDIDATES = 2
MAX_IDLE_NS = 50_000
DELAY_NS = 8_000
MAX_SEQUENCES = 3
MAX_REQUESTS = 4


@dataclass(eq=False)
class Known:
    """A sequence as the test knows it."""

    id: int
    born: int
    waiting: list[int] = field(default_factory=list)
    running: int | None = None
    served: int = 0
    begins: bool = False
    is_closed: bool = False
    idle_ns: int | None = None
    place: tuple[int, int | None] | None = None


class SequenceMachine(RuleBasedStateMachine):
    strategy: DirectStrategy | OldestStrategy
    capacity: int

    def __init__(self) -> None:
        super().__init__()
        batching = SequenceBatching(self.strategy, MAX_IDLE_NS // 1000)
        self.queue: SequenceQueue[int] = SequenceQueue(
            MAX_ROWS, batching, "m", WaitingLimits(MAX_SEQUENCES, MAX_REQUESTS)
        )
        self.queue.open(INSTANCES)
        self.is_direct = isinstance(self.strategy, DirectStrategy)
        self.entries: dict[int, SequenceEntry[int]] = {}
        self.of: dict[int, Known] = {}
        self.live: dict[int, Known] = {}
        self.closing: list[Known] = []
        self.free = set(range(INSTANCES))
        self.running: dict[int, list[int]] = {}
        self.starts: set[int] = set()
        self.now_ns = 0
        self.count = 0

    @rule(
        id=st.integers(1, 9),
        is_start=st.booleans(),
        is_end=st.booleans(),
        key=st.integers(0, 1),
        latest_us=st.one_of(st.just(0), st.integers(1, 60)),
    )
    def offer(self, id: int, is_start: bool, is_end: bool, key: int, latest_us: int) -> None:
        self.count += 1
        number = self.count
        start_by_ns = self.now_ns + latest_us * 1000 if latest_us else 0
        entry: SequenceEntry[int] = SequenceEntry(
            1, key, self.now_ns, start_by_ns=start_by_ns, id=id, is_start=is_start, is_end=is_end
        )
        self.forget_idle()
        known = self.live.get(id)
        if known is None and not is_start:
            with pytest.raises(InvalidRequest, match=f"sequence {id} to model 'm' must specify the START flag"):
                self.queue.offer(entry, number)
            return
        waiting = len(self.everyone()) - self.capacity
        if waiting >= MAX_SEQUENCES if known is None else len(known.waiting) >= MAX_REQUESTS:
            with pytest.raises(QueueFull, match=r"are waiting for .*model 'm' already, at most [34] may"):
                self.queue.offer(entry, number)
            assert entry.item is None
            return
        self.queue.offer(entry, number)
        known = known or self.live.setdefault(id, Known(id, number))
        self.entries[number], self.of[number] = entry, known
        if is_start or known.begins:
            self.starts.add(number)
        known.begins, known.idle_ns = False, None
        known.waiting.append(number)
        if is_end:
            known.is_closed = True
            self.closing.append(self.live.pop(id))

    @rule(us=st.integers(1, 30))
    def time_passes(self, us: int) -> None:
        self.now_ns += us * 1000

    @rule()
    def run_what_is_due(self) -> None:
        for number in self.queue.expire(self.now_ns):
            assert 0 < self.entries[number].start_by_ns <= self.now_ns
            self.leaves(number)
        self.forget_idle()
        assert all(not 0 < self.entries[n].start_by_ns <= self.now_ns for n in self.all_waiting())
        for instance in sorted(self.free):
            is_due = self.queue.is_due(instance, self.now_ns)
            turn = self.queue.take(instance, self.now_ns)
            assert bool(turn.items) is is_due
            if turn.items:
                self.free.remove(instance)
                self.running[instance] = turn.items
                self.check_turn(instance, turn.items, turn.row_count)
        if len(self.free) == INSTANCES and (wakeup := self.queue.next_wakeup_ns()) is not None:
            assert wakeup > self.now_ns

    def check_turn(self, instance: int, numbers: list[int], row_count: int) -> None:
        sequences = [self.of[number] for number in numbers]
        assert len(set(map(id, sequences))) == len(sequences), "two steps of one sequence in one batch"
        assert len({self.entries[number].key for number in numbers}) == 1
        rows = [self.entries[number].row for number in numbers]
        assert rows == sorted(set(rows))
        assert rows[-1] + 1 == row_count <= MAX_ROWS
        if not self.is_direct:
            assert rows == list(range(row_count))
        for number, known in zip(numbers, sequences, strict=True):
            entry = self.entries[number]
            assert known.running is None
            assert number == known.waiting.pop(0), "overtaken within its sequence"
            assert entry.is_start == (number in self.starts)
            assert entry.is_start or known.served, "the first step of a sequence says START"
            place = (instance, entry.row if self.is_direct else None)
            assert known.place in (None, place), "a sequence moved"
            known.place = place
            known.running = number
            known.served += 1
        for other in self.everyone():
            if other.place is not None and self.is_direct:
                assert sum(one.place == other.place for one in self.everyone()) == 1, "a slot is shared"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.running)))
        for number in self.running.pop(instance):
            self.queue.finish(self.entries[number], self.now_ns)
            self.queue.finish(self.entries[number], self.now_ns)
            self.of[number].running = None
            self.settle(self.of[number], self.now_ns)
        self.free.add(instance)

    @precondition(lambda self: self.all_waiting())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.all_waiting()))
        assert self.queue.drop(self.entries[number])
        assert not self.queue.drop(self.entries[number])
        self.leaves(number, idle_ns=self.entries[number].arrived_ns)

    @rule()
    def clear(self) -> None:
        waiting = self.all_waiting()
        assert self.queue.clear() == waiting
        for number in waiting:
            self.leaves(number, idle_ns=self.entries[number].arrived_ns)

    def leaves(self, number: int, idle_ns: int | None = None) -> None:
        known = self.of[number]
        place = known.waiting.index(number)
        known.waiting.remove(number)
        if number in self.starts:
            if place < len(known.waiting):
                self.starts.add(known.waiting[place])
            else:
                known.begins = True
        self.settle(known, self.now_ns if idle_ns is None else idle_ns)

    def settle(self, known: Known, now_ns: int) -> None:
        if known.waiting or known.running is not None:
            return
        if known.is_closed:
            self.closing.remove(known)
        elif not known.served:
            del self.live[known.id]
        else:
            known.idle_ns = now_ns

    def forget_idle(self) -> None:
        for known in list(self.live.values()):
            if known.idle_ns is not None and self.now_ns - known.idle_ns > MAX_IDLE_NS:
                del self.live[known.id]

    def everyone(self) -> list[Known]:
        return [*self.live.values(), *self.closing]

    def all_waiting(self) -> list[int]:
        return sorted(number for known in self.everyone() for number in known.waiting)

    @invariant()
    def counts_fit(self) -> None:
        assert self.queue.size == len(self.all_waiting())
        assert self.queue.live_count <= self.capacity
        assert self.queue.backlog_count <= MAX_SEQUENCES
        assert self.queue.live_count + self.queue.backlog_count == len(self.everyone()), "kept without need, or lost"
        assert not self.queue.backlog_count or self.queue.live_count == self.capacity, "a slot is free while one waits"

    @invariant()
    def the_backlog_is_served_in_order(self) -> None:
        placed, without = [], []
        for known in self.everyone():
            for number in known.waiting[:1]:
                sequence = self.entries[number].sequence
                assert sequence is not None
                (without if sequence.slot is None else placed).append(known.born)
        if placed and without:
            assert max(placed) < min(without), "a later sequence got a slot before an earlier one"

    def teardown(self) -> None:
        # Whatever happened, what waits runs once instances come back and time goes on.
        for instance in sorted(self.running):
            for number in self.running[instance]:
                self.queue.finish(self.entries[number], self.now_ns)
        for _ in range(4 * self.count + 4):
            self.now_ns += MAX_IDLE_NS + DELAY_NS
            self.queue.expire(self.now_ns)
            for instance in range(INSTANCES):
                for entry in self.queue.take(instance, self.now_ns).entries:
                    self.queue.finish(entry, self.now_ns)
        assert self.queue.size == 0
        self.queue.expire(self.now_ns + 2 * MAX_IDLE_NS)
        assert self.queue.live_count == self.queue.backlog_count == 0
        assert self.queue.next_wakeup_ns() is None


class DirectMachine(SequenceMachine):
    strategy = DirectStrategy()
    capacity = INSTANCES * MAX_ROWS


class PatientDirectMachine(SequenceMachine):
    strategy = DirectStrategy(DELAY_NS // 1000, 0.6)
    capacity = INSTANCES * MAX_ROWS


class OldestMachine(SequenceMachine):
    strategy = OldestStrategy(CANDIDATES)
    capacity = INSTANCES * CANDIDATES


class PatientOldestMachine(SequenceMachine):
    strategy = OldestStrategy(CANDIDATES, (2,), DELAY_NS // 1000)
    capacity = INSTANCES * CANDIDATES


TestDirect = DirectMachine.TestCase
TestPatientDirect = PatientDirectMachine.TestCase
TestOldest = OldestMachine.TestCase
TestPatientOldest = PatientOldestMachine.TestCase
