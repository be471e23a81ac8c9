"""Observer of file changes below the repositories: by inotify where it reports all changes, else by the package
watchdog."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import watchdog.events
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers.api import BaseObserver, ObservedWatch

from edge_server.repository.disk.files_being_written import OpenWriters, is_open_for_writing
from edge_server.repository.disk.mounts import is_layered, is_remote, read_mounts, root_file_system

log = logging.getLogger(__name__)

# watchdog 7.1 may watch a new folder twice and warns about it. The second watch replaces the first; nothing is lost.
warnings.filterwarnings("ignore", "Callback with id .* already exists", RuntimeWarning, r"watchdog\.")

# watchdog 7.1 logs an error when its thread reads once more after an ordinary stop.
logging.getLogger("watchdog.observers.inotify").addFilter(
    lambda record: "called when the thread is inactive" not in str(record.msg)
)

POLL_S = 1.0
"""Polling interval in seconds for a local or layered file system; a remote one gets twice that."""

_CLOSE_S = 3.0
"""Longest wait of `close` for the observer threads."""

_MAX_CHANGED_PATHS = 256
"""Most changed paths kept between two scans. With more, the kernel's queue may have lost some."""

_REPORTS_ATTRIBUTES = hasattr(watchdog.events, "FileAttribEvent")
_WITHOUT_CHANGE = frozenset({"opened", "closed_no_write"})
"""Events without a change: loading a model opens and reads its files."""


class WatchedFolder(NamedTuple):
    """A real path to watch. With `names`, only these entries of the folder matter, and nothing below them."""

    path: str
    names: frozenset[str] | None = None


