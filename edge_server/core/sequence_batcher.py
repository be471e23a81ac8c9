"""Rule of Triton's sequence batcher: assigns each sequence of requests to an instance of its model, and chooses the
requests that run now.

The rule is Triton's sequence batcher as a function of the entries and `now`: no threads, no clock, no callbacks. The
caller holds its own lock around every method. Times are nanoseconds of any monotonic clock.

A sequence begins with an entry with the START flag. It is bound to a slot (a row of one instance) until its END entry
has run or it was idle for too long. If no slot is free, it waits in the backlog, in order of arrival. One entry of a
sequence runs at a time, in order. An entry that leaves without running (dropped, too late) does not count: its START
passes to the next entry, and its END takes effect after all earlier entries. A sequence is removed if all its entries
leave before one runs.

In iterative sequences each entry is a whole sequence: it begins it, `requeue` puts it back as often as the model
requests, and the sequence ends with it. Entries with the same id run one after another.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from edge_server.core.batch_queue import QueueEntry
from edge_server.core.ensemble_and_sequence_spec import OldestStrategy, SequenceBatching
from edge_server.core.sequence_ready_queue import DirectReadyQueue, OldestReadyQueue, SequenceReadyQueue
from edge_server.errors import QueueFull, SequenceNotBegun
from edge_server.record import record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Item = TypeVar("Item")

_SLACK = 64
"""Most deadlines of removed entries that may stay in the heap, beyond one for each waiting entry."""
_MAX_CLOSED = 256
"""Most idle sequences that one call closes, so that the caller holds its lock only briefly."""
_WAITING_PER_SLOT = 16
_MIN_WAITING = 1024


class WaitingLimits(NamedTuple):
    """Limits of waiting work that clients can create. `sequences` may wait for a slot; 0: sixteen per slot, at least
    1,024. `requests` of one sequence may wait behind its running request."""

    sequences: int = 0
    requests: int = 4096

    def sequence_limit(self, slot_count: int) -> int:
        """Return the number of sequences that may wait for one of `slot_count` slots."""
        return self.sequences or max(_MIN_WAITING, _WAITING_PER_SLOT * slot_count)

    def check_sequences(self, waiting: int, slot_count: int, model: str) -> None:
        """Raise QueueFull if no further sequence may wait."""
        limit = self.sequence_limit(slot_count)
        if waiting >= limit:
            raise QueueFull(
                f"Exceeds maximum queue size: {waiting} sequences are waiting for a slot of model '{model}' already, "
                f"at most {limit} may"
            )

    def check_requests(self, waiting: int, sequence_id: int | str, model: str) -> None:
        """Raise QueueFull if no further request of the sequence may wait."""
        if waiting >= self.requests:
            raise QueueFull(
                f"Exceeds maximum queue size: {waiting} requests of sequence {sequence_id} are waiting for model "
                f"'{model}' already, at most {self.requests} may"
            )


class SequenceSlot(NamedTuple):
    """A row of an instance; both numbers start at 0."""

    instance: int
    row: int


class _InstanceRows:
    """The rows of one instance. Stores only rows that were ever used: the model may allow billions."""

    def __init__(self) -> None:
        self.returned: list[int] = []
        self.used: set[int] = set()
        self._next_unused = 0

    @property
    def lowest_free(self) -> int:
        return self.returned[0] if self.returned else self._next_unused

    def take_lowest(self) -> int:
        if self.returned:
            row = heapq.heappop(self.returned)
        else:
            row, self._next_unused = self._next_unused, self._next_unused + 1
        self.used.add(row)
        return row


class SequenceSlots:
    """`rows` slots on each of `instance_count` instances. The lowest free row of any instance is used first, so that
    all instances fill evenly."""

    def __init__(self, instance_count: int, rows: int) -> None:
        self._limit = rows
        self._instances = [_InstanceRows() for _ in range(instance_count)]

    @property
    def count(self) -> int:
        return self._limit * len(self._instances)

    @property
    def used_count(self) -> int:
        return sum(len(rows.used) for rows in self._instances)

    def take(self) -> SequenceSlot | None:
        """Return the free slot with the lowest row, or None if all are in use."""
        if not self._instances:
            return None
        lowest, instance = min((rows.lowest_free, number) for number, rows in enumerate(self._instances))
        if lowest >= self._limit:
            return None
        return SequenceSlot(instance, self._instances[instance].take_lowest())

    def give_back(self, slot: SequenceSlot) -> None:
        rows = self._instances[slot.instance]
        rows.used.remove(slot.row)
        heapq.heappush(rows.returned, slot.row)


@record(slots=True, eq=False)
class SequenceEntry(QueueEntry[Item]):
    """An entry that is a step of the sequence `id`. `offer` sets `sequence`. `instance` is the instance for which it
    was taken (-1 before), and `row` its row in the batch.

    `start_number` counts the STARTs of its sequence up to this entry. `is_start` is the client's flag until the entry
    can run. Then it says whether the entry is the first one to run since the sequence began. `names_version`: its
    client chose the version.
    """

    id: int | str = 0
    is_start: bool = False
    is_end: bool = False
    start_number: int = 0
    names_version: bool = False
    sequence: LiveSequence[Item] | None = None
    instance: int = -1
    row: int = 0


@record(slots=True, eq=False)
class LiveSequence(Generic[Item]):
    """One sequence from its START on.

    `running` is the entry that runs. `offered_starts` counts the STARTs that were offered. `taken_starts` counts the
    STARTs up to the latest entry that was taken; 0: none was taken. `names_version` is that of its latest START.
    `is_closed`: the sequence ends when none of its entries waits or runs, because its END was offered or it is
    iterative. `idle_ns` is the time since which a sequence that is not closed has no entry that waits or runs.
    The caller owns `state` and `state_key`: the state between two entries (None before the first), and the key that two
    states in one batch have in common.
    """

    id: int | str
    # An ordered dictionary: the first entry and any other entry leave in constant time.
    waiting: OrderedDict[SequenceEntry[Item], None] = field(default_factory=OrderedDict)
    slot: SequenceSlot | None = None
    running: SequenceEntry[Item] | None = None
    offered_starts: int = 0
    taken_starts: int = 0
    names_version: bool = False
    is_closed: bool = False
    idle_ns: int = 0
    state: Mapping[str, npt.NDArray[np.generic]] | None = None
    state_key: Hashable = None


@record(slots=True)
class SequenceTurn(Generic[Item]):
    """A batch of sequence steps: items and entries in ascending order of `row`, and the number of rows with gaps."""

    items: list[Item]
    entries: list[SequenceEntry[Item]]
    row_count: int


class SequenceQueue(Generic[Item]):
    """Queue of one version of a sequence model. `max_items` is its max_batch_size, `name` the model's name.

    Instances have numbers from 0 to `instance_count` - 1.
    """

    def __init__(
        self, max_items: int, batching: SequenceBatching, name: str, limits: WaitingLimits | None = None
    ) -> None:
        self._limits = limits or WaitingLimits()
        self._batching = batching
        self._name = name
        self._max_items = max(1, max_items)
        self._max_idle_ns = batching.max_idle_us * 1000
        self._is_iterative = batching.is_iterative
        self._is_direct = not isinstance(batching.strategy, OldestStrategy)
        self._live: dict[int | str, LiveSequence[Item]] = {}
        self._waiting: dict[SequenceEntry[Item], None] = {}
        self._backlog: OrderedDict[LiveSequence[Item], None] = OrderedDict()
        self._idle: OrderedDict[LiveSequence[Item], None] = OrderedDict()
        self._ready_queues: list[SequenceReadyQueue[SequenceEntry[Item]]] = []
        self._slots = SequenceSlots(0, 1)
        self._deadlines: list[tuple[int, int, SequenceEntry[Item]]] = []
        self._deadline_count = 0
        self.item_limit = self._max_items
        """Most items of a batch of the oldest strategy."""

    @property
    def size(self) -> int:
        return len(self._waiting)

    @property
    def live_count(self) -> int:
        """Number of sequences with a slot."""
        return self._slots.used_count

    @property
    def backlog_count(self) -> int:
        """Number of sequences that wait for a slot."""
        return len(self._backlog)

    def open(self, instance_count: int) -> None:
        """Create the slots. Call it once, before the first entry."""
        strategy = self._batching.strategy
        if isinstance(strategy, OldestStrategy):
            self._slots = SequenceSlots(instance_count, strategy.max_candidate_sequences)
            rows, name = self._max_items, self._name
            self._ready_queues = [
                OldestReadyQueue[SequenceEntry[Item]](rows, strategy, name) for _ in range(instance_count)
            ]
        else:
            self._slots = SequenceSlots(instance_count, self._max_items)
            self._ready_queues = [
                DirectReadyQueue[SequenceEntry[Item]](self._max_items, strategy) for _ in range(instance_count)
            ]

    def offer(self, entry: QueueEntry[Item], item: Item) -> None:
        """Append an entry to its sequence.

        Raises SequenceNotBegun if the sequence does not exist, and QueueFull if too much waits. The entry is then not
        in the queue.
        """
        assert isinstance(entry, SequenceEntry)
        now_ns = entry.arrived_ns
        self._close_idle(now_ns)
        sequence = self._live.get(entry.id)
        if sequence is not None and sequence in self._idle and now_ns >= self._idle_until(sequence):
            # `_close_idle` closes a limited number per call; this one was left over.
            del self._idle[sequence]
            self._remove_sequence(sequence, now_ns)
            sequence = None
        if sequence is None:
            if not entry.is_start:
                raise SequenceNotBegun(
                    f"inference request for sequence {entry.id} to model '{self._name}' must specify the START flag on "
                    f"the first request of the sequence; no such sequence is live: it ended, was idle for more than "
                    f"{self._batching.max_idle_us / 1000:g} ms, lost every request before one ran, or began before the "
                    f'model was loaded anew; the START flag is the request parameter "sequence_start": true'
                )
            self._limits.check_sequences(len(self._backlog), self._slots.count, self._name)
            sequence = self._live[entry.id] = LiveSequence(entry.id)
            self._backlog[sequence] = None
        else:
            self._limits.check_requests(len(sequence.waiting), entry.id, self._name)
        if entry.is_start:
            sequence.offered_starts += 1
            sequence.names_version = entry.names_version
        entry.item, entry.sequence, entry.start_number = item, sequence, sequence.offered_starts
        sequence.waiting[entry] = None
        self._add_waiting(entry)
        self._idle.pop(sequence, None)
        if entry.is_end:
            # The id is free now: the next START with it begins another sequence.
            sequence.is_closed = True
            del self._live[entry.id]
        elif self._is_iterative:
            sequence.is_closed = True
        if sequence.slot is None:
            self._fill_slots(now_ns)
        elif len(sequence.waiting) == 1 and sequence.running is None:
            self._make_ready(sequence, now_ns)

    def requeue(self, entry: QueueEntry[Item], item: Item, now_ns: int) -> None:
        """Put a taken entry back as the next one of its sequence, instead of `finish`. It is no START then."""
        assert isinstance(entry, SequenceEntry)
        sequence = entry.sequence
        assert sequence is not None
        assert sequence.running is entry
        sequence.running = None
        entry.item = item
        sequence.waiting[entry] = None
        sequence.waiting.move_to_end(entry, last=False)
        self._add_waiting(entry)
        self._make_ready(sequence, now_ns)

    def drop(self, entry: QueueEntry[Item]) -> bool:
        """Remove a waiting entry. Return False if it does not wait any more."""
        assert isinstance(entry, SequenceEntry)
        if entry.item is None:
            return False
        self._remove(entry, entry.arrived_ns)
        return True

    def has_routed(self, sequence_id: int | str) -> bool:
        """Return whether a sequence with this id lives here whose START named no version."""
        sequence = self._live.get(sequence_id)
        return sequence is not None and not sequence.names_version

    def end(self, sequence_id: int | str, now_ns: int) -> None:
        """End a sequence without an END entry, after its waiting entries have run."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is not None:
            sequence.is_closed = True
            self._idle.pop(sequence, None)
            if not sequence.waiting:
                self._advance(sequence, now_ns)

    def is_due(self, instance: int, now_ns: int) -> bool:
        """Return whether `take` would return a batch now. Call `expire` first."""
        return self._ready_queues[instance].is_due(now_ns, self.item_limit)

    def take(self, instance: int, now_ns: int) -> SequenceTurn[Item]:
        """Remove and return the batch that an instance should run now; it may have no items.

        The caller gives each entry back with `finish`. Call `expire` first.
        """
        chosen = self._ready_queues[instance].take(now_ns, self.item_limit)
        # As in Triton, the batch has no rows above the highest row that runs, because no sequence would use them.
        height = max((row for row, _ in chosen), default=-1) + 1
        turn: SequenceTurn[Item] = SequenceTurn([], [], height if self._is_direct else len(chosen))
        for row, entry in chosen:
            assert entry.sequence is not None
            del entry.sequence.waiting[entry]
            entry.sequence.running, entry.sequence.taken_starts = entry, entry.start_number
            entry.instance, entry.row = instance, row
            turn.entries.append(entry)
            turn.items.append(self._pop_item(entry))
        return turn

    def finish(self, entry: QueueEntry[Item], now_ns: int) -> None:
        """Give back a taken entry: its sequence can continue. Does nothing for an entry that does not run."""
        assert isinstance(entry, SequenceEntry)
        sequence = entry.sequence
        if sequence is None or sequence.running is not entry:
            return
        sequence.running = entry.sequence = None
        self._advance(sequence, now_ns)

    def expire(self, now_ns: int) -> list[Item]:
        """Close sequences that were idle for too long; remove and return items that cannot start in time any more.

        Closes a limited number of sequences. While more are left, `next_deadline_ns` is in the past.
        """
        self._close_idle(now_ns)
        expired: list[Item] = []
        while self._deadlines and (self._deadlines[0][0] <= now_ns or self._deadlines[0][2].item is None):
            entry = heapq.heappop(self._deadlines)[2]
            if entry.item is not None:
                expired.append(self._remove(entry, now_ns))
        return expired

    def clear(self) -> list[Item]:
        """Remove and return all waiting items, in order of arrival."""
        return [self._remove(entry, entry.arrived_ns) for entry in list(self._waiting)]

    def next_deadline_ns(self) -> int | None:
        """Return the next deadline of an entry or of an idle sequence, or None."""
        while self._deadlines and self._deadlines[0][2].item is None:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._idle:
            times.append(self._idle_until(next(iter(self._idle))))
        return min(times, default=None)

    def next_wakeup_ns(self) -> int | None:
        """Return the next time at which `is_due` or `expire` may change without a new offer; None: never.

        Call it after `is_due` returned False.
        """
        times = [queue.next_due_ns for queue in self._ready_queues] + [self.next_deadline_ns()]
        return min((when for when in times if when is not None), default=None)

    def _add_waiting(self, entry: SequenceEntry[Item]) -> None:
        self._waiting[entry] = None
        if entry.start_by_ns:
            self._deadline_count += 1
            heapq.heappush(self._deadlines, (entry.start_by_ns, self._deadline_count, entry))

    def _make_ready(self, sequence: LiveSequence[Item], now_ns: int) -> None:
        """Add the first waiting entry of a sequence to its instance's ready queue."""
        assert sequence.slot is not None
        entry = next(iter(sequence.waiting))
        entry.is_start = entry.start_number > sequence.taken_starts
        key = (entry.key, None if entry.is_start else sequence.state_key)
        self._ready_queues[sequence.slot.instance].add(entry, sequence.slot.row, key, now_ns)

    def _remove(self, entry: SequenceEntry[Item], now_ns: int) -> Item:
        """Remove a waiting entry. Its START and END flags keep their effect on the sequence."""
        sequence = entry.sequence
        assert sequence is not None
        slot = sequence.slot
        is_ready = slot is not None and sequence.running is None and next(iter(sequence.waiting)) is entry
        if is_ready and slot is not None:
            self._ready_queues[slot.instance].remove(entry)
        del sequence.waiting[entry]
        entry.sequence = None
        if is_ready or not sequence.waiting:
            self._advance(sequence, now_ns)
        return self._pop_item(entry)

    def _pop_item(self, entry: SequenceEntry[Item]) -> Item:
        """Remove an entry from the waiting entries, and return its item."""
        del self._waiting[entry]
        item, entry.item = entry.item, None
        assert item is not None
        if len(self._deadlines) > 2 * len(self._waiting) + _SLACK:
            self._deadlines = [timed for timed in self._deadlines if timed[2].item is not None]
            heapq.heapify(self._deadlines)
        return item

    def _advance(self, sequence: LiveSequence[Item], now_ns: int) -> None:
        """Make the next entry ready; without one, remove the sequence or note that it is idle."""
        if sequence.running is not None:
            return
        if sequence.waiting:
            if sequence.slot is not None:
                self._make_ready(sequence, now_ns)
        elif sequence.is_closed or not sequence.taken_starts:
            self._remove_sequence(sequence, now_ns)
        else:
            sequence.idle_ns = now_ns
            self._idle[sequence] = None
            self._idle.move_to_end(sequence)

    def _remove_sequence(self, sequence: LiveSequence[Item], now_ns: int) -> None:
        """Remove a sequence, and give its slot to the next one of the backlog."""
        if self._live.get(sequence.id) is sequence:
            del self._live[sequence.id]
        self._backlog.pop(sequence, None)
        if sequence.slot is not None:
            self._slots.give_back(sequence.slot)
            sequence.slot = None
            self._fill_slots(now_ns)

    def _fill_slots(self, now_ns: int) -> None:
        while self._backlog and (slot := self._slots.take()) is not None:
            sequence = self._backlog.popitem(last=False)[0]
            sequence.slot = slot
            if sequence.waiting:
                self._make_ready(sequence, now_ns)

    def _close_idle(self, now_ns: int) -> None:
        for _ in range(min(len(self._idle), _MAX_CLOSED)):
            sequence = next(iter(self._idle))
            if now_ns < self._idle_until(sequence):
                return
            del self._idle[sequence]
            self._remove_sequence(sequence, now_ns)

    def _idle_until(self, sequence: LiveSequence[Item]) -> int:
        return sequence.idle_ns + self._max_idle_ns + 1
