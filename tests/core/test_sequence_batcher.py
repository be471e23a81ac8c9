"""Rule of the sequence batcher, case by case: slots, batches, backlog, idle sequences, and flags."""

from __future__ import annotations

from typing import Any

import pytest

from edge_server.core.ensemble_and_sequence_spec import DirectStrategy, OldestStrategy, SequenceBatching
from edge_server.core.sequence_batcher import SequenceEntry, SequenceQueue, WaitingLimits
from edge_server.errors import InvalidRequest, QueueFull

US = 1000


def queue(strategy: DirectStrategy | OldestStrategy, *, rows: int = 4, instances: int = 1) -> SequenceQueue[str]:
    made: SequenceQueue[str] = SequenceQueue(rows, SequenceBatching(strategy, max_idle_us=100), "m")
    made.open(instances)
    return made


def offer(line: SequenceQueue[str], text: str, now_us: int = 0, **more: Any) -> SequenceEntry[str]:
    """Offer "a+" (START of sequence a), "a", "a-" (END) or "a+-"; it is its own item."""
    id = text.rstrip("+-")
    entry: SequenceEntry[str] = SequenceEntry(
        1, more.pop("key", None), now_us * US, id=id, is_start="+" in text, is_end="-" in text, **more
    )
    line.offer(entry, text)
    return entry


def run(line: SequenceQueue[str], now_us: int = 0, instance: int = 0) -> list[str]:
    """Take a batch and finish it at once."""
    turn = line.take(instance, now_us * US)
    for entry in turn.entries:
        line.finish(entry, now_us * US)
    return turn.items


def test_direct_batches_have_a_row_for_every_slot_up_to_the_highest_that_runs() -> None:
    line = queue(DirectStrategy())
    for name in ("a+", "b+", "c+"):
        offer(line, name)
    assert (line.take(0, 0).row_count, line.live_count) == (3, 3)
    line = queue(DirectStrategy())
    offer(line, "a+")
    offer(line, "b+-")
    c = offer(line, "c+")
    assert run(line) == ["a+", "b+-", "c+"]
    offer(line, "c")
    turn = line.take(0, 0)
    assert (turn.items, turn.entries[0].row, turn.row_count) == (["c"], 2, 3)
    assert c.row == 2
    line.finish(turn.entries[0], 0)
    offer(line, "a")
    turn = line.take(0, 0)
    assert (turn.items, turn.row_count) == (["a"], 1), "nobody computes for the slot of c, which has nothing to run"
    offer(line, "d+")
    assert line.take(0, 0).entries[0].row == 1, "the lowest free slot is taken"


def test_sequences_spread_over_the_instances_before_they_share_one() -> None:
    line = queue(DirectStrategy(), instances=2)
    for name in ("a+", "b+", "c+", "d+"):
        offer(line, name)
    assert [run(line, instance=0), run(line, instance=1)] == [["a+", "c+"], ["b+", "d+"]]


def test_steps_of_other_shapes_wait_for_a_batch_of_their_own() -> None:
    line = queue(DirectStrategy())
    offer(line, "a+", key=1)
    offer(line, "b+", key=2)
    offer(line, "c+", key=1)
    assert [run(line), run(line), run(line)] == [["a+", "c+"], ["b+"], []]


def test_direct_waits_until_enough_slots_are_ready_or_the_delay_is_over() -> None:
    line = queue(DirectStrategy(50, 0.5))
    offer(line, "a+")
    assert not line.is_due(0, 0)
    assert line.next_wakeup_ns() == 50 * US
    assert not line.is_due(0, 49 * US)
    assert run(line, 50) == ["a+"]
    offer(line, "a", 60)
    assert not line.is_due(0, 60 * US)
    offer(line, "b+", 61)
    assert run(line, 61) == ["a", "b+"]


def test_the_delay_of_direct_means_nothing_without_a_minimum_utilization() -> None:
    line = queue(DirectStrategy(50))
    offer(line, "a+")
    assert run(line, 0) == ["a+"]


def test_oldest_takes_the_steps_that_were_ready_first_and_waits_as_the_dynamic_batcher_does() -> None:
    line = queue(OldestStrategy(10, (2,), 50), rows=3)
    offer(line, "a+", 0)
    offer(line, "a", 0)
    assert not line.is_due(0, 0)
    offer(line, "b+", 10)
    assert run(line, 10) == ["a+", "b+"], "a preferred size runs at once"
    offer(line, "c+", 20)
    assert run(line, 20) == ["a", "c+"]
    offer(line, "d+", 30)
    assert run(line, 79) == []
    assert run(line, 80) == ["d+"]