class FileObservation:
    """Watches folders: sets `wake` on every change, and tracks the files that are being written.

    Thread-safe, except `watch` and `close`. Events may be lost: the owner also scans regularly.
    """

    def __init__(self, roots: Iterable[Path], *, wants_inotify: bool = True) -> None:
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._writers = OpenWriters(reports_attributes=_REPORTS_ATTRIBUTES)
        self._renamed_folders: set[str] = set()
        self._changed_paths: set[str] | None = None
        """Changed paths since the last `take_changed_paths`; None if anything may have changed."""
        self._inotify: BaseObserver | None = None
        self._polling: BaseObserver | None = None
        self._watch_limit: WatchLimit | None = None
        """Not None exactly while `_inotify` is not."""
        self._watches: dict[WatchedFolder, tuple[BaseObserver, ObservedWatch, tuple[int, int]]] = {}
        kinds = {root: root_file_system(root, mounts) for mounts in [read_mounts()] for root in roots}
        self._is_remote = {root: is_remote(kind) for root, kind in kinds.items()}
        self._is_polled = {root: is_remote(kind) or is_layered(kind) for root, kind in kinds.items()}
        self._polling_interval_s = POLL_S * (2 if any(self._is_remote.values()) else 1)
        if not wants_inotify:
            self._stop_using_inotify("it is switched off")
        elif not all(self._is_polled.values()):
            self._start_inotify()
        for root, kind in kinds.items():
            how = f"by polling every {self._polling_interval_s:g} s" if self._is_polled[root] else "by inotify"
            log.info("watching model repository '%s' (%s) %s", root, kind or "file system unknown", how)

    def is_remote(self, root: Path) -> bool:
        """Return whether other machines may change the files of the root."""
        return self._is_remote[root]

    def is_polled(self, root: Path) -> bool:
        """Return whether the root is polled instead of watched by inotify."""
        return self._is_polled[root]

    def written_files(self) -> frozenset[str]:
        """Return the real paths of files that are known to be open for writing."""
        with self._lock:
            return self._writers.written_files(time.monotonic())

    def is_written(self, paths: Iterable[str]) -> bool:
        """Return whether one of these files is known to be open for writing.

        The kernel is queried first. If it has no answer for a file, the events decide.
        """
        unknown: list[str] = []
        for path in paths:
            is_open = is_open_for_writing(path)
            if is_open:
                return True
            if is_open is None:
                unknown.append(os.path.realpath(path))
        if not unknown:
            return False
        with self._lock:
            return not self._writers.uncertain_files(time.monotonic()).isdisjoint(unknown)

    def take_renamed_folders(self) -> frozenset[str]:
        """Return and forget the real paths of directories that were renamed into place."""
        with self._lock:
            renamed, self._renamed_folders = frozenset(self._renamed_folders), set()
        return renamed

    def take_changed_paths(self) -> frozenset[str] | None:
        """Return and forget the real paths that changed; None if anything may have changed.

        Also None if one of the roots is polled.
        """
        with self._lock:
            changed, self._changed_paths = self._changed_paths, set()
        return None if changed is None or any(self._is_polled.values()) else frozenset(changed)

    def mark_all_changed(self) -> None:
        """Set `wake`, and let the next `take_changed_paths` return None."""
        with self._lock:
            self._changed_paths = None
        self.wake.set()

    def watch(self, folders: Mapping[WatchedFolder, bool]) -> None:
        """Watch exactly these folders; each maps to whether it is polled. Absent folders are left out.

        A folder that was replaced by another of the same name gets a new watch. A new watch sets `wake`, because
        changes just before it had no event.
        """
        self._check_inotify()
        for folder, (observer, watch, identity) in list(self._watches.items()):
            if folder not in folders or _identity(folder.path) != identity or not _is_watching(observer, watch):
                del self._watches[folder]
                _unschedule(observer, watch)
        for folder, is_polled in folders.items():
            if folder not in self._watches:
                self._schedule(folder, is_polled=is_polled)

    def close(self) -> None:
        """Stop watching. A thread that hangs on a disk is not awaited."""
        self._watches.clear()
        observers = [item for item in (self._inotify, self._polling) if item is not None and item.is_alive()]
        self._inotify = self._polling = None
        self._close_watch_limit()
        if observers:
            # Stopping an observer waits until its disk access ends.
            ending = threading.Thread(target=_stop_observers, args=(observers,), name="edge-unwatch", daemon=True)
            ending.start()
            ending.join(_CLOSE_S)

    def _schedule(self, folder: WatchedFolder, *, is_polled: bool) -> None:
        identity = _identity(folder.path)
        if identity is None:
            return
        observer = self._inotify
        if is_polled or observer is None:
            if self._polling is None:
                from watchdog.observers.polling import PollingObserver

                self._polling = _started(PollingObserver(timeout=self._polling_interval_s))
            observer = self._polling
        handler = _FolderEventHandler(self, folder, is_inotify=observer is self._inotify)
        try:
            watch = observer.schedule(handler, folder.path, recursive=folder.names is None)
        except OSError as error:
            if observer is self._inotify and error.errno in (errno.ENOSPC, errno.EMFILE):
                self._stop_using_inotify(str(error))
                self._schedule(folder, is_polled=True)
            else:
                log.debug("'%s' is not watched: %s", folder.path, error)
            return
        self._watches[folder] = (observer, watch, identity)
        self.mark_all_changed()

    def _start_inotify(self) -> None:
        """Start the inotify observer, which also reports folders that were renamed into a watched folder."""
        try:
            from watchdog.observers.inotify import InotifyObserver

            self._inotify = _started(InotifyObserver(generate_full_events=True))
            self._watch_limit = WatchLimit()
        except (OSError, ImportError) as error:  # the limit of instances; a C library without inotify
            self._stop_using_inotify(str(error))

    def _check_inotify(self) -> None:
        """Stop using inotify if its limit of watches is reached: it would miss new folders without an error."""
        if self._inotify is None or self._watch_limit is None:
            return
        reason = "its thread ended" if not self._inotify.is_alive() else self._watch_limit.problem()
        if reason:
            self._stop_using_inotify(reason)

    def _stop_using_inotify(self, reason: str) -> None:
        log.warning("inotify cannot be used (%s); polling every %g s instead", reason, self._polling_interval_s)
        observer, self._inotify = self._inotify, None
        self._close_watch_limit()
        self._is_polled = dict.fromkeys(self._is_polled, True)
        self._watches = {folder: kept for folder, kept in self._watches.items() if kept[0] is not observer}
        with self._lock:
            self._writers = OpenWriters(reports_attributes=_REPORTS_ATTRIBUTES)
        if observer is not None and observer.is_alive():
            observer.stop()
            observer.join()

    def _close_watch_limit(self) -> None:
        limit, self._watch_limit = self._watch_limit, None
        if limit is not None:
            limit.close()

    def on_event(self, event: FileSystemEvent, *, is_inotify: bool) -> None:
        """Handle one event. Only inotify's events say which files are written."""
        with self._lock:
            if is_inotify:
                self._record_event(event, time.monotonic())
            if event.event_type in _WITHOUT_CHANGE:
                return
            if self._changed_paths is not None:
                self._changed_paths.update(os.fsdecode(path) for path in (event.src_path, event.dest_path) if path)
                if not is_inotify or len(self._changed_paths) > _MAX_CHANGED_PATHS:
                    self._changed_paths = None
        self.wake.set()

    def _record_event(self, event: FileSystemEvent, now_s: float) -> None:
        path, target = os.fsdecode(event.src_path), os.fsdecode(event.dest_path)
        match event.event_type:
            case "moved":
                self._record_move(path, target, is_directory=event.is_directory)
            case "deleted":
                self._writers.on_removed(path)
            case _ if event.is_directory:
                return
            case "created":
                self._writers.on_created(path, now_s)
            case "opened":
                self._writers.on_opened(path, now_s)
            case "modified":
                self._writers.on_modified(path, now_s)
            case "closed":
                self._writers.on_closed(path)
            case "closed_no_write":
                self._writers.on_closed_by_reader(path)

    def _record_move(self, path: str, target: str, *, is_directory: bool) -> None:
        if not target:
            self._writers.on_removed(path)
            return
        if path:
            self._writers.on_moved(path, target)
        if is_directory:
            self._renamed_folders.add(target)


