"""Sequences of requests: who holds a slot, who waits for one, which requests may run now.

The rule of Triton's sequence batcher, told as a function of the entries and `now`: no threads, no clock, no callbacks.
The caller holds its own lock around every method. Times are nanoseconds of any monotonic clock.

A sequence begins with an entry that says START and is bound to a slot, a row of one instance, until its END was
served or it was idle for too long; one that finds no slot free waits in the backlog, first come, first served. Of each
sequence one entry at a time is served, in order. An entry that leaves unserved (dropped, too late) is no part of its
sequence: its START passes to the next entry, its END takes effect once all before it are served. A sequence of which
every entry left before any ran is forgotten.

Where sequences are iterative, an entry is a whole one: it begins it, is put back by `take_again` as often as the model
asks for that, each time with what else may run then, and the sequence ends with it. Entries that meet in one id are
served one after another.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from edge_server.core.batch_queue import QueueEntry
from edge_server.core.composition_spec import OldestStrategy, SequenceBatching
from edge_server.core.sequence_limits import WaitingLimits
from edge_server.core.sequence_queue import DirectReadyQueue, OldestReadyQueue, SequenceReadyQueue
from edge_server.core.sequence_slots import SequenceSlot, SequenceSlots
from edge_server.errors import SequenceNotBegun

Item = TypeVar("Item")

_SLACK = 64
"""How many deadlines of entries that are gone may lie around, beyond one for each entry that waits."""
_MOST_CLOSED = 256
"""How many idle sequences are closed at a time, so that the caller's lock is not held for the others."""


@dataclass(slots=True, eq=False)
class SequenceEntry(QueueEntry[Item]):
    """An entry that is a step of the sequence `id`. `sequence` is what it was made a part of when it was offered;
    `instance` the number of the one that it was taken for, -1 before that, and `row` its place in the batch there.

    `beginning` counts the STARTs that its sequence was offered up to this entry. `is_start` is as the client said until
    the entry may run, from then on whether it is the first to do so since its sequence began.
    """

    id: int | str = 0
    is_start: bool = False
    is_end: bool = False
    beginning: int = 0
    sequence: LiveSequence[Item] | None = None
    instance: int = -1
    row: int = 0


@dataclass(slots=True, eq=False)
class LiveSequence(Generic[Item]):
    """One sequence from its START on.

    `served` is the entry that runs. `beginning` counts the STARTs that were offered, `begun` those of them up to the
    latest entry that was taken; 0: none was.
    `is_closed`: it ends once nothing of it waits or runs; its END was offered, or it is iterative. `idle_ns` is since
    when nothing of one that is not closed waits or runs.
    `state` and `state_key` are the caller's: what is kept for it between two entries, None before the first, and what
    two states must have in common to share a batch.
    """

    id: int | str
    # An ordered dictionary: the first and any other entry alike leave in constant time.
    waiting: OrderedDict[SequenceEntry[Item], None] = field(default_factory=OrderedDict)
    slot: SequenceSlot | None = None
    served: SequenceEntry[Item] | None = None
    beginning: int = 0
    begun: int = 0
    is_closed: bool = False
    idle_ns: int = 0
    state: Mapping[str, npt.NDArray[np.generic]] | None = None
    state_key: Hashable = None


@dataclass(slots=True)
class SequenceTurn(Generic[Item]):
    """A batch: items and their entries, ascending by `row`, and how many rows it has with those that nobody uses."""

    items: list[Item]
    entries: list[SequenceEntry[Item]]
    row_count: int