def test_no_more_than_the_candidates_of_an_instance_are_live_and_the_others_wait_their_turn() -> None:
    line = queue(OldestStrategy(1), rows=4)
    for name in ("a+", "b+", "c+", "b-"):
        offer(line, name)
    assert (run(line), line.backlog_count) == (["a+"], 2)
    assert run(line) == []
    offer(line, "a-")
    assert [run(line), run(line), run(line), run(line)] == [["a-"], ["b+"], ["b-"], ["c+"]]
    assert (line.live_count, line.backlog_count) == (1, 0)


def test_billions_of_candidates_cost_nothing() -> None:
    line = queue(OldestStrategy(2**31 - 1), rows=2, instances=1000)
    offer(line, "a+")
    assert line.live_count == 1


def test_a_sequence_that_is_idle_for_too_long_is_closed_and_its_slot_goes_on() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+", 0)
    assert run(line, 10) == ["a+"]
    offer(line, "b+", 20)
    assert line.next_wakeup_ns() == 110 * US + 1
    line.expire(110 * US)
    assert run(line, 110) == []
    line.expire(110 * US + 1)
    assert run(line, 111) == ["b+"]
    with pytest.raises(InvalidRequest, match=r"sequence a to model 'm' must specify the START flag on the first"):
        offer(line, "a", 112)


def test_a_sequence_with_a_request_under_way_is_not_idle() -> None:
    line = queue(DirectStrategy())
    offer(line, "a+", 0)
    turn = line.take(0, 0)
    line.expire(10_000 * US)
    offer(line, "a", 10_000)
    line.finish(turn.entries[0], 10_001 * US)
    assert run(line, 10_001) == ["a"]


def test_start_on_a_live_id_begins_it_again_in_the_same_slot() -> None:
    line = queue(DirectStrategy())
    for name in ("a+", "b+", "a", "b+"):
        offer(line, name)
    assert run(line) == ["a+", "b+"]
    turn = line.take(0, 0)
    assert [(entry.id, entry.row, entry.is_start) for entry in turn.entries] == [("a", 0, False), ("b", 1, True)]
    assert line.live_count == 2


def test_an_id_may_begin_again_while_its_end_still_waits() -> None:
    line = queue(DirectStrategy(), rows=1)
    for name in ("a+", "a-", "a+-"):
        offer(line, name)
    with pytest.raises(InvalidRequest, match="START"):
        offer(line, "a")
    assert [run(line), run(line), run(line)] == [["a+"], ["a-"], ["a+-"]]
    assert line.live_count == 0


def test_a_start_that_leaves_passes_its_flag_on() -> None:
    line = queue(DirectStrategy(), rows=1)
    first = offer(line, "a+")
    offer(line, "a")
    assert line.drop(first)
    turn = line.take(0, 0)
    assert (turn.items, turn.entries[0].is_start) == (["a"], True)
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+")
    assert run(line) == ["a+"]
    assert line.drop(offer(line, "a+"))
    offer(line, "a")
    assert line.take(0, 0).entries[0].is_start


def test_of_two_starts_that_wait_the_one_that_leaves_takes_nothing_from_the_other() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+")
    second = offer(line, "a+")
    offer(line, "a")
    offer(line, "a")
    assert line.drop(second)
    told = []
    for _ in range(3):
        (entry,) = line.take(0, 0).entries
        told.append(entry.is_start)
        line.finish(entry, 0)
    assert told == [True, True, False]


def test_a_sequence_of_which_nothing_ever_ran_is_forgotten_with_its_last_entry() -> None:
    line = queue(OldestStrategy(1))
    offer(line, "a+")
    entries = [offer(line, "b+"), offer(line, "b")]
    assert line.backlog_count == 1
    assert all(line.drop(entry) for entry in entries)
    assert line.backlog_count == 0
    offer(line, "c+", start_by_ns=50 * US)
    assert line.expire(50 * US) == ["c+"]
    assert (line.live_count, line.backlog_count, line.size) == (1, 0, 1)
    for id in ("b", "c"):
        with pytest.raises(InvalidRequest, match=f"sequence {id} .*lost every request before one ran"):
            offer(line, id, 60)
    slotted = queue(OldestStrategy(1))
    first = offer(slotted, "a+")
    offer(slotted, "b+")
    assert slotted.drop(first)
    assert (run(slotted), slotted.live_count, slotted.backlog_count) == (["b+"], 1, 0)


def test_starts_that_are_dropped_again_and_again_leave_nothing() -> None:
    line = queue(OldestStrategy(1))
    offer(line, "held+")
    for number in range(5000):
        assert line.drop(offer(line, f"a{number}+", start_by_ns=10**12))
    assert (line.live_count, line.backlog_count, line.size) == (1, 0, 1)
    assert len(line._live) == 1
    assert len(line._deadlines) < 200


