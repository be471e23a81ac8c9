"""Watcher of the model repositories (mode `poll`): scans them after changes, and publishes which models and versions
should serve.

`file_events` reports changes, `scan` reads the folders, `incomplete_copy_detection` decides which files are complete. A
full scan is made every `fallback_s`; an event only shortens the wait. Between two full scans, only models are scanned
that had an event, that have not settled, or that hold links. A change without an event is therefore found at most
`fallback_s` later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edge_server.core.version_lifecycle import DesiredModel
from edge_server.errors import EdgeServerError
from edge_server.repository.desired_state import RepositorySource
from edge_server.repository.disk.file_events import FileObservation, WatchedFolder
from edge_server.repository.disk.incomplete_copy_detection import (
    NOTHING,
    FolderState,
    PartKey,
    RepositoryRoot,
    UploadState,
    changes,
    update_uploads,
)
from edge_server.repository.disk.scan import ModelDirectory, RepositorySnapshot

log = logging.getLogger(__name__)

_JUMP_S = 0.2
"""How far the two clocks may drift apart between two scans. More means that one of them was set."""

_CLOSE_S = 3.0
"""How long `close` waits for a running scan."""

_GIT_LOCK_TIMEOUT_S = 600.0
"""Oldest index.lock of git that counts. An older one remained after a crash."""


class PollIntervals(NamedTuple):
    """Times between scans, in seconds.

    `settle_s`: how long files on local disks must stay unchanged. `remote_settle_s`: the same for network file systems,
    whose sizes and times may be seconds old (NFS keeps them for 3 s, acregmin). `gap_s`: the shortest time between two
    scans.
    """

    settle_s: float = 0.5
    remote_settle_s: float = 5.0
    gap_s: float = 0.1


class Watcher:
    """Scans the repositories, after `start` on its own thread, and publishes the desired state when it changes."""

    def __init__(
        self,
        source: RepositorySource,
        set_desired_state: Callable[[Mapping[str, DesiredModel]], None],
        fallback_s: float,
        *,
        pace: PollIntervals = PollIntervals(),
        observation: FileObservation | None = None,
    ) -> None:
        self._source = source
        self._scanner = source.scanner
        self._publish = set_desired_state
        self._fallback_s = fallback_s
        self._pace = pace
        self._observation = observation or FileObservation(source.scanner.roots)
        self._settled = NOTHING
        self._snapshot = RepositorySnapshot()
        self._has_failed = True
        """Whether the last scan failed. Its events are lost, so the next scan must be full."""
        self._full_scan_s = -float("inf")
        """Start of the last full scan, monotonic."""
        self._real_paths_of: dict[str, tuple[ModelDirectory, dict[str, str]]] = {}
        """Each scanned model, with the real paths that differ from its own paths; see `_real_paths`."""
        self._published: Mapping[str, DesiredModel] = {}
        self._devices: dict[Path, int] = {}
        self._absent: frozenset[Path] = frozenset()
        self._logged_warnings: frozenset[str] = frozenset()
        self._logged_problems: frozenset[str] = frozenset()
        self._problem = ""
        """Error of the last scan, "" if there was none. It is logged once, not at every scan."""
        self._clock = _Clock()
        self._git_locks = _GitLocks()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def scan_first(self) -> dict[str, DesiredModel]:
        """Return the desired state at the start. Models that are being written are left for later.

        Takes no longer than the settle time. Raises ServingFault if a repository cannot be read.
        """
        self._scanner.check_roots()
        desired = self.scan()
        if self._settled.next_scan_s is not None:
            longest_s = max((self._root(root).settle_s for root in self._scanner.roots), default=0.0)
            self._closing.wait(longest_s)
            desired = self.scan()
        self._published = desired
        return desired

    def start(self) -> None:
        """Start the scanning thread."""
        self._thread = threading.Thread(target=self._loop, name="edge-watch", daemon=True)
        self._thread.start()

    def scan_soon(self) -> None:
        """Make the thread scan everything now."""
        self._observation.mark_all_changed()

    def close(self) -> None:
        """Stop scanning. May be called without `start`, and again.

        The thread of a scan that hangs on a disk is not awaited; it ends with the process.
        """
        self._closing.set()
        self._observation.wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.warning("a scan of the repository hangs; its thread ends with the process")
                return
        self._observation.close()

    def scan(self, *, is_full: bool = True) -> dict[str, DesiredModel]:
        """Scan once and return the desired state. `is_full` False: scan only the models that may have changed."""
        is_full, self._has_failed = is_full or self._has_failed, True
        if self._settled is NOTHING:
            # The roots are watched before the first scan, so that no change between the two is missed.
            self._observation.watch(self._folders(RepositorySnapshot(), {}))
        # Taken before the scan: a change during the scan belongs to the next one.
        renamed_folders = self._observation.take_renamed_folders()
        changed_paths = self._observation.take_changed_paths()
        unchanged = frozenset() if is_full or changed_paths is None else self._unchanged(changed_paths)
        if not unchanged:
            self._full_scan_s = time.monotonic()
        snapshot = self._snapshot = self._scanner.scan_changed(self._snapshot, unchanged)
        roots = self._check_roots(snapshot)
        real_paths = self._real_paths(snapshot)
        self._observation.watch(self._folders(snapshot, real_paths))
        at_s, wall_ns, steady_s = self._clock.read()
        state = FolderState(
            at_s=at_s,
            wall_ns=wall_ns,
            models=snapshot.models,
            roots=roots,
            steady_s=steady_s,
            written=self._observation.written_files(),
            renamed_folders=renamed_folders,
            real_paths=real_paths,
            unchanged=unchanged,
        )
        settled = update_uploads(self._settled.known, state)
        busy = self._written_parts(settled)
        self._settled = update_uploads(self._settled.known, replace(state, busy=busy)) if busy else settled
        self._warn(snapshot.warnings)
        models = self._settled.models()
        self._log_problems(models)
        desired = self._source.desired_models_for(models)
        self._has_failed = False
        return desired

    def _unchanged(self, changed_paths: Collection[str]) -> frozenset[str]:
        """Return the models that have not changed, if only these paths changed; empty if that is not certain."""
        roots = [os.path.realpath(root) + os.sep for root in self._scanner.roots]
        changed = set(self._settled.unsettled)
        for path in changed_paths:
            # Every scan lists the roots themselves.
            if path + os.sep in roots:
                continue
            root = next((root for root in roots if path.startswith(root)), None)
            if root is None:
                return frozenset()
            changed.add(path.removeprefix(root).partition(os.sep)[0])
        return frozenset(
            name
            for name, model in self._snapshot.models.items()
            if name not in changed and not model.has_links and not model.problem
        )

    def _real_paths(self, snapshot: RepositorySnapshot) -> dict[str, str]:
        """Return the real paths of models and versions that are links."""
        known, self._real_paths_of = self._real_paths_of, {}
        for name, model in snapshot.models.items():
            before = known.get(name)
            if before is None or before[0] is not model:
                before = model, _real_paths(model)
            self._real_paths_of[name] = before
        return {path: target for _, paths in self._real_paths_of.values() for path, target in paths.items()}

    def _written_parts(self, settled: UploadState) -> list[tuple[str, PartKey]]:
        """Return the newly complete parts that are still being written. Events alone do not report all writers.

        The event of an opening is missed if it comes before the watch on a new directory is set, and it is late on a
        busy machine.
        """
        return [
            (name, key)
            for name, key, trace in changes(self._settled, settled)
            if self._observation.is_written(trace.young)
        ]

    def _loop(self) -> None:
        while not self._closing.is_set():
            began_s = time.monotonic()
            self._scan_and_publish()
            took_s = time.monotonic() - began_s
            # Limits the load on a slow disk.
            self._closing.wait(max(self._pace.gap_s, took_s * 4))
            self._observation.wake.wait(self._wait_s())
            self._observation.wake.clear()

    def _wait_s(self) -> float:
        due_s = self._full_scan_s + self._fallback_s
        if self._settled.next_scan_s is not None:
            due_s = min(due_s, self._settled.next_scan_s)
        return max(due_s - time.monotonic(), 0.0)

    def _scan_and_publish(self) -> None:
        before, self._problem = self._problem, ""
        try:
            desired = self.scan(is_full=time.monotonic() - self._full_scan_s >= self._fallback_s)
            if desired != self._published:
                self._publish(desired)
                self._published = desired
        except (EdgeServerError, OSError) as error:
            # A failed scan does not change the desired state: loaded models continue to serve.
            self._problem = str(error)
            if self._problem != before:
                log.warning("the repository cannot be read; trying again: %s", error)
        except Exception as error:
            # An unforeseen error must not end the thread: later changes would never be found.
            self._problem = repr(error)
            if self._problem != before:
                log.exception("the repository could not be scanned; trying again")

    # -- roots ------------------------------------------------------------------------------------------------------

    def _root(self, path: Path, *, is_unreadable: bool = False) -> RepositoryRoot:
        is_remote = self._observation.is_remote(path)
        return RepositoryRoot(
            settle_s=self._pace.remote_settle_s if is_remote else self._pace.settle_s,
            has_local_times=not is_remote,
            is_unreadable=is_unreadable,
            is_being_written=not is_unreadable and self._git_locks.is_writing(path),
        )

    def _check_roots(self, snapshot: RepositorySnapshot) -> dict[Path, RepositoryRoot]:
        """Return the rules for each root. Log once each root that became unreadable or is back."""
        reasons = dict(snapshot.absent)
        for root in self._scanner.roots:
            if root not in reasons and self._is_unmounted(root, snapshot):
                reasons[root] = f"model repository '{root}' is empty, and on another file system than before"
        for root in sorted(reasons.keys() - self._absent):
            log.warning("%s; its loaded models continue to serve", reasons[root])
        for root in sorted(self._absent - reasons.keys()):
            log.info("model repository '%s' is back", root)
        self._absent = frozenset(reasons)
        return {root: self._root(root, is_unreadable=root in reasons) for root in self._scanner.roots}

    def _is_unmounted(self, root: Path, snapshot: RepositorySnapshot) -> bool:
        """Return whether a root is the empty mount point of a file system with models."""
        try:
            device = os.stat(root).st_dev
        except OSError:
            return True
        has_models = any(model.path.parent == root for model in snapshot.models.values())
        if not has_models and self._devices.get(root, device) != device:
            return True
        self._devices[root] = device
        return False

    # -- folders to watch ----------------------------------------------------------------------------------------------

    def _folders(self, snapshot: RepositorySnapshot, real_paths: Mapping[str, str]) -> dict[WatchedFolder, bool]:
        """Return the folders to watch, each with whether it must be polled.

        They are the roots, the targets of links outside the roots, and the parent folder of roots that are links or
        absent.
        """
        folders: dict[WatchedFolder, bool] = {}
        above: dict[str, set[str]] = {}
        for root in self._scanner.roots:
            folders[WatchedFolder(os.path.realpath(root))] = self._observation.is_polled(root)
            if root.is_symlink() or not root.exists():
                above.setdefault(os.path.realpath(root.parent), set()).add(root.name)
        covered = [folder.path for folder in folders]
        for path, target in sorted(real_paths.items()):
            if os.path.isdir(target) and not any(target == top or target.startswith(top + "/") for top in covered):
                root = next(root for root in self._scanner.roots if Path(path).is_relative_to(root))
                folders[WatchedFolder(target)] = self._observation.is_polled(root)
                covered.append(target)
        folders.update({WatchedFolder(path, frozenset(names)): False for path, names in above.items()})
        return folders

    def _warn(self, warnings: tuple[str, ...]) -> None:
        """Log each warning when it first appears, not at every scan."""
        for warning in warnings:
            if warning not in self._logged_warnings:
                log.warning("%s", warning)
        self._logged_warnings = frozenset(warnings)

    def _log_problems(self, models: Mapping[str, ModelDirectory]) -> None:
        """Log each problem of a whole model when it first appears: no load will report it."""
        problems = frozenset(model.problem for model in models.values() if model.problem)
        for problem in sorted(problems - self._logged_problems):
            log.error("%s", problem)
        self._logged_problems = problems


class _Clock:
    """The wall clock and the monotonic clock, and the time since one of them was set."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._jumped_s = -float("inf")

    def read(self) -> tuple[float, int, float]:
        """Return monotonic seconds, nanoseconds since the epoch, and the time since a clock was set."""
        wall_ns, at_s = time.time_ns(), time.monotonic()
        offset_s = wall_ns / 1e9 - at_s
        if abs(offset_s - self._offset_s) > _JUMP_S:
            self._jumped_s = at_s
        self._offset_s = offset_s
        return at_s, wall_ns, at_s - self._jumped_s


def _real_paths(model: ModelDirectory) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (model.path, *(model.path / str(version.number) for version in model.versions)):
        if path is model.path or path.is_symlink():
            target = os.path.realpath(path)
            if target != str(path):
                found[str(path)] = target
    return found


class _GitLocks:
    """Tells whether git is writing the work tree around a folder: it holds index.lock until it is done."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, float]] = {}
        """Change time of each lock, and the monotonic time until which it counts."""

    def is_writing(self, root: Path) -> bool:
        git = next((path / ".git" for path in (root, *root.absolute().parents) if (path / ".git").is_dir()), None)
        if git is None:
            return False
        lock = git / "index.lock"
        try:
            changed_ns = lock.stat().st_mtime_ns
        except OSError:
            self._known.pop(lock, None)
            return False
        known = self._known.get(lock)
        if known is None or known[0] != changed_ns:
            # Only once by the wall clock, which may be set at any time. A lock with a future time was left before the
            # clock was set back, e.g. without a clock battery.
            age_s = abs(time.time() - changed_ns / 1e9)
            known = self._known[lock] = changed_ns, time.monotonic() + _GIT_LOCK_TIMEOUT_S - age_s
        return time.monotonic() < known[1]
