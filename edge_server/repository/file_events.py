"""Hear of changes below folders: inotify where the kernel tells of all of them, else watchdog's polling observer."""

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
from dataclasses import dataclass
from pathlib import Path

import watchdog.events
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers.api import BaseObserver, ObservedWatch
from watchdog.observers.polling import PollingObserver

from edge_server.repository.mounts import is_layered, is_remote, read_mounts, root_file_system
from edge_server.repository.open_files import OpenWriters, is_open_for_writing

log = logging.getLogger(__name__)

# watchdog 7.1 watches a folder twice when it is told of it while looking through the one above, and warns of its own
# doing; the second watch replaces the first, and nothing is lost.
warnings.filterwarnings("ignore", "Callback with id .* already exists", RuntimeWarning, r"watchdog\.")

POLL_S = 1.0
"""Seconds between two looks of the polling observer at a local or layered file system; a remote one gets twice that."""

_CLOSE_S = 3.0
"""How long the end of what observes is waited for."""

_MOST_CHANGED_PATHS = 256
"""Paths that changed since the last look; of more, some may have been lost, as the kernel's queue overflows."""

_TELLS_ATTRIBUTES = hasattr(watchdog.events, "FileAttribEvent")
_SILENT = frozenset({"opened", "closed_no_write"})
"""What does not change anything: a model that is loaded is opened and read."""


@dataclass(frozen=True, slots=True)
class WatchedFolder:
    """A real path to hear of. `names`, when not None, are the only entries of it that matter, and nothing below."""

    path: str
    names: frozenset[str] | None = None


class FileObservation:
    """Sets `wake` on every change, and knows who writes. Thread-safe, aside from `follow` and `close`.

    Hearing of something is a help and never needed: whoever uses this looks by itself every so often.
    """

    def __init__(self, roots: Iterable[Path], *, wants_inotify: bool = True) -> None:
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._writers = OpenWriters(tells_attributes=_TELLS_ATTRIBUTES)
        self._published: set[str] = set()
        self._changed_paths: set[str] | None = None
        """Paths of which something was on_event since they were asked for last; None when it may have been anything."""
        self._inotify: BaseObserver | None = None
        self._polling: BaseObserver | None = None
        self._watches: dict[WatchedFolder, tuple[BaseObserver, ObservedWatch, tuple[int, int]]] = {}
        kinds = {root: root_file_system(root, mounts) for mounts in [read_mounts()] for root in roots}
        self._is_remote = {root: is_remote(kind) for root, kind in kinds.items()}
        self._is_polled = {root: is_remote(kind) or is_layered(kind) for root, kind in kinds.items()}
        self._polling_interval_s = POLL_S * (2 if any(self._is_remote.values()) else 1)
        if not wants_inotify:
            self._stop_using_inotify("it is not wanted")
        elif not all(self._is_polled.values()):
            self._start_inotify()
        for root, kind in kinds.items():
            how = f"by looking every {self._polling_interval_s:g} s" if self._is_polled[root] else "by inotify"
            log.info("watching model repository '%s' (%s) %s", root, kind or "file system unknown", how)

    def is_remote(self, root: Path) -> bool:
        """Return whether other machines may change the root's files."""
        return self._is_remote[root]

    def is_polled(self, root: Path) -> bool:
        """Return whether the kernel is not, or cannot be, asked about changes there."""
        return self._is_polled[root]

    def written_files(self) -> frozenset[str]:
        """Return the real paths of files that are open for writing, as far as is known."""
        with self._lock:
            return self._writers.writing(time.monotonic())

    def is_written(self, paths: Iterable[str]) -> bool:
        """Return whether somebody writes one of these files, as far as can be found out.

        The kernel is asked, whatever was on_event; what was on_event decides of files that it says nothing about.
        """
        untold: list[str] = []
        for path in paths:
            is_open = is_open_for_writing(path)
            if is_open:
                return True
            if is_open is None:
                untold.append(os.path.realpath(path))
        if not untold:
            return False
        with self._lock:
            return not self._writers.unsure(time.monotonic()).isdisjoint(untold)

    def take_renamed_folders(self) -> frozenset[str]:
        """Return, once, the real paths of directories that were renamed into place."""
        with self._lock:
            published, self._published = frozenset(self._published), set()
        return published

    def take_changed_paths(self) -> frozenset[str] | None:
        """Return, once, the real paths that changed, or whose folders did; None when anything may have changed.

        None as well where the kernel does not tell of all changes.
        """
        with self._lock:
            touched, self._changed_paths = self._changed_paths, set()
        return None if touched is None or any(self._is_polled.values()) else frozenset(touched)

    def mark_all_changed(self) -> None:
        """Wake, and let the next `take_changed_paths` say that anything may have changed."""
        with self._lock:
            self._changed_paths = None
        self.wake.set()

    def watch(self, folders: Mapping[WatchedFolder, bool]) -> None:
        """Hear of these folders and no others; each maps to whether it is to be polled. Those not there are left out.

        A folder that was replaced by another of the same name since is followed anew. Wakes when it begins to hear of
        one: what happened there just before was on_event by nobody.
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
        """Hear of nothing any more. What hangs on a disk that does not answer is left behind."""
        self._watches.clear()
        observers = [item for item in (self._inotify, self._polling) if item is not None and item.is_alive()]
        self._inotify = self._polling = None
        if observers:
            # Both ways to end one wait for what reads the disk, for as long as that takes.
            ending = threading.Thread(target=_end, args=(observers,), name="edge-unwatch", daemon=True)
            ending.start()
            ending.join(_CLOSE_S)

    def _schedule(self, folder: WatchedFolder, *, is_polled: bool) -> None:
        identity = _identity(folder.path)
        if identity is None:
            return
        observer = self._inotify
        if is_polled or observer is None:
            observer = self._polling = self._polling or _started(PollingObserver(timeout=self._polling_interval_s))
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
        """Start the inotify observer, which says also what was renamed into a folder from elsewhere."""
        try:
            from watchdog.observers.inotify import InotifyObserver

            self._inotify = _started(InotifyObserver(generate_full_events=True))
        except (OSError, ImportError) as error:  # the limit of instances; a C library without inotify
            self._stop_using_inotify(str(error))

    def _check_inotify(self) -> None:
        """Give inotify up when its limit of watches is used up: it is deaf to new folders then, and does not say so."""
        if self._inotify is None:
            return
        reason = "its thread ended" if not self._inotify.is_alive() else _why_no_room()
        if reason:
            self._stop_using_inotify(reason)

    def _stop_using_inotify(self, reason: str) -> None:
        log.warning("inotify cannot be used (%s); looking every %g s instead", reason, self._polling_interval_s)
        observer, self._inotify = self._inotify, None
        self._is_polled = dict.fromkeys(self._is_polled, True)
        self._watches = {folder: kept for folder, kept in self._watches.items() if kept[0] is not observer}
        with self._lock:
            self._writers = OpenWriters(tells_attributes=_TELLS_ATTRIBUTES)
        if observer is not None and observer.is_alive():
            observer.stop()
            observer.join()

    def on_event(self, event: FileSystemEvent, *, is_inotify: bool) -> None:
        """Take note of an event. Only inotify's tell who writes."""
        with self._lock:
            if is_inotify:
                self._record_event(event, time.monotonic())
            if event.event_type in _SILENT:
                return
            if self._changed_paths is not None:
                self._changed_paths.update(os.fsdecode(path) for path in (event.src_path, event.dest_path) if path)
                if not is_inotify or len(self._changed_paths) > _MOST_CHANGED_PATHS:
                    self._changed_paths = None
        self.wake.set()

    def _record_event(self, event: FileSystemEvent, now_s: float) -> None:
        path, target = os.fsdecode(event.src_path), os.fsdecode(event.dest_path)
        match event.event_type:
            case "moved":
                self._record_move(path, target, is_directory=event.is_directory)
            case "deleted":
                self._writers.removed(path)
            case _ if event.is_directory:
                return
            case "created":
                self._writers.made(path, now_s)
            case "opened":
                self._writers.opened(path, now_s)
            case "modified":
                self._writers.changed(path, now_s)
            case "closed":
                self._writers.closed(path)
            case "closed_no_write":
                self._writers.closed_by_reader(path)

    def _record_move(self, path: str, target: str, *, is_directory: bool) -> None:
        if not target:
            self._writers.removed(path)
            return
        if path:
            self._writers.moved(path, target)
        if is_directory:
            self._published.add(target)


