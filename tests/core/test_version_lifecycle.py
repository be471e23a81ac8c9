"""The table of transitions and the next-action rule, as literal tables."""

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

TRANSITION_PAIRS = {
    (NEW, LOADING), (LOADING, WARMING), (LOADING, FAILED), (WARMING, READY), (WARMING, FAILED), (READY, DRAINING),
    (READY, FAILED), (DRAINING, CLOSING), (CLOSING, RETIRED), (FAILED, RETIRED),
}  # fmt: skip


def test_only_the_transitions_of_the_table_are_allowed() -> None:
    for now, then in itertools.product(VersionState, repeat=2):
        if (now, then) in TRANSITION_PAIRS:
            assert next_state(now, then) is then
        else:
            with pytest.raises(AssertionError, match=f"from {now.value} to {then.value}"):
                next_state(now, then)


def test_every_state_has_transitions_and_a_name_in_the_index() -> None:
    assert set(TRANSITIONS) == set(INDEX_STATES) == set(VersionState)
    assert set(INDEX_STATES.values()) == {"LOADING", "READY", "UNLOADING", "UNAVAILABLE"}


def snapshots(*versions: tuple[int, int, str, VersionState]) -> list[VersionSnapshot]:
    return [VersionSnapshot(*item) for item in versions]


# desired, actual as (version, generation, fingerprint, state), failed -> next action
ACTIONS = [
    ("nothing desired, nothing loaded", {}, [], set(), None),
    ("a first version is loaded", {1: "a"}, [], set(), LoadAction(1, "a")),
    ("the desired state needs no action", {1: "a"}, [(1, 1, "a", READY)], set(), None),
    ("the highest version comes first", {1: "a", 3: "c", 2: "b"}, [], set(), LoadAction(3, "c")),
    ("the others follow", {1: "a", 3: "c"}, [(3, 1, "c", READY)], set(), LoadAction(1, "a")),
    ("no action while a version loads", {1: "a", 2: "b"}, [(1, 1, "a", LOADING)], set(), None),
    ("no action while a version warms up", {}, [(1, 1, "a", READY), (2, 2, "b", WARMING)], set(), None),
    ("an undesired version is retired", {}, [(1, 4, "a", READY)], set(), RetireAction(4)),
    ("a draining version needs no action", {}, [(1, 1, "a", DRAINING)], set(), None),
    ("a version desired again while it drains is loaded", {1: "a"}, [(1, 1, "a", DRAINING)], set(), LoadAction(1, "a")),
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
        "one of two desired versions failed to change: its old generation stays",
        {1: "a"}, [(1, 1, "a", READY), (2, 2, "b", READY)], {2}, None,
    ),
    (
        "an undesired version is retired although another failed, because a desired one serves",
        {1: "a"}, [(1, 1, "a", READY), (3, 3, "c", READY)], {2}, RetireAction(3),
    ),
    (
        "only the desired one of several generations stays",
        {1: "c"}, [(1, 1, "a", READY), (1, 2, "b", READY), (1, 3, "c", READY)], set(), RetireAction(1),
    ),
    (
        "retired and failed do not serve",
        {1: "a"}, [(1, 1, "a", FAILED), (1, 2, "a", RETIRED)], set(), LoadAction(1, "a"),
    ),
    ("an empty desired state retires all", {}, [(1, 1, "a", READY), (2, 2, "b", READY)], set(), RetireAction(1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "desired", "actual", "failed", "action"), ACTIONS, ids=[row[0] for row in ACTIONS]
)
def test_next_action(
    sentence: str,
    desired: dict[int, str],
    actual: list[tuple[int, int, str, VersionState]],
    failed: set[int],
    action: LoadAction | RetireAction | None,
) -> None:
    assert next_action(desired, snapshots(*actual), failed) == action


# the same with ReloadPolicy.REPLACE
REPLACEMENTS = [
    ("a first version is loaded", {1: "a"}, [], set(), LoadAction(1, "a")),
    ("the desired state needs no action", {1: "a"}, [(1, 1, "a", READY)], set(), None),
    ("the replaced generation is retired first", {1: "b"}, [(1, 1, "a", READY)], set(), RetireAction(1)),
    ("an older version is retired first", {2: "b"}, [(1, 1, "a", READY)], set(), RetireAction(1)),
    ("the load waits for the drain", {1: "b"}, [(1, 1, "a", DRAINING)], set(), None),
    ("and for the close", {1: "b"}, [(1, 1, "a", CLOSING)], set(), None),
    ("then the version is loaded", {1: "b"}, [(1, 1, "a", RETIRED)], set(), LoadAction(1, "b")),
    (
        "an up-to-date version stays",
        {1: "a", 2: "c"}, [(2, 2, "b", READY), (1, 1, "a", READY)], set(), RetireAction(2),
    ),
    ("and does not delay the load", {1: "a", 2: "c"}, [(1, 1, "a", READY)], set(), LoadAction(2, "c")),
    ("the old generation of a failed version stays", {2: "b"}, [(1, 1, "a", READY)], {1}, LoadAction(2, "b")),
    ("no action while a version loads", {1: "b"}, [(1, 1, "a", READY), (1, 2, "b", WARMING)], set(), None),
    ("an undesired version is retired", {}, [(1, 4, "a", READY)], set(), RetireAction(4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sentence", "desired", "actual", "failed", "action"), REPLACEMENTS, ids=[row[0] for row in REPLACEMENTS]
)
def test_next_action_with_replace(
    sentence: str,
    desired: dict[int, str],
    actual: list[tuple[int, int, str, VersionState]],
    failed: set[int],
    action: LoadAction | RetireAction | None,
) -> None:
    assert next_action(desired, snapshots(*actual), failed, ReloadPolicy.REPLACE) == action


def test_retry_delays_grow_to_five_minutes() -> None:
    assert [retry_delay_s(count) for count in (1, 2, 3, 4, 9, 10, 10_000)] == [1, 2, 4, 8, 256, 300, 300]
