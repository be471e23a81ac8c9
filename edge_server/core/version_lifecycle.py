"""States of a model version from load to unload, the allowed transitions, and the rule that decides the next load or
unload of a model."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from edge_server.core.model_spec import ModelFile, ModelSpec, Recognised
from edge_server.core.tensor import Tensor
from edge_server.errors import LoadError
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

SampleRun: TypeAlias = Callable[[Mapping[str, Tensor]], "Mapping[str, npt.NDArray[Any]]"]
"""Runs a model once with inputs of one row, and returns its outputs. Raises EdgeServerError."""

OutputCheck: TypeAlias = Callable[[SampleRun | None], tuple[str, ...]]
"""Checks what a model answers before it serves. Returns warnings; raises LoadError for a model that must not serve.

Gets None for a model that cannot be run for a check."""


FolderReader: TypeAlias = Callable[[ModelSpec, Path], ModelSpec]
"""Given a specification and the model's folder: the specification with what a file of the folder adds."""


Recogniser: TypeAlias = Callable[[ModelSpec, Mapping[str, str]], Recognised | None]
"""Given a specification and the metadata of the model's file: what they say together. None: they do not concern it."""


class VersionState(enum.Enum):
    """State of a version, from NEW to RETIRED or FAILED."""

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
"""All allowed transitions. Every state change goes through `next_state`."""

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
"""Triton's name of each state in the repository index."""


def next_state(now: VersionState, then: VersionState) -> VersionState:
    """Return `then` if the transition is allowed. Raises AssertionError if not: that is an error in this program."""
    if then not in TRANSITIONS[now]:
        raise AssertionError(f"a version cannot go from {now.value} to {then.value}")
    return then


@record(frozen=True, slots=True)
class Resolved:
    """Result of resolving a version: the complete specification and the file to open.

    `has_alternatives`: the backend was chosen from several; others can be tried if it cannot open the file.
    `confirm` is called after the file is open. It raises LoadError if the files have changed since they were resolved.
    `skipped` names the backends that failed before this one, with the reason. `output_checks` are made for a run
    after the warm-up. `explain` returns a plainer error for that of a failed load, None if the files show no cause.
    """

    spec: ModelSpec
    file: ModelFile
    has_alternatives: bool = False
    confirm: Callable[[], None] = field(default=lambda: None, compare=False)
    skipped: tuple[str, ...] = ()
    output_checks: tuple[OutputCheck, ...] = field(default=(), compare=False)
    explain: Callable[[LoadError], LoadError | None] = field(default=lambda error: None, compare=False)


@record(frozen=True, slots=True)
class DesiredVersion:
    """One version of the desired state. `fingerprint` changes when a relevant file on disk changes.

    `resolve` reads the configuration and the head of the model file when the version is loaded. It may raise LoadError.
    Its argument maps the backends that failed to open the version to the reason; at first it is empty.
    """

    fingerprint: str
    resolve: Callable[[Mapping[str, str]], Resolved] = field(compare=False)


Member: TypeAlias = tuple[str, int | None]
"""A model and its version; None: the newest."""


@record(frozen=True, slots=True)
class DesiredModel:
    """Desired state of one model: all versions to serve. A version that is missing is unloaded.

    `reason`, if not empty, says why no version can be served (a duplicate name, an unreadable configuration). It
    appears in the index; versions that already serve stay. `pin` is the version to which an operator pinned the model.
    It overrides the version policy: `versions` then contains no other. `members` are the models of an ensemble.
    `builds_engine`: a load may take minutes, because it compiles the model for the GPU.
    """

    name: str
    versions: Mapping[int, DesiredVersion] = field(default_factory=dict)
    reason: str = ""
    pin: int | None = None
    members: tuple[Member, ...] = ()
    builds_engine: bool = False


class VersionSnapshot(NamedTuple):
    """One generation as input of the rule. Generations of a model count from 1, one per load."""

    version: int
    generation: int
    fingerprint: str
    state: VersionState


@record(frozen=True, slots=True)
class LoadAction:
    """Action: load this version with this fingerprint."""

    version: int
    fingerprint: str


@record(frozen=True, slots=True)
class RetireAction:
    """Action: drain and unload this generation."""

    generation: int


_LOADING_STATES = frozenset({VersionState.NEW, VersionState.LOADING, VersionState.WARMING})
_UNLOADING_STATES = frozenset({VersionState.DRAINING, VersionState.CLOSING})


class ReloadPolicy(enum.Enum):
    """Order of a reload: OVERLAP loads the successor while the old generation serves; REPLACE unloads it first.

    REPLACE is for boards whose memory cannot hold two. Nothing serves in between, or at all if the successor does not
    load.
    """

    OVERLAP = "overlap"
    REPLACE = "replace"


def next_action(
    desired: Mapping[int, str],
    actual: Sequence[VersionSnapshot],
    failed: Collection[int] = (),
    policy: ReloadPolicy = ReloadPolicy.OVERLAP,
) -> LoadAction | RetireAction | None:
    """Return the next action for a model, or None if the actual state is the desired one or an action still runs.

    `desired` maps version numbers to fingerprints. It excludes the versions in `failed`: these are desired, but their
    current files did not load. The rule preserves availability: a generation is retired only if a successor is READY,
    or if no version of the model is desired any more. If a successor fails, the old generation, and the old version,
    stay. With REPLACE, a version is loaded after all generations that it replaces are unloaded.
    """
    if any(item.state in _LOADING_STATES for item in actual):
        return None
    ready = [item for item in actual if item.state is VersionState.READY]
    up_to_date = {item.version for item in ready if desired.get(item.version) == item.fingerprint}
    for version in sorted(desired, reverse=True):
        if version in up_to_date:
            continue
        if policy is ReloadPolicy.REPLACE:
            for item in ready:
                if desired.get(item.version) != item.fingerprint and item.version not in failed:
                    return RetireAction(item.generation)
            if any(item.state in _UNLOADING_STATES for item in actual):
                return None
        return LoadAction(version, desired[version])
    for item in ready:
        if desired.get(item.version) == item.fingerprint:
            continue
        has_successor = item.version in up_to_date if item.version in desired else bool(up_to_date)
        is_undesired = not desired and not failed
        if (has_successor and item.version not in failed) or is_undesired:
            return RetireAction(item.generation)
    return None


_FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 300.0


def retry_delay_s(failed_count: int) -> float:
    """Return the delay before the next attempt after `failed_count` failed loads in a row: 1 s, 2 s, ... 5 minutes."""
    return min(_FIRST_RETRY_S * 2.0 ** min(failed_count - 1, 16), _MAX_RETRY_S)
