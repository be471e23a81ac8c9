"""Rules of a stream's mailbox, as tables and with any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.cameras.streams.frame_counters import Rate, RecentQuantiles
from edge_server.plugins.cameras.streams.frame_mailbox import (
    FrameLimits,
    FrameSpacing,
    FrameTally,
    Mailbox,
    RunEstimate,
)
from edge_server.protocol.frame_messages import Delivery, DropReason

MS = 1_000_000


def estimate(ms: int) -> RunEstimate:
    made = RunEstimate()
    made.add(ms * MS, 0)
    return made


def test_zeros_in_delivery_options_mean_no_limit_and_depth_one():
    assert FrameLimits.of(Delivery(depth=0)) == FrameLimits()
    assert FrameLimits.of(Delivery(depth=3, max_age_ms=5, deadline_ms=7, max_fps=20.0)) == FrameLimits(
        3, 5 * MS, 7 * MS, 50 * MS
    )


def test_the_oldest_frame_is_dropped_first_and_run_first():
    mailbox: Mailbox[str] = Mailbox(FrameLimits(depth=2))
    assert mailbox.offer("a", 1) is None
    assert mailbox.offer("b", 2) is None
    assert mailbox.offer("c", 3) == ("a", DropReason.NEWER)
    assert mailbox.offer("d", 4, reader_is_slow=True) == ("b", DropReason.SLOW_READER)
    assert mailbox.take(5, RunEstimate()) == ("c", [])
    assert mailbox.take(5, RunEstimate()) == ("d", [])
    assert mailbox.take(5, RunEstimate()) == (None, [])


def test_a_frame_that_waited_too_long_is_dropped_when_it_is_due():
    mailbox: Mailbox[str] = Mailbox(FrameLimits(depth=3, max_age_ns=10))
    for at, item in enumerate("abc"):
        mailbox.offer(item, at)
    assert mailbox.take(12, RunEstimate()) == ("c", [("a", DropReason.MAX_AGE), ("b", DropReason.MAX_AGE)])


def test_a_frame_that_cannot_finish_in_time_is_not_started_and_the_estimate_decays():
    mailbox: Mailbox[str] = Mailbox(FrameLimits(depth=2, deadline_ns=100 * MS))
    run = estimate(60)
    mailbox.offer("a", 0)
    assert mailbox.take(40 * MS, run) == ("a", [])
    mailbox.offer("b", 0)
    assert mailbox.take(41 * MS, run) == (None, [("b", DropReason.DEADLINE)])
    assert run.ns < 60 * MS


def test_one_slow_run_does_not_block_a_stream_with_a_deadline():
    mailbox: Mailbox[int] = Mailbox(FrameLimits(deadline_ns=100 * MS))
    run = estimate(60_000)
    for item in range(1000):
        mailbox.offer(item, item * 33 * MS)
        if mailbox.take(item * 33 * MS, run)[0] is not None:
            return
    pytest.fail("no frame was ever tried again")


def test_a_result_is_late_only_past_the_deadline():
    mailbox: Mailbox[str] = Mailbox(FrameLimits(deadline_ns=100))
    assert not mailbox.is_late(0, 100)
    assert mailbox.is_late(0, 101)
    assert not Mailbox[str](FrameLimits()).is_late(0, 10**12)


def test_the_next_frame_is_chosen_late_but_with_time_to_prepare_it():
    run = RunEstimate()
    run.add(100 * MS, 10 * MS)
    assert run.best_choice_ns(0) == 75 * MS
    run = RunEstimate()
    run.add(100 * MS, 40 * MS)
    assert run.best_choice_ns(0) == 19 * MS, "twice the time to make ready, and a millisecond"
    assert RunEstimate().best_choice_ns(5 * MS) <= 5 * MS, "nothing is known yet: now"


@pytest.mark.sample(4)
@pytest.mark.parametrize(("source", "wanted"), [(30, 10), (30, 20), (30, 29), (60, 7), (30, 30), (30, 100), (10, 1)])
def test_spacing_keeps_the_average_rate_for_any_source_rate(source, wanted):
    spacing = FrameSpacing(round(1e9 / wanted))
    taken = sum(spacing.admits(round(frame * 1e9 / source)) for frame in range(source * 100))
    assert taken == pytest.approx(min(source, wanted) * 100, rel=0.01)


@given(st.lists(st.integers(0, 200), max_size=200), st.integers(1, 100))
def test_no_interval_passes_more_frames_than_the_limit(gaps, interval):
    spacing = FrameSpacing(interval)
    now, passed = 0, []
    for gap in gaps:
        now += gap
        if spacing.admits(now):
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= (passed[last] - passed[first]) / interval + 2


EVENTS = st.lists(
    st.tuples(st.sampled_from(["offer", "offer", "slow", "take", "clear"]), st.integers(0, 60)), max_size=150
)
LIMITS = st.builds(
    FrameLimits, st.integers(1, 5), st.sampled_from([0, 40]), st.sampled_from([0, 80]), st.sampled_from([0, 25])
)


@given(LIMITS, EVENTS, st.integers(0, 100))
def test_every_frame_is_taken_dropped_or_waiting_and_order_is_kept(limits, events, run_ns):
    mailbox: Mailbox[int] = Mailbox(limits)
    run = RunEstimate()
    run.add(run_ns, 0)
    tally = FrameTally()
    now = 0
    received_at: dict[int, int] = {}
    taken: list[int] = []
    gone: list[int] = []
    for event, gap in events:
        now += gap
        if event in ("offer", "slow"):
            item = tally.received
            received_at[item] = now
            tally.received += 1
            drops = [mailbox.offer(item, now, reader_is_slow=event == "slow")]
            assert len(mailbox.waiting) <= limits.depth
        elif event == "take":
            found, drops = mailbox.take(now, run)
            if found is not None:
                waited = now - received_at[found]
                assert not limits.max_age_ns or waited <= limits.max_age_ns
                assert not limits.deadline_ns or waited + run.ns <= limits.deadline_ns
                taken.append(found)
                tally.answered += 1
        else:
            drops = [(item, DropReason.CLOSED) for item in mailbox.clear()]
        for drop in drops:
            if drop is not None:
                gone.append(drop[0])
                tally.drop(drop[1])
        assert tally.waiting == len(mailbox.waiting)
    assert taken == sorted(taken)
    assert len({*taken, *gone}) == len(taken) + len(gone)
    counts = tally.counts()
    assert counts.received == counts.answered + sum(counts.dropped.values()) + len(mailbox.waiting)


@given(st.integers(1, 5), st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_the_newest_frames_are_kept(depth, gaps):
    mailbox: Mailbox[int] = Mailbox(FrameLimits(depth=depth))
    for item in range(len(gaps)):
        mailbox.offer(item, sum(gaps[: item + 1]))
    assert mailbox.clear() == [*range(len(gaps))][-depth:]


def test_a_copy_of_the_counts_does_not_change():
    tally = FrameTally()
    tally.drop(DropReason.NEWER, 2)
    counts = tally.counts()
    tally.drop(DropReason.NEWER)
    assert counts.dropped == {DropReason.NEWER: 2}


def test_the_rate_covers_the_last_seconds():
    rate = Rate(0)
    assert rate.per_s(0) == 0.0
    for index in range(300):
        rate.add(index * 33 * MS)
    assert rate.per_s(300 * 33 * MS) == pytest.approx(30.3, rel=0.02)
    assert rate.per_s(60_000 * MS) == 0.0
    fast = Rate(0)
    for index in range(5000):
        fast.add(index * MS)
    assert fast.per_s(5000 * MS) == pytest.approx(1000, rel=0.01)


def test_quantiles_are_observed_values():
    recent = RecentQuantiles()
    assert recent.quantile(0.5) == 0
    for value in range(1, 101):
        recent.add(value)
    assert [recent.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