class _FolderEventHandler(FileSystemEventHandler):
    """Event handler for one folder."""

    def __init__(self, observation: FileObservation, folder: WatchedFolder, *, is_inotify: bool) -> None:
        self._observation = observation
        self._folder = folder
        self._is_inotify = is_inotify

    def on_any_event(self, event: FileSystemEvent) -> None:
        names = self._folder.names
        if names is None:
            self._observation.on_event(event, is_inotify=self._is_inotify)
        elif any(os.path.basename(os.fsdecode(path)) in names for path in (event.src_path, event.dest_path)):
            # The parent of a root that is a link: the event means that the link has another target.
            self._observation.on_event(event, is_inotify=False)


def _started(observer: BaseObserver) -> BaseObserver:
    observer.start()
    return observer


def _stop_observers(observers: Iterable[BaseObserver]) -> None:
    for observer in observers:
        with contextlib.suppress(KeyError):  # see _unschedule; then there is nothing to join
            observer.stop()
            observer.join()


def _is_watching(observer: BaseObserver, watch: ObservedWatch) -> bool:
    """Return whether a watch is active. It ends by itself when its folder is deleted."""
    return observer.is_alive() and any(item.watch == watch and item.is_alive() for item in observer.emitters)


def _unschedule(observer: BaseObserver, watch: ObservedWatch) -> None:
    if observer.is_alive():
        # watchdog 7.1 raises KeyError for folders that were moved; its daemon thread then stays without events.
        with contextlib.suppress(KeyError):
            observer.unschedule(watch)


def _identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a folder, None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_IN_DELETE_SELF = 0x400
_EVENT_BYTES = 4096
"""More than the event of one removed watch."""


class WatchLimit:
    """Limit of the kernel on the inotify watches of this user, see inotify(7).

    Has an inotify instance of its own and keeps it: closing one can take 20 ms.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._handle: int = self._library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        """Negative if the limit of instances is reached, which does not affect the existing ones."""

    def problem(self) -> str:
        """Return why the kernel refuses another watch, "" if it does not."""
        if self._handle < 0:
            return ""
        watch = self._library.inotify_add_watch(self._handle, b"/", _IN_DELETE_SELF)
        if watch < 0:
            is_reached = ctypes.get_errno() == errno.ENOSPC
            return "the limit fs.inotify.max_user_watches is reached" if is_reached else ""
        self._library.inotify_rm_watch(self._handle, watch)
        with contextlib.suppress(BlockingIOError):
            os.read(self._handle, _EVENT_BYTES)  # the event of the removal
        return ""

    def close(self) -> None:
        """Close the instance. Called once."""
        if self._handle >= 0:
            os.close(self._handle)