class _FolderEventHandler(FileSystemEventHandler):
    """The ear for one folder."""

    def __init__(self, observation: FileObservation, folder: WatchedFolder, *, is_inotify: bool) -> None:
        self._observation = observation
        self._folder = folder
        self._is_inotify = is_inotify

    def on_any_event(self, event: FileSystemEvent) -> None:
        names = self._folder.names
        if names is None:
            self._observation.on_event(event, is_inotify=self._is_inotify)
        elif any(os.path.basename(os.fsdecode(path)) in names for path in (event.src_path, event.dest_path)):
            # The parent of a root that is a link: it only says that the link leads elsewhere.
            self._observation.on_event(event, is_inotify=False)


def _started(observer: BaseObserver) -> BaseObserver:
    observer.start()
    return observer


def _end(observers: Iterable[BaseObserver]) -> None:
    for observer in observers:
        with contextlib.suppress(KeyError):  # see _unschedule; then there is nothing to join
            observer.stop()
            observer.join()


def _is_watching(observer: BaseObserver, watch: ObservedWatch) -> bool:
    """Return whether a watch is at work. It ends by itself when its folder is deleted."""
    return observer.is_alive() and any(item.watch == watch and item.is_alive() for item in observer.emitters)


def _unschedule(observer: BaseObserver, watch: ObservedWatch) -> None:
    if observer.is_alive():
        # watchdog 7.1 stumbles over folders that were moved; its daemon thread is then left with nothing to tell.
        with contextlib.suppress(KeyError):
            observer.unschedule(watch)


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a folder from another of the same name, None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_IN_CLOEXEC = os.O_CLOEXEC
_IN_DELETE_SELF = 0x400


def _why_no_room() -> str:
    """Return why the kernel would set no further inotify watch for this user, "" when it would. inotify(7)."""
    library = ctypes.CDLL(None, use_errno=True)
    handle = library.inotify_init1(_IN_CLOEXEC)
    if handle < 0:
        # All instances are taken, which does not matter to one that is there.
        return ""
    try:
        is_set = library.inotify_add_watch(handle, b"/", _IN_DELETE_SELF) >= 0
        code = ctypes.get_errno()
    finally:
        os.close(handle)
    return "" if is_set or code != errno.ENOSPC else "the limit fs.inotify.max_user_watches is reached"
