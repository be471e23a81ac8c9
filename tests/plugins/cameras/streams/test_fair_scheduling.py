"""Fair choice: priority first, shares by weight, and no credit for idle time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.cameras.streams.fair_scheduling import FairChoice


def serve(choice: FairChoice[str], eligible: list[str], turns: int) -> Counter[str]:
    got: Counter[str] = Counter()
    for _ in range(turns):
        member = choice.choose(eligible)
        assert member is not None
        choice.charge(member)
        got[member] += 1
    return got


def test_no_member_is_chosen_without_members():
    assert FairChoice[str]().choose([]) is None


def test_equal_streams_take_turns():
    choice: FairChoice[str] = FairChoice()
    for name in "abcd":
        choice.add(name, 2, 1.0)
    order = []
    for _ in range(12):
        member = choice.choose("abcd")
        choice.charge(member)
        order.append(member)
    assert order == [*"abcd"] * 3


def test_the_lower_number_goes_first_as_long_as_it_can():
    choice: FairChoice[str] = FairChoice()
    choice.add("normal", 2, 100.0)
    choice.add("urgent", 1, 0.01)
    assert serve(choice, ["normal", "urgent"], 50) == {"urgent": 50}
    assert serve(choice, ["normal"], 5) == {"normal": 5}


def test_a_stream_that_was_away_is_not_paid_back():
    choice: FairChoice[str] = FairChoice()
    choice.add("away", 2, 1.0)
    choice.add("busy", 2, 1.0)
    serve(choice, ["busy"], 1000)
    assert serve(choice, ["away", "busy"], 10) == {"away": 5, "busy": 5}


def test_a_stream_that_was_not_charged_keeps_its_turn():
    choice: FairChoice[str] = FairChoice()
    for name in "ab":
        choice.add(name, 2, 1.0)
    first = choice.choose("ab")
    assert choice.choose("ab") == first


def test_one_that_comes_late_starts_where_the_others_are():
    choice: FairChoice[str] = FairChoice()
    choice.add("old", 2, 1.0)
    serve(choice, ["old"], 500)
    choice.add("new", 2, 1.0)
    assert serve(choice, ["old", "new"], 100) == {"old": 50, "new": 50}
    choice.remove("old")
    assert serve(choice, ["new"], 3) == {"new": 3}


def others(bits: int) -> set[int]:
    return {member for member in (1, 2, 3) if bits >> member & 1}


WEIGHTS = st.lists(st.sampled_from([0.01, 0.5, 1.0, 2.0, 3.0, 7.5, 100.0]), min_size=2, max_size=6)


@given(WEIGHTS)
def test_turns_follow_the_weights_within_one_turn(weights):
    choice: FairChoice[int] = FairChoice()
    for member, weight in enumerate(weights):
        choice.add(member, 2, weight)
    members = range(len(weights))
    got: Counter[int] = Counter()
    for turn in range(1, 400):
        member = choice.choose(members)
        choice.charge(member)
        got[member] += 1
        # Whoever is behind its share by more than a turn of everybody would have been chosen before.
        for each in members:
            ideal = turn * weights[each] / sum(weights)
            assert got[each] >= ideal - len(weights)


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(0, 3)), max_size=200))
def test_the_choice_is_always_an_eligible_one_of_the_first_priority(rounds):
    choice: FairChoice[int] = FairChoice()
    priorities = [1, 2, 2, 3]
    for member, priority in enumerate(priorities):
        choice.add(member, priority, 1.0 + member)
    for eligible, _ in rounds:
        member = choice.choose(eligible)
        if not eligible:
            assert member is None
            continue
        assert member in eligible
        assert priorities[member] == min(priorities[each] for each in eligible)
        choice.charge(member)


# Each byte says by its bits which others wait in a turn. To draw a set for each turn takes a second.
@given(st.binary(min_size=100, max_size=100))
def test_no_stream_that_always_waits_starves_within_its_priority(turns):
    choice: FairChoice[int] = FairChoice()
    for member in range(4):
        choice.add(member, 2, 1.0)
    last = 0
    for turn, waiting in enumerate(turns):
        member = choice.choose({0, *others(waiting)})
        choice.charge(member)
        if member == 0:
            last = turn
        assert turn - last <= 3


@given(st.sampled_from([1, 2, 4, 100]), st.lists(st.integers(1, 9), min_size=2, max_size=6), WEIGHTS)
def test_with_a_priority_weight_turns_follow_the_priorities_and_then_the_weights(priority_weight, priorities, weights):
    choice: FairChoice[int] = FairChoice(priority_weight)
    members = range(min(len(priorities), len(weights)))
    for member in members:
        choice.add(member, priorities[member], weights[member])
    levels = {priorities[member]: priority_weight ** -priorities[member] for member in members}
    got: Counter[int] = Counter()
    of_level: Counter[int] = Counter()
    for turn in range(1, 400):
        member = choice.choose(members)
        choice.charge(member)
        got[member] += 1
        of_level[priorities[member]] += 1
        for priority, share in levels.items():
            assert of_level[priority] >= turn * share / sum(levels.values()) - len(levels)
        for each in members:
            mates = [other for other in members if priorities[other] == priorities[each]]
            share = weights[each] / sum(weights[other] for other in mates)
            assert got[each] >= of_level[priorities[each]] * share - len(mates)


@given(st.binary(min_size=100, max_size=150))
def test_with_a_priority_weight_the_lowest_priority_does_not_starve_while_others_come_and_go(turns):
    choice: FairChoice[int] = FairChoice(2)
    for member in range(4):
        choice.add(member, 4 - member, 1.0)
    last = 0
    for turn, waiting in enumerate(turns):
        member = choice.choose({0, *others(waiting)})
        choice.charge(member)
        if member == 0:
            last = turn
        # In one turn of priority 4, priorities 3, 2 and 1 get at most 2, 4 and 8, and each begins with one.
        assert turn - last <= 14 + 3


def test_after_a_long_time_of_the_lowest_priority_the_highest_does_not_take_all_turns():
    choice: FairChoice[str] = FairChoice(100)
    choice.add("low", 9, 1.0)
    choice.add("high", 1, 1.0)
    choice.add("next", 2, 1.0)
    serve(choice, ["low"], 1000)
    assert serve(choice, ["high", "next"], 202) == {"high": 200, "next": 2}


def test_an_idle_priority_is_not_paid_back():
    choice: FairChoice[str] = FairChoice(4)
    choice.add("urgent", 1, 1.0)
    choice.add("normal", 2, 1.0)
    assert serve(choice, ["urgent"], 1000) == {"urgent": 1000}
    assert serve(choice, ["urgent", "normal"], 50) == {"urgent": 40, "normal": 10}


@pytest.mark.parametrize("count", [1, 64])
def test_members_can_come_and_go(count):
    choice: FairChoice[int] = FairChoice()
    for member in range(count):
        choice.add(member, 2, 1.0)
    for member in range(count):
        choice.remove(member)
    assert choice.choose([]) is None
    choice.remove(7)