class SequenceQueue(Generic[Item]):
    """The waiting line of one version whose model knows sequences. `max_rows` is its max_batch_size, `name` its name.

    Instances go by their number, 0 to `instance_count` - 1.
    """

    def __init__(
        self, max_rows: int, batching: SequenceBatching, name: str, limits: WaitingLimits | None = None
    ) -> None:
        self._limits = limits or WaitingLimits()
        self._batching = batching
        self._name = name
        self._max_rows = max(1, max_rows)
        self._max_idle_ns = batching.max_idle_us * 1000
        self._is_iterative = batching.is_iterative
        self._is_direct = not isinstance(batching.strategy, OldestStrategy)
        self._live: dict[int | str, LiveSequence[Item]] = {}
        self._waiting: dict[SequenceEntry[Item], None] = {}
        self._backlog: OrderedDict[LiveSequence[Item], None] = OrderedDict()
        self._idle: OrderedDict[LiveSequence[Item], None] = OrderedDict()
        self._lines: list[SequenceReadyQueue[SequenceEntry[Item]]] = []
        self._slots = SequenceSlots(0, 1)
        self._deadlines: list[tuple[int, int, SequenceEntry[Item]]] = []
        self._offered = 0
        self.row_limit = self._max_rows
        """No batch of the oldest strategy gets larger than this."""

    @property
    def size(self) -> int:
        return len(self._waiting)

    @property
    def live_count(self) -> int:
        """How many sequences hold a slot."""
        return self._slots.used_count

    @property
    def backlog_count(self) -> int:
        """How many sequences wait for a slot."""
        return len(self._backlog)

    def open(self, instance_count: int) -> None:
        """Provide the slots. Called once, before the first entry."""
        strategy = self._batching.strategy
        if isinstance(strategy, OldestStrategy):
            self._slots = SequenceSlots(instance_count, strategy.max_candidate_sequences)
            rows, name = self._max_rows, self._name
            self._lines = [OldestReadyQueue[SequenceEntry[Item]](rows, strategy, name) for _ in range(instance_count)]
        else:
            self._slots = SequenceSlots(instance_count, self._max_rows)
            self._lines = [
                DirectReadyQueue[SequenceEntry[Item]](self._max_rows, strategy) for _ in range(instance_count)
            ]

    def offer(self, entry: QueueEntry[Item], item: Item) -> None:
        """Put an entry at the end of its sequence. Raises SequenceNotBegun where that has not begun, and QueueFull
        where too much waits; then the entry is no part of it."""
        assert isinstance(entry, SequenceEntry)
        now_ns = entry.arrived_ns
        self._close_idle(now_ns)
        sequence = self._live.get(entry.id)
        if sequence is not None and sequence in self._idle and now_ns >= self._idle_until(sequence):
            # One of those that `_close_idle` left for its next turn.
            del self._idle[sequence]
            self._retire(sequence, now_ns)
            sequence = None
        if sequence is None:
            if not entry.is_start:
                raise self._not_begun(entry.id)
            self._limits.check_sequences(len(self._backlog), self._slots.count, self._name)
            sequence = self._live[entry.id] = LiveSequence(entry.id)
            self._backlog[sequence] = None
        else:
            self._limits.check_requests(len(sequence.waiting), entry.id, self._name)
        sequence.beginning += entry.is_start
        entry.item, entry.sequence, entry.beginning = item, sequence, sequence.beginning
        sequence.waiting[entry] = None
        self._wait(entry)
        self._idle.pop(sequence, None)
        if entry.is_end:
            # The id is free: whoever begins with it from now on begins another sequence.
            sequence.is_closed = True
            del self._live[entry.id]
        elif self._is_iterative:
            sequence.is_closed = True
        if sequence.slot is None:
            self._fill_slots(now_ns)
        elif len(sequence.waiting) == 1 and sequence.served is None:
            self._line_up(sequence, now_ns)

    def take_again(self, entry: QueueEntry[Item], item: Item, now_ns: int) -> None:
        """Put an entry that was taken back as the next of its sequence, in place of `finish`. It starts nothing."""
        assert isinstance(entry, SequenceEntry)
        sequence = entry.sequence
        assert sequence is not None
        assert sequence.served is entry
        sequence.served = None
        entry.item = item
        sequence.waiting[entry] = None
        sequence.waiting.move_to_end(entry, last=False)
        self._wait(entry)
        self._line_up(sequence, now_ns)

    def drop(self, entry: QueueEntry[Item]) -> bool:
        """Take a waiting entry out; False when it is no longer waiting."""
        assert isinstance(entry, SequenceEntry)
        if entry.item is None:
            return False
        self._remove(entry, entry.arrived_ns)
        return True

    def end(self, sequence_id: int | str, now_ns: int) -> None:
        """End a sequence without an entry that says so, once what waits of it was served."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is not None:
            sequence.is_closed = True
            self._idle.pop(sequence, None)
            if not sequence.waiting:
                self._go_on(sequence, now_ns)

    def is_due(self, instance: int, now_ns: int) -> bool:
        """Return whether `take` would return a batch now. Call `expire` first."""
        return self._lines[instance].is_due(now_ns, self.row_limit)

    def take(self, instance: int, now_ns: int) -> SequenceTurn[Item]:
        """Remove and return the batch that an instance should run now; without items when there is none.

        Each entry is to be given back with `finish`. Call `expire` first.
        """
        chosen = self._lines[instance].take(now_ns, self.row_limit)
        # Slots above the highest that runs have no row, as in Triton: they would be computed for nobody.
        height = max((row for row, _ in chosen), default=-1) + 1
        turn: SequenceTurn[Item] = SequenceTurn([], [], height if self._is_direct else len(chosen))
        for row, entry in chosen:
            assert entry.sequence is not None
            del entry.sequence.waiting[entry]
            entry.sequence.served, entry.sequence.begun = entry, entry.beginning
            entry.instance, entry.row = instance, row
            turn.entries.append(entry)
            turn.items.append(self._forget(entry))
        return turn

    def finish(self, entry: QueueEntry[Item], now_ns: int) -> None:
        """Let the sequence of an entry that was taken go on. Nothing happens for one that does not run."""
        assert isinstance(entry, SequenceEntry)
        sequence = entry.sequence
        if sequence is None or sequence.served is not entry:
            return
        sequence.served = entry.sequence = None
        self._go_on(sequence, now_ns)

    def expire(self, now_ns: int) -> list[Item]:
        """Close what was idle for too long, or some of it, `next_deadline_ns` being past while there is more; remove
        and return the items that can no longer begin in time."""
        self._close_idle(now_ns)
        expired: list[Item] = []
        while self._deadlines and (self._deadlines[0][0] <= now_ns or self._deadlines[0][2].item is None):
            entry = heapq.heappop(self._deadlines)[2]
            if entry.item is not None:
                expired.append(self._remove(entry, now_ns))
        return expired

    def clear(self) -> list[Item]:
        """Remove and return everything that waits, in the order of arrival."""
        return [self._remove(entry, entry.arrived_ns) for entry in list(self._waiting)]

    def next_deadline_ns(self) -> int | None:
        """Return when the next entry's time runs out, or a sequence's to be idle; None when nothing has a limit."""
        while self._deadlines and self._deadlines[0][2].item is None:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._idle:
            times.append(self._idle_until(next(iter(self._idle))))
        return min(times, default=None)

    def next_wakeup_ns(self) -> int | None:
        """Return when `is_due` or `expire` may say otherwise than they did last, with nothing new offered; None when
        they never will. Meant to be asked after `is_due` said no."""
        times = [line.ripe_ns for line in self._lines] + [self.next_deadline_ns()]
        return min((when for when in times if when is not None), default=None)

    def _wait(self, entry: SequenceEntry[Item]) -> None:
        self._waiting[entry] = None
        if entry.start_by_ns:
            self._offered += 1
            heapq.heappush(self._deadlines, (entry.start_by_ns, self._offered, entry))

    def _line_up(self, sequence: LiveSequence[Item], now_ns: int) -> None:
        """Put the first waiting entry of a sequence among those that may run."""
        assert sequence.slot is not None
        entry = next(iter(sequence.waiting))
        entry.is_start = entry.beginning > sequence.begun
        key = (entry.key, None if entry.is_start else sequence.state_key)
        self._lines[sequence.slot.instance].add(entry, sequence.slot.row, key, now_ns)

    def _remove(self, entry: SequenceEntry[Item], now_ns: int) -> Item:
        """Take a waiting entry out; what it said of the sequence stays said."""
        sequence = entry.sequence
        assert sequence is not None
        slot = sequence.slot
        is_lined_up = slot is not None and sequence.served is None and next(iter(sequence.waiting)) is entry
        if is_lined_up and slot is not None:
            self._lines[slot.instance].remove(entry)
        del sequence.waiting[entry]
        entry.sequence = None
        if is_lined_up or not sequence.waiting:
            self._go_on(sequence, now_ns)
        return self._forget(entry)

    def _forget(self, entry: SequenceEntry[Item]) -> Item:
        """Note that an entry waits no more, and return its item."""
        del self._waiting[entry]
        item, entry.item = entry.item, None
        assert item is not None
        if len(self._deadlines) > 2 * len(self._waiting) + _SLACK:
            self._deadlines = [timed for timed in self._deadlines if timed[2].item is not None]
            heapq.heapify(self._deadlines)
        return item

    def _go_on(self, sequence: LiveSequence[Item], now_ns: int) -> None:
        if sequence.served is not None:
            return
        if sequence.waiting:
            if sequence.slot is not None:
                self._line_up(sequence, now_ns)
        elif sequence.is_closed or not sequence.begun:
            self._retire(sequence, now_ns)
        else:
            sequence.idle_ns = now_ns
            self._idle[sequence] = None
            self._idle.move_to_end(sequence)

    def _retire(self, sequence: LiveSequence[Item], now_ns: int) -> None:
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
                self._line_up(sequence, now_ns)

    def _close_idle(self, now_ns: int) -> None:
        for _ in range(min(len(self._idle), _MOST_CLOSED)):
            sequence = next(iter(self._idle))
            if now_ns < self._idle_until(sequence):
                return
            del self._idle[sequence]
            self._retire(sequence, now_ns)

    def _idle_until(self, sequence: LiveSequence[Item]) -> int:
        return sequence.idle_ns + self._max_idle_ns + 1

    def _not_begun(self, sequence_id: int | str) -> SequenceNotBegun:
        return SequenceNotBegun(
            f"inference request for sequence {sequence_id} to model '{self._name}' must specify the START flag on the "
            f"first request of the sequence; no such sequence is live: it ended, was idle for more than "
            f"{self._batching.max_idle_us / 1000:g} ms, lost every request before one ran, or began before the model "
            f"was loaded anew"
        )
