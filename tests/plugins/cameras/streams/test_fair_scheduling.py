"""Fair choice: priority first, shares by weight, and no credit for idle time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.plugins.cameras.streams.fair_scheduling import FairChoice


def choice_of(*priorities_and_weights: tuple[int, float], priority_weight: int = 0) -> FairChoice[int]:
    """Return the choice of the members 0, 1, ... with these priorities and weights."""
    choice: FairChoice[int] = FairChoice(priority_weight)
    for member, (priority, weight) in enumerate(priorities_and_weights):
        choice.add(member, priority, weight)
    return choice


def serve(choice: FairChoice[int], eligible: list[int], turns: int) -> Counter[int]:
    got: Counter[int] = Counter()
    for _ in range(turns):
        member = choice.choose(eligible)
        assert member is not None
        choice.charge(member)
        got[member] += 1
    return got


def test_no_member_is_chosen_without_members():
    assert FairChoice[str]().choose([]) is None


def test_equal_streams_take_turns():
    choice, order = choice_of(*[(2, 1.0)] * 4), []
    for _ in range(12):
        order.append(choice.choose(range(4)))
        choice.charge(order[-1])
    assert order == [0, 1, 2, 3] * 3


def test_the_lower_number_goes_first_as_long_as_it_can():
    choice = choice_of((2, 100.0), (1, 0.01))
    assert serve(choice, [0, 1], 50) == {1: 50}
    assert serve(choice, [0], 5) == {0: 5}


def test_a_stream_that_was_away_is_not_paid_back():
    choice = choice_of((2, 1.0), (2, 1.0))
    serve(choice, [1], 1000)
    assert serve(choice, [0, 1], 10) == {0: 5, 1: 5}


def test_a_stream_that_was_not_charged_keeps_its_turn():
    choice = choice_of((2, 1.0), (2, 1.0))
    assert choice.choose([0, 1]) == choice.choose([0, 1])


def test_one_that_comes_late_starts_where_the_others_are():
    choice = choice_of((2, 1.0))
    serve(choice, [0], 500)
    choice.add(1, 2, 1.0)
    assert serve(choice, [0, 1], 100) == {0: 50, 1: 50}
    choice.remove(0)
    assert serve(choice, [1], 3) == {1: 3}


def others(bits: int) -> set[int]:
    return {member for member in (1, 2, 3) if bits >> member & 1}


WEIGHTS = st.lists(st.sampled_from([0.01, 0.5, 1.0, 2.0, 3.0, 7.5, 100.0]), min_size=2, max_size=6)


@given(WEIGHTS)
def test_turns_follow_the_weights_within_one_turn(weights):
    choice = choice_of(*((2, weight) for weight in weights))
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
    priorities = [1, 2, 2, 3]
    choice = choice_of(*((priority, 1.0 + member) for member, priority in enumerate(priorities)))
    for eligible, _ in rounds:
        member = choice.choose(eligible)
        if not eligible:
            assert member is None
            continue
        assert member in eligible
        assert priorities[member] == min(priorities[each] for each in eligible)
        choice.charge(member)


# Each byte says by its bits which others wait in a turn. To draw a set for each turn takes a second.
@given(st.binary(min_size=100, max_size=150))
@pytest.mark.parametrize(
    ("priorities", "priority_weight", "most"),
    [
        ([2] * 4, 0, 3),
        # In one turn of priority 4, priorities 3, 2 and 1 get at most 2, 4 and 8, and each begins with one.
        ([4, 3, 2, 1], 2, 14 + 3),
    ],
)
def test_no_stream_that_always_waits_starves_while_others_come_and_go(priorities, priority_weight, most, turns):
    choice = choice_of(*((priority, 1.0) for priority in priorities), priority_weight=priority_weight)
    last = 0
    for turn, waiting in enumerate(turns):
        member = choice.choose({0, *others(waiting)})
        choice.charge(member)
        if member == 0:
            last = turn
        assert turn - last <= most


@given(st.sampled_from([1, 2, 4, 100]), st.lists(st.integers(1, 9), min_size=2, max_size=6), WEIGHTS)
def test_with_a_priority_weight_turns_follow_the_priorities_and_then_the_weights(priority_weight, priorities, weights):
    choice = choice_of(*zip(priorities, weights), priority_weight=priority_weight)  # noqa: B905
    members = range(min(len(priorities), len(weights)))
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


def test_after_a_long_time_of_the_lowest_priority_the_highest_does_not_take_all_turns():
    choice = choice_of((9, 1.0), (1, 1.0), (2, 1.0), priority_weight=100)
    serve(choice, [0], 1000)
    assert serve(choice, [1, 2], 202) == {1: 200, 2: 2}


def test_an_idle_priority_is_not_paid_back():
    choice = choice_of((1, 1.0), (2, 1.0), priority_weight=4)
    assert serve(choice, [0], 1000) == {0: 1000}
    assert serve(choice, [0, 1], 50) == {0: 40, 1: 10}


@pytest.mark.parametrize("count", [1, 64])
def test_members_can_come_and_go(count):
    choice = choice_of(*[(2, 1.0)] * count)
    for member in range(count):
        choice.remove(member)
    assert choice.choose([]) is None
    choice.remove(7)