def test_so_many_sequences_may_wait_and_one_more_is_refused_until_there_is_room() -> None:
    line = SequenceQueue[str](1, SequenceBatching(OldestStrategy(2)), "m", WaitingLimits(sequences=3))
    line.open(1)
    for name in ("a+", "b+", "c+", "d+", "e+"):
        offer(line, name)
    refusal = "3 sequences are waiting for a slot of model 'm' already, at most 3 may"
    for _ in range(3):
        with pytest.raises(QueueFull, match=refusal) as caught:
            offer(line, "f+")
    assert caught.value.retry_after_s == 1.0
    assert (line.live_count, line.backlog_count, line.size) == (2, 3, 5)
    offer(line, "c")
    offer(line, "a-")
    assert [run(line), run(line), run(line)] == [["a+"], ["b+"], ["a-"]]
    offer(line, "f+")
    with pytest.raises(QueueFull, match=refusal):
        offer(line, "g+")


@pytest.mark.parametrize(
    ("limits", "slots", "expected"),
    [
        (WaitingLimits(), 4, 1024),
        (WaitingLimits(), 100, 1600),
        (WaitingLimits(sequences=5), 100, 5),
    ],
)
def test_by_default_sixteen_sequences_may_wait_for_each_slot_but_at_least_1024(
    limits: WaitingLimits, slots: int, expected: int
) -> None:
    line = SequenceQueue[str](1, SequenceBatching(OldestStrategy(slots)), "m", limits)
    line.open(1)
    for number in range(slots + expected):
        offer(line, f"a{number}+")
    with pytest.raises(QueueFull, match=f"at most {expected} may"):
        offer(line, "late+")
    assert (line.live_count, line.backlog_count) == (slots, expected)


def test_so_many_requests_of_one_sequence_may_wait_and_others_are_not_bound_by_that() -> None:
    line = SequenceQueue[str](1, SequenceBatching(OldestStrategy(2)), "m", WaitingLimits(requests=2))
    line.open(1)
    offer(line, "a+")
    turn = line.take(0, 0)
    waiting = [offer(line, "a"), offer(line, "a")]
    for text in ("a", "a+", "a-"):
        with pytest.raises(QueueFull, match="2 requests of sequence a are waiting for model 'm' already, at most 2"):
            offer(line, text)
    offer(line, "b+-")
    assert line.drop(waiting[1])
    offer(line, "a-")
    line.finish(turn.entries[0], 0)
    assert [run(line), run(line), run(line)] == [["b+-"], ["a"], ["a-"]]
    assert line.live_count == 0


def test_a_long_line_of_one_sequence_is_left_from_the_back_and_the_middle_and_keeps_its_order() -> None:
    line = SequenceQueue[str](1, SequenceBatching(), "m", WaitingLimits(requests=20_000))
    line.open(1)
    entries = [offer(line, "a+"), *(offer(line, "a") for _ in range(19_999))]
    kept = {0, 7, 10_000}
    for number in reversed(range(20_000)):
        if number not in kept:
            assert line.drop(entries[number])
    taken = []
    while (turn := line.take(0, 0)).entries:
        taken += [(entries.index(entry), entry.is_start) for entry in turn.entries]
        line.finish(turn.entries[0], 0)
    assert taken == [(0, True), (7, False), (10_000, False)]


def test_many_idle_sequences_are_closed_some_at_a_time_and_none_of_them_goes_on() -> None:
    line = queue(OldestStrategy(1000), rows=1)
    names = [f"a{number}" for number in range(600)]
    for name in names:
        offer(line, name + "+")
    while run(line):
        pass
    line.expire(200 * US)
    assert 0 < line.live_count < 600
    wakeup = line.next_wakeup_ns()
    assert wakeup is not None
    assert wakeup <= 200 * US, "there is more to close"
    with pytest.raises(InvalidRequest, match="START"):
        offer(line, names[-1], 200)
    for _ in range(3):
        line.expire(200 * US)
    assert (line.live_count, line.next_wakeup_ns()) == (0, None)


def test_an_end_that_leaves_ends_its_sequence_all_the_same() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+")
    last = offer(line, "a-")
    offer(line, "b+")
    assert line.drop(last)
    assert [run(line), run(line)] == [["a+"], ["b+"]]
    line = queue(DirectStrategy(), rows=1)
    only = offer(line, "a+-")
    waiting = offer(line, "b+-")
    assert line.drop(waiting)
    assert line.drop(only)
    assert (line.live_count, line.backlog_count, line.size) == (0, 0, 0)


