"""Detection of incomplete copies: decides, scan by scan, which files of a model are completely written.

A model has parts: each version directory, and all files outside them (configuration, labels). A part has **settled**
when no process writes it any more:

- Its names, sizes, times and inodes stayed the same for `RepositoryRoot.settle_s`, in two scans that are so far apart.
  On a local disk one scan can be enough, because no tool can set the change times (ctime) of files and folders. If the
  clock was set, the change times are not used.
- No file of it is open for writing, according to inotify (`FolderState.written`) and to the kernel
  (`FolderState.busy`).
- No unfinished file of an upload tool (`.part`, hidden files of rsync ...) beside it changed in the last
  UPLOAD_PATIENCE_S.

A directory that was renamed into its place (`FolderState.renamed_folders`) needs no second scan: its upload is
finished. A renamed file needs one, because more files of the version may follow.

A settled version is used independently of other versions; the removal of a version is settled by the same rule. A
change outside the version directories waits until all parts have settled, because it often belongs to a version that is
still being uploaded. Versions that settle in the meantime wait with it. A part that has not settled keeps its earlier
state, so a slow upload removes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edge_server.record import record
from edge_server.repository.disk.file_fingerprint import FolderScan
from edge_server.repository.disk.scan import ModelDirectory, with_versions

UPLOAD_PATIENCE_S = 30.0
"""How long an unfinished upload without changes delays its part. After that it counts as abandoned."""

_BUSY_SCAN_S = 1.0
"""Time until the next scan of a part that is being written."""

PartKey: TypeAlias = int | None
"""A version's number; None: everything outside the version directories."""


class RepositoryRoot(NamedTuple):
    """Rules for one repository root.

    `has_local_times`: change times come from this machine's clock. `is_unreadable`: the root cannot be read, so its
    models are unknown. `is_being_written`: all of it is being written (git checkout holds its index.lock).
    """

    settle_s: float
    has_local_times: bool = True
    is_unreadable: bool = False
    is_being_written: bool = False


@record(frozen=True, slots=True)
class FolderState:
    """Observed state of the repositories at one moment.

    `at_s` is monotonic; `wall_ns` is the clock of change times, which ran without a jump for `steady_s`. `written` are
    the real paths of files that are open for writing; `renamed_folders` those of directories that were renamed into
    place. `busy` are the parts, each with its model, that are being written. `real_paths` maps models and versions that
    are links to their targets. `unchanged` are settled models without a change.
    """

    at_s: float
    wall_ns: int
    models: Mapping[str, ModelDirectory]
    roots: Mapping[Path, RepositoryRoot]
    steady_s: float = math.inf
    written: Collection[str] = ()
    renamed_folders: Collection[str] = ()
    busy: Collection[tuple[str, PartKey]] = ()
    real_paths: Mapping[str, str] = field(default_factory=dict)
    unchanged: Container[str] = ()


class FolderPart(NamedTuple):
    """State of one part: `activity` (None: absent), unchanged since `since_s`."""

    activity: str | None
    since_s: float


@record(frozen=True, slots=True)
class KnownModel:
    """State of one model. `complete_model` is the last complete state or None, `parts` the last scan of each part."""

    root: Path
    complete_model: ModelDirectory | None = None
    parts: Mapping[PartKey, FolderPart] = field(default_factory=dict)


class UploadState(NamedTuple):
    """Result of `update_uploads`. `next_scan_s` is the monotonic time of the next scan, None if all has settled.

    `unsettled` are the models that need the next scan.
    """

    known: Mapping[str, KnownModel]
    next_scan_s: float | None
    unsettled: frozenset[str] = frozenset()

    def models(self) -> dict[str, ModelDirectory]:
        """Return the complete state of each model, by name."""
        return {
            name: known.complete_model for name, known in sorted(self.known.items()) if known.complete_model is not None
        }


NOTHING = UploadState({}, None)


def changes(before: UploadState, after: UploadState) -> Iterator[tuple[str, PartKey, FolderScan]]:
    """Return the parts, each with its model, that are new or different in `after`. Removed parts are left out."""
    for name, known in sorted(after.known.items()):
        model, earlier_known = known.complete_model, before.known.get(name)
        last = None if earlier_known is None else earlier_known.complete_model
        if model is None or model is last:
            continue
        earlier = _part_scans(last)
        for key, scan in _part_scans(model).items():
            if last is None or key not in earlier or earlier[key].fingerprint != scan.fingerprint:
                yield name, key, scan


