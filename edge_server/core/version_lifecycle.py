"""The life of a model version: its states, the table of moves between them, and the rule that says what is next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_server.core.model_spec import ModelFile, ModelSpec


class VersionState(enum.Enum):
    NEW = "NEW"
    LOADING = "LOADING"
    WARMING = "WARMING"
    READY = "READY"
    DRAINING = "DRAINING"
    CLOSING = "CLOSING"
    RETIRED = "RETIRED"
    FAILED = "FAILED"


TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = {
    VersionState.NEW: frozenset({VersionState.LOADING}),
    VersionState.LOADING: frozenset({VersionState.WARMING, VersionState.FAILED}),
    VersionState.WARMING: frozenset({VersionState.READY, VersionState.FAILED}),
    VersionState.READY: frozenset({VersionState.DRAINING, VersionState.FAILED}),
    VersionState.DRAINING: frozenset({VersionState.CLOSING}),
    VersionState.CLOSING: frozenset({VersionState.RETIRED}),
    VersionState.RETIRED: frozenset(),
    VersionState.FAILED: frozenset({VersionState.RETIRED}),
}
"""Every move that a version may make. Whatever moves a state goes through `next_state`."""

INDEX_STATES: Mapping[VersionState, str] = {
    VersionState.NEW: "LOADING",
    VersionState.LOADING: "LOADING",
    VersionState.WARMING: "LOADING",
    VersionState.READY: "READY",
    VersionState.DRAINING: "UNLOADING",
    VersionState.CLOSING: "UNLOADING",
    VersionState.RETIRED: "UNAVAILABLE",
    VersionState.FAILED: "UNAVAILABLE",
}
"""Triton's word for each state, as the repository index tells it."""


def next_state(now: VersionState, then: VersionState) -> VersionState:
    """Return `then`, if the table allows the move. A move that it does not allow is a fault of ours: AssertionError."""
    if then not in TRANSITIONS[now]:
        raise AssertionError(f"a version cannot go from {now.value} to {then.value}")
    return then


@dataclass(frozen=True, slots=True)
class Resolved:
    """What there is to open: the complete specification and the file.

    `has_alternatives`: the backend was chosen from several, and others may be tried should it fail to open the file.
    `confirm` is called once it is open: it raises LoadError when the files are not those any more that were resolved.
    """

    spec: ModelSpec
    file: ModelFile
    has_alternatives: bool = False
    confirm: Callable[[], None] = field(default=lambda: None, compare=False)


@dataclass(frozen=True, slots=True)
class DesiredVersion:
    """One version that should be served. `fingerprint` changes whenever anything on disk that matters does.

    `resolve` reads the configuration and the file's head when the version is loaded; it may raise LoadError. It is
    given the backends that failed to open the version, and why: none at first.
    """

    fingerprint: str
    resolve: Callable[[Mapping[str, str]], Resolved] = field(compare=False)


Member: TypeAlias = tuple[str, int | None]
"""A model, and the version of it, None being the newest."""


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """Every version of one model that should be served; leaving a version out is the order to unload it.

    `reason`, when not empty, says why nothing of the model can be served (a duplicate name, an unreadable
    configuration) and appears in the index; what serves already stays. `pin` is the version that an operator pinned
    the model to, whatever its version policy says; no other is among `versions` then. `members` are the models that an
    ensemble is made of.
    """

    name: str
    versions: Mapping[int, DesiredVersion] = field(default_factory=dict)
    reason: str = ""
    pin: int | None = None
    members: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """One living version, as the rule sees it. Generations of a model count up from 1 with every load."""

    version: int
    generation: int
    fingerprint: str
    state: VersionState


@dataclass(frozen=True, slots=True)
class LoadAction:
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RetireAction:
    generation: int


_ON_THE_WAY = frozenset({VersionState.NEW, VersionState.LOADING, VersionState.WARMING})
_ON_THE_WAY_OUT = frozenset({VersionState.DRAINING, VersionState.CLOSING})


class ReloadPolicy(enum.Enum):
    """How a successor takes over: loaded beside what it replaces, or after that was unloaded.

    REPLACE is for boards whose memory cannot hold two. It serves nothing in between, and nothing at all when the
    successor does not load.
    """

    OVERLAP = "overlap"
    REPLACE = "replace"


def next_action(
    wished: Mapping[int, str],
    living: Sequence[VersionSnapshot],
    failed: Collection[int] = (),
    policy: ReloadPolicy = ReloadPolicy.OVERLAP,
) -> LoadAction | RetireAction | None:
    """Return the one thing to do next for a model, or None when reality is as wished or work is under way.

    `wished` maps version numbers to fingerprints, without those of `failed`: versions that are wished for but whose
    files, as they are now, did not load. The rule preserves availability: what serves is retired only when a
    successor is READY, or when nothing of the model is wished for any more. A failed successor leaves the old
    generation, and the old version, serving. With REPLACE a load comes after everything that it replaces is gone.
    """
    if any(item.state in _ON_THE_WAY for item in living):
        return None
    ready = [item for item in living if item.state is VersionState.READY]
    as_wished = {item.version for item in ready if wished.get(item.version) == item.fingerprint}
    for version in sorted(wished, reverse=True):
        if version not in as_wished:
            load = LoadAction(version, wished[version])
            return load if policy is ReloadPolicy.OVERLAP else _after_the_old(load, wished, living, failed)
    for item in ready:
        if wished.get(item.version) == item.fingerprint:
            continue
        has_successor = item.version in as_wished if item.version in wished else bool(as_wished)
        is_unwished = not wished and not failed
        if (has_successor and item.version not in failed) or is_unwished:
            return RetireAction(item.generation)
    return None


def _after_the_old(
    load: LoadAction, wished: Mapping[int, str], living: Sequence[VersionSnapshot], failed: Collection[int]
) -> LoadAction | RetireAction | None:
    """Return what comes before the load, if anything does: retire what it replaces, wait for what is going."""
    for item in living:
        is_replaced = wished.get(item.version) != item.fingerprint and item.version not in failed
        if item.state is VersionState.READY and is_replaced:
            return RetireAction(item.generation)
    return None if any(item.state in _ON_THE_WAY_OUT for item in living) else load


_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 300.0


def retry_delay_s(failed_count: int) -> float:
    """Return how long to wait after the load failed `failed_count` times in a row: 1 s, 2 s, 4 s ... 5 minutes."""
    return min(_FIRST_RETRY_S * 2.0 ** min(failed_count - 1, 16), _LONGEST_RETRY_S)