def test_a_step_that_is_too_late_leaves_and_the_others_keep_their_order() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+", 0)
    late = offer(line, "a", 0, start_by_ns=50 * US)
    offer(line, "a-", 0)
    turn = line.take(0, 0)
    assert line.next_deadline_ns() == 50 * US
    assert line.expire(50 * US) == ["a"]
    assert not line.drop(late)
    line.finish(turn.entries[0], 60 * US)
    assert run(line, 60) == ["a-"]
    assert line.live_count == 0


def test_states_of_different_shapes_share_no_batch_and_a_start_forgets_the_shape() -> None:
    line = queue(OldestStrategy(4))
    entries = [offer(line, name) for name in ("a+", "b+", "c+")]
    for number, entry in enumerate(line.take(0, 0).entries):
        assert entry.sequence is not None
        entry.sequence.state_key = number
    for entry in entries:
        line.finish(entry, 0)
    for name in ("a", "b", "c+"):
        offer(line, name)
    assert sorted([run(line), run(line), run(line)]) == [["a"], ["b"], ["c+"]]


def test_a_sequence_may_be_ended_without_an_entry_that_says_so() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+")
    offer(line, "a")
    offer(line, "b+")
    line.end("a", 0)
    line.end("unknown", 0)
    with pytest.raises(InvalidRequest, match="START"):
        offer(line, "a")
    assert [run(line), run(line), run(line)] == [["a+"], ["a"], ["b+"]]
    line.end("b", 0)
    assert (line.live_count, line.backlog_count, line.next_wakeup_ns()) == (0, 0, None)


def test_a_sequence_ended_while_it_runs_gives_its_slot_away_when_that_is_over() -> None:
    line = queue(DirectStrategy(), rows=1)
    offer(line, "a+")
    turn = line.take(0, 0)
    offer(line, "b+")
    line.end("a", 0)
    assert not line.is_due(0, 0)
    line.finish(turn.entries[0], 0)
    assert run(line) == ["b+"]


# -- iterative ------------------------------------------------------------------------------------------------------


def test_an_iterative_entry_is_taken_again_and_again_and_its_sequence_ends_with_it() -> None:
    line = SequenceQueue[str](4, SequenceBatching(OldestStrategy(2), is_iterative=True), "m")
    line.open(1)
    entries = {name: SequenceEntry(1, None, 0, id=name, is_start=True) for name in "abc"}
    for name in "abc":
        line.offer(entries[name], name)
    assert (line.live_count, line.backlog_count) == (2, 1)
    assert line.take(0, 1).items == ["a", "b"]
    assert [entries[name].is_start for name in "ab"] == [True, True]
    line.requeue(entries["a"], "a", 2)
    assert not entries["a"].is_start
    line.finish(entries["b"], 2)
    assert (line.live_count, line.backlog_count, line.size) == (2, 0, 2)
    assert line.take(0, 3).items == ["a", "c"]
    for name in "ac":
        line.finish(entries[name], 4)
    assert (line.live_count, line.size, line.next_wakeup_ns()) == (0, 0, None)


def test_an_iterative_entry_that_waits_again_can_be_dropped_and_expires() -> None:
    line = SequenceQueue[str](4, SequenceBatching(OldestStrategy(4), is_iterative=True), "m")
    line.open(1)
    dropped = SequenceEntry[str](1, None, 0, id=1, is_start=True)
    late = SequenceEntry[str](1, None, 0, start_by_ns=50, id=2, is_start=True)
    for entry, item in ((dropped, "dropped"), (late, "late")):
        line.offer(entry, item)
    assert line.take(0, 1).items == ["dropped", "late"]
    for entry, item in ((dropped, "dropped"), (late, "late")):
        line.requeue(entry, item, 2)
    assert line.drop(dropped)
    assert (line.live_count, line.expire(49)) == (1, [])
    assert (line.expire(50), line.live_count, line.size) == (["late"], 0, 0)


def test_iterative_entries_that_meet_in_one_id_run_one_after_another() -> None:
    line = SequenceQueue[str](4, SequenceBatching(is_iterative=True), "m")
    line.open(1)
    first, second = (SequenceEntry[str](1, None, 0, id=7, is_start=True) for _ in range(2))
    line.offer(first, "first")
    assert line.take(0, 1).items == ["first"]
    line.offer(second, "second")
    line.requeue(first, "first", 2)
    assert line.take(0, 2).items == ["first"]
    line.finish(first, 3)
    assert (line.live_count, line.take(0, 3).items, second.is_start) == (1, ["second"], True)
    line.finish(second, 4)
    assert line.live_count == 0