def update_uploads(before: Mapping[str, KnownModel], state: FolderState) -> UploadState:
    """Return the new upload state, from the state before and a new scan."""
    after: dict[str, KnownModel] = {}
    due: list[float] = []
    unsettled: set[str] = set()
    for name in sorted({*before, *state.models}):
        model = state.models.get(name)
        known = before.get(name)
        if known is not None and model is not None and name in state.unchanged:
            after[name] = known
            continue
        root_path = model.path.parent if model is not None else before[name].root
        root = state.roots[root_path]
        if root.is_unreadable:
            if known is not None:
                after[name] = known
            continue
        parts = _parts(known, model, state, root)
        waits = {key: wait for key, part in parts.items() if (wait := _wait_s(key, part, model, state, root)) > 0}
        due += [state.at_s + wait for wait in waits.values()]
        if waits:
            unsettled.add(name)
        complete_model = _next_complete_model(known.complete_model if known is not None else None, model, parts, waits)
        present = {key: part for key, part in parts.items() if part.activity is not None or key in waits}
        if present or complete_model is not None:
            after[name] = KnownModel(root_path, complete_model, present)
    return UploadState(after, min(due, default=None), frozenset(unsettled))


def _parts(
    known: KnownModel | None, model: ModelDirectory | None, state: FolderState, root: RepositoryRoot
) -> dict[PartKey, FolderPart]:
    earlier = known.parts if known is not None else {}
    scans = _part_scans(model)
    parts: dict[PartKey, FolderPart] = {}
    for key in sorted({*earlier, *scans}, key=lambda item: -1 if item is None else item):
        activity = _activity(key, model, scans)
        last = earlier.get(key)
        since_s = last.since_s if last is not None and last.activity == activity else state.at_s
        if key in scans:
            assert model is not None
            if _is_below(_real_path(key, model, state), state.renamed_folders):
                since_s = -math.inf
            elif root.has_local_times:
                since_s = min(since_s, state.at_s - _age_s(scans[key], state))
        parts[key] = FolderPart(activity, since_s)
    return parts


def _part_scans(model: ModelDirectory | None) -> dict[PartKey, FolderScan]:
    if model is None:
        return {}
    return {None: model.files, **{version.number: version.files for version in model.versions}}


def _activity(key: PartKey, model: ModelDirectory | None, scans: Mapping[PartKey, FolderScan]) -> str | None:
    if model is None or key not in scans:
        return None
    # A problem of the whole model (it is in two repositories) belongs to the part outside the versions.
    return f"{scans[key].activity} {model.problem}" if key is None and not model.versions else scans[key].activity


def _age_s(scan: FolderScan, state: FolderState) -> float:
    """Return the time since the last change by the change times; 0 if they are not reliable."""
    if not scan.changed_ns:
        return 0.0
    return max(0.0, min((state.wall_ns - scan.changed_ns) / 1e9, state.steady_s))


def _wait_s(
    key: PartKey, part: FolderPart, model: ModelDirectory | None, state: FolderState, root: RepositoryRoot
) -> float:
    """Return the time until the part can be settled; 0 if it is."""
    if root.is_being_written or (
        model is not None and part.activity is not None and _is_being_written(key, model, state)
    ):
        return _BUSY_SCAN_S
    return max(0.0, part.since_s + root.settle_s - state.at_s)


def _is_being_written(key: PartKey, model: ModelDirectory, state: FolderState) -> bool:
    scan = _part_scans(model)[key]
    upload_age_s = (state.wall_ns - scan.upload_ns) / 1e9
    # A clock that was set tells no age. The upload may have gone on until then.
    is_young = 0 <= upload_age_s < UPLOAD_PATIENCE_S or state.steady_s < UPLOAD_PATIENCE_S
    if (model.name, key) in state.busy or (scan.upload and is_young):
        return True
    if not state.written:
        return False
    folder = _real_path(key, model, state)
    if key is not None:
        return any(_is_below(path, (folder,)) for path in state.written)
    versions = [_real_path(version.number, model, state) for version in model.versions]
    return any(_is_below(path, (folder,)) and not _is_below(path, versions) for path in state.written)


def _real_path(key: PartKey, model: ModelDirectory, state: FolderState) -> str:
    """Return the real path of a part's directory."""
    path = state.real_paths.get(str(model.path), str(model.path))
    if key is None:
        return path
    version = str(model.path / str(key))
    return state.real_paths.get(version, f"{path}/{key}")


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _next_complete_model(
    known_complete: ModelDirectory | None,
    model: ModelDirectory | None,
    parts: Mapping[PartKey, FolderPart],
    waits: Collection[PartKey],
) -> ModelDirectory | None:
    """Return the new complete state of a model, from the last one and a scan. `waits` are the unsettled parts."""
    if not waits:
        return model
    if model is None or None in waits:
        return known_complete
    present = {version.number: version for version in model.versions}
    if known_complete is None:
        settled = [version for number, version in present.items() if number not in waits]
        return with_versions(model, settled) if settled else None
    if known_complete.fingerprint != model.fingerprint or known_complete.config_path != model.config_path:
        return known_complete
    chosen = {version.number: version for version in known_complete.versions if version.number in waits}
    chosen.update({number: version for number, version in present.items() if number not in waits})
    return with_versions(model, chosen.values())
