"""The table of states and the rule that says what comes next, as literal tables."""

from __future__ import annotations

import itertools

import pytest

from edge_server.core.version_lifecycle import (
    INDEX_STATES,
    TRANSITIONS,
    LoadAction,
    ReloadPolicy,
    RetireAction,
    VersionSnapshot,
    VersionState,
    next_action,
    next_state,
    retry_delay_s,
)

NEW, LOADING, WARMING, READY, DRAINING, CLOSING, RETIRED, FAILED = VersionState

MOVES = {
    (NEW, LOADING), (LOADING, WARMING), (LOADING, FAILED), (WARMING, READY), (WARMING, FAILED), (READY, DRAINING),
    (READY, FAILED), (DRAINING, CLOSING), (CLOSING, RETIRED), (FAILED, RETIRED),
}  # fmt: skip


def test_a_version_makes_only_the_moves_of_the_table() -> None:
    for now, then in itertools.product(VersionState, repeat=2):
        if (now, then) in MOVES:
            assert next_state(now, then) is then
        else:
            with pytest.raises(AssertionError, match=f"from {now.value} to {then.value}"):
                next_state(now, then)


def test_every_state_has_its_moves_and_tritons_word() -> None:
    assert set(TRANSITIONS) == set(INDEX_STATES) == set(VersionState)
    assert set(INDEX_STATES.values()) == {"LOADING", "READY", "UNLOADING", "UNAVAILABLE"}


def living(*versions: tuple[int, int, str, VersionState]) -> list[VersionSnapshot]:
    return [VersionSnapshot(*item) for item in versions]


# wished, living as (version, generation, fingerprint, state), failed -> what to do
ACTIONS = [
    ("nothing wished, nothing there", {}, [], set(), None),
    ("a first version is loaded", {1: "a"}, [], set(), LoadAction(1, "a")),
    ("all as wished is left alone", {1: "a"}, [(1, 1, "a", READY)], set(), None),
    ("the highest version comes first", {1: "a", 3: "c", 2: "b"}, [], set(), LoadAction(3, "c")),
    ("the others follow", {1: "a", 3: "c"}, [(3, 1, "c", READY)], set(), LoadAction(1, "a")),
    ("while one loads nothing else is begun", {1: "a", 2: "b"}, [(1, 1, "a", LOADING)], set(), None),
    ("nor while one warms", {}, [(1, 1, "a", READY), (2, 2, "b", WARMING)], set(), None),
    ("unwished is retired", {}, [(1, 4, "a", READY)], set(), RetireAction(4)),
    ("a drain under way needs nothing", {}, [(1, 1, "a", DRAINING)], set(), None),
    ("wished again while it drains is loaded anew", {1: "a"}, [(1, 1, "a", DRAINING)], set(), LoadAction(1, "a")),
    ("a changed version is loaded beside the old", {1: "b"}, [(1, 1, "a", READY)], set(), LoadAction(1, "b")),
    (
        "and the old is retired once the new is ready",
        {1: "b"}, [(1, 1, "a", READY), (1, 2, "b", READY)], set(), RetireAction(1),
    ),
    ("a new version is loaded before the old goes", {2: "b"}, [(1, 1, "a", READY)], set(), LoadAction(2, "b")),
    ("then the old goes", {2: "b"}, [(1, 1, "a", READY), (2, 2, "b", READY)], set(), RetireAction(1)),
    ("a failed change keeps the old generation", {}, [(1, 1, "a", READY)], {1}, None),
    ("a failed new version keeps the old version", {}, [(1, 1, "a", READY)], {2}, None),
    (
        "a failed version does not keep others from being tried",
        {1: "x"}, [(1, 1, "a", READY)], {2}, LoadAction(1, "x"),
    ),
    (
        "one of two wished versions failed to change: its old generation stays",
        {1: "a"}, [(1, 1, "a", READY), (2, 2, "b", READY)], {2}, None,
    ),
    (
        "a version that nobody wishes goes though another failed, since one serves as wished",
        {1: "a"}, [(1, 1, "a", READY), (3, 3, "c", READY)], {2}, RetireAction(3),
    ),
    (
        "of several generations only the wished one stays",
        {1: "c"}, [(1, 1, "a", READY), (1, 2, "b", READY), (1, 3, "c", READY)], set(), RetireAction(1),
    ),
    (
        "retired and failed do not serve",
        {1: "a"}, [(1, 1, "a", FAILED), (1, 2, "a", RETIRED)], set(), LoadAction(1, "a"),
    ),
    ("a withdrawn wish retires all, one at a time", {}, [(1, 1, "a", READY), (2, 2, "b", READY)], set(), RetireAction(1)),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "wished", "there", "failed", "action"), ACTIONS, ids=[row[0] for row in ACTIONS])
def test_what_comes_next(
    sentence: str,
    wished: dict[int, str],
    there: list[tuple[int, int, str, VersionState]],
    failed: set[int],
    action: LoadAction | RetireAction | None,
) -> None:
    assert next_action(wished, living(*there), failed) == action


# the same, where the old must be gone before the new is loaded
REPLACEMENTS = [
    ("a first version is loaded", {1: "a"}, [], set(), LoadAction(1, "a")),
    ("all as wished is left alone", {1: "a"}, [(1, 1, "a", READY)], set(), None),
    ("what is replaced goes first", {1: "b"}, [(1, 1, "a", READY)], set(), RetireAction(1)),
    ("an older version goes first", {2: "b"}, [(1, 1, "a", READY)], set(), RetireAction(1)),
    ("the load waits for the drain", {1: "b"}, [(1, 1, "a", DRAINING)], set(), None),
    ("and for the close", {1: "b"}, [(1, 1, "a", CLOSING)], set(), None),
    ("then it comes", {1: "b"}, [(1, 1, "a", RETIRED)], set(), LoadAction(1, "b")),
    (
        "a version that stays as wished stays",
        {1: "a", 2: "c"}, [(2, 2, "b", READY), (1, 1, "a", READY)], set(), RetireAction(2),
    ),
    ("and does not hold the load up", {1: "a", 2: "c"}, [(1, 1, "a", READY)], set(), LoadAction(2, "c")),
    ("what stands in for failed files stays", {2: "b"}, [(1, 1, "a", READY)], {1}, LoadAction(2, "b")),
    ("while one loads nothing else is begun", {1: "b"}, [(1, 1, "a", READY), (1, 2, "b", WARMING)], set(), None),
    ("unwished is retired", {}, [(1, 4, "a", READY)], set(), RetireAction(4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "wished", "there", "failed", "action"), REPLACEMENTS, ids=[row[0] for row in REPLACEMENTS]
)
def test_what_comes_next_where_the_old_is_unloaded_first(
    sentence: str,
    wished: dict[int, str],
    there: list[tuple[int, int, str, VersionState]],
    failed: set[int],
    action: LoadAction | RetireAction | None,
) -> None:
    assert next_action(wished, living(*there), failed, ReloadPolicy.REPLACE) == action


def test_the_waits_between_tries_grow_to_five_minutes() -> None:
    assert [retry_delay_s(count) for count in (1, 2, 3, 4, 9, 10, 10_000)] == [1, 2, 4, 8, 256, 300, 300]
