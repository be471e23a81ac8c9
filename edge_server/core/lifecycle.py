"""The life of a model version: its states, the table of moves between them, and the rule that says what is next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.core.model import ModelFile, ModelSpec


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
    """

    spec: ModelSpec
    file: ModelFile
    has_alternatives: bool = False


@dataclass(frozen=True, slots=True)
class VersionWish:
    """One version that should be served. `fingerprint` changes whenever anything on disk that matters does.

    `resolve` reads the configuration and the file's head when the version is loaded; it may raise LoadError. It is
    given the backends that failed to open the version, and why: none at first.
    """

    fingerprint: str
    resolve: Callable[[Mapping[str, str]], Resolved] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ModelWish:
    """Every version of one model that should be served; leaving a version out is the order to unload it.

    `reason`, when not empty, says why nothing of the model can be served (a duplicate name, an unreadable
    configuration) and appears in the index; what serves already stays.
    """

    name: str
    versions: Mapping[int, VersionWish] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """One living version, as the rule sees it. Generations of a model count up from 1 with every load."""

    version: int
    generation: int
    fingerprint: str
    state: VersionState


@dataclass(frozen=True, slots=True)
class Load:
    version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Retire:
    generation: int


_ON_THE_WAY = frozenset({VersionState.NEW, VersionState.LOADING, VersionState.WARMING})


def next_action(
    wished: Mapping[int, str], living: Sequence[VersionSnapshot], failed: Collection[int] = ()
) -> Load | Retire | None:
    """Return the one thing to do next for a model, or None when reality is as wished or work is under way.

    `wished` maps version numbers to fingerprints, without those of `failed`: versions that are wished for but whose
    files, as they are now, did not load. The rule preserves availability: what serves is retired only when a
    successor is READY, or when nothing of the model is wished for any more. A failed successor leaves the old
    generation, and the old version, serving.
    """
    if any(item.state in _ON_THE_WAY for item in living):
        return None
    ready = [item for item in living if item.state is VersionState.READY]
    as_wished = {item.version for item in ready if wished.get(item.version) == item.fingerprint}
    for version in sorted(wished, reverse=True):
        if version not in as_wished:
            return Load(version, wished[version])
    for item in ready:
        if wished.get(item.version) == item.fingerprint:
            continue
        has_successor = item.version in as_wished if item.version in wished else bool(as_wished)
        is_unwished = not wished and not failed
        if (has_successor and item.version not in failed) or is_unwished:
            return Retire(item.generation)
    return None
