"""Scan of a folder to a fingerprint: a short text that changes with the name, size, time, inode or read permission of
any file.

File contents are not read.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from edge_server.record import record

MAX_FILES = 65_536
"""Most files below one folder. More is a mistake, such as a link to the root of the disk."""

YOUNG_S = 60.0
"""Time after its last change in which a file may still be open for writing."""

_UPLOAD = re.compile(
    r".+\.(tmp|temp|part|partial|crdownload|download|filepart)|\..+\.[A-Za-z0-9]{6}|\.~tmp~|\.rsync-partial"
)
"""Names of incomplete files of copying programs: browsers, curl, WinSCP, rsync (`.model.onnx.AbC123`)."""

_EDITOR = re.compile(r".+~|.+\.sw[a-z]|#.+#|\.#.+")
"""Names of files that editors keep beside a file, during and often after an edit."""


@record(frozen=True, slots=True)
class FolderScan:
    """Result of one scan of some files.

    `fingerprint` covers the files of a model. `activity` also covers the files of upload tools and editors beside them;
    while it changes, an upload or an edit is in progress. `changed_ns` is the latest change time (ctime, which no tool
    can set) of the files and folders, 0 if there are none, and `file_changed_ns` that of the files alone. `young` are
    the files whose change time lies within YOUNG_S of the scan. `upload` names the newest file of an unfinished upload,
    "" if there is none; `upload_ns` is its change time. `outside_link` is the first link to a file outside the
    repository, with its target, "" if there is none. `has_links`: a change outside the folder may change the model.
    """

    fingerprint: str = ""
    activity: str = ""
    changed_ns: int = 0
    file_changed_ns: int = 0
    upload: str = ""
    upload_ns: int = 0
    outside_link: str = ""
    young: tuple[str, ...] = field(default=(), compare=False)
    has_links: bool = field(default=False, compare=False)


class TooManyFiles(OSError):
    """A model folder holds more than MAX_FILES files."""


def is_ignored(name: str) -> bool:
    """Return whether a name never belongs to a model: hidden files, Python caches, the folder that a file system check
    makes, incomplete files."""
    return name.startswith(".") or name in ("__pycache__", "lost+found") or is_leftover(name)


def is_leftover(name: str) -> bool:
    """Return whether a name is an unfinished upload or an editor's copy."""
    return _UPLOAD.fullmatch(name) is not None or _EDITOR.fullmatch(name) is not None


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, links followed; False for a broken or circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class LinkBoundary:
    """Checks that links stay below the roots of the repositories.

    `None` for `roots` allows every link.
    """

    def __init__(self, roots: Iterable[Path] | None) -> None:
        self._inside = None if roots is None else tuple(os.path.realpath(root) for root in roots)

    def outside_link(self, path: str) -> str:
        """Return "'path' leads to 'target'" when it is outside, else ""."""
        if self._inside is None:
            return ""
        target = os.path.realpath(path)
        if any(target == root or target.startswith(root.rstrip("/") + "/") for root in self._inside):
            return ""
        return f"'{path}' leads to '{target}'"


def scan_files(folder: Path, entries: Iterable[os.DirEntry[str]], boundary: LinkBoundary) -> FolderScan:
    """Return the scan of these entries of a folder and everything below them, links followed.

    Folders count only by their entries, so ignored files change nothing. A file that is deleted during the scan counts
    as absent. Raises OSError for a folder that cannot be read.
    """
    return _walk(folder, entries, boundary).scan_files()


def describe_files(folder: Path, entries: Iterable[os.DirEntry[str]]) -> tuple[str, ...]:
    """Return the lines behind the fingerprint of the same `scan_files`: one line per file or folder.

    A line begins with the path below `folder`; after the first NUL follow the file's size, times and inode. Raises
    OSError as `scan_files`.
    """
    return tuple(_walk(folder, entries, LinkBoundary(None)).lines)


def digest(described: Iterable[str]) -> str:
    """Return the fingerprint of the lines of `describe_files`."""
    return hashlib.blake2b("\n".join(described).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _walk(folder: Path, entries: Iterable[os.DirEntry[str]], boundary: LinkBoundary) -> _Walk:
    walk = _Walk(boundary)
    walk.add_change_time(os.stat(folder))
    for entry in sorted(entries, key=lambda item: item.name):
        walk.add_entry(entry, entry.name, frozenset())
    return walk


def scan_folder(folder: Path, boundary: LinkBoundary) -> FolderScan:
    """Return the scan of a whole folder. Raises OSError if it cannot be read."""
    return scan_files(folder, children(folder), boundary)


def children(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, by name. Raises OSError."""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


@record(slots=True)
class _Walk:
    """State of one walk through files."""

    boundary: LinkBoundary
    lines: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    changed_ns: int = 0
    file_changed_ns: int = 0
    upload: str = ""
    upload_ns: int = 0
    outside_link: str = ""
    young: list[str] = field(default_factory=list)
    has_links: bool = False
    now_ns: int = field(default_factory=time.time_ns)

    def scan_files(self) -> FolderScan:
        return FolderScan(
            fingerprint=digest(self.lines),
            activity=digest([*self.lines, "\0leftovers", *self.leftovers]),
            changed_ns=self.changed_ns,
            file_changed_ns=self.file_changed_ns,
            upload=self.upload,
            upload_ns=self.upload_ns,
            outside_link=self.outside_link,
            young=tuple(self.young),
            has_links=self.has_links,
        )

    def add_change_time(self, found: os.stat_result) -> None:
        self.changed_ns = max(self.changed_ns, found.st_ctime_ns)

    def add_entry(self, entry: os.DirEntry[str], name: str, above: frozenset[tuple[int, int]]) -> None:
        """Add one line for a file, or the lines of a folder. `above` are the folders around it, against loops."""
        if is_ignored(entry.name):
            if is_leftover(entry.name):
                self._record_leftover(entry, name)
            return
        if len(self.lines) >= MAX_FILES:
            raise TooManyFiles(f"more than {MAX_FILES} files")
        if entry.is_symlink():
            self.has_links = True
            self.outside_link = self.outside_link or self.boundary.outside_link(entry.path)
        try:
            found = entry.stat()
        except OSError:
            self.lines.append(f"{name}\0gone")
            return
        self.add_change_time(found)
        if is_folder(entry):
            self._add_folder(entry, name, above, (found.st_dev, found.st_ino))
        else:
            self.file_changed_ns = max(self.file_changed_ns, found.st_ctime_ns)
            # A change of mode or owner can make a file readable; a failed load is then retried.
            is_open_to_all = found.st_mode & 0o444 == 0o444
            is_readable = is_open_to_all or os.access(entry.path, os.R_OK)
            self.lines.append(_line(name, found) + ("" if is_readable else "\0unreadable"))
            # A change time in the future (the clock was set) does not tell the age of a file.
            if abs(self.now_ns - found.st_ctime_ns) < YOUNG_S * 1e9:
                self.young.append(entry.path)

    def _add_folder(
        self, entry: os.DirEntry[str], name: str, above: frozenset[tuple[int, int]], identity: tuple[int, int]
    ) -> None:
        self.lines.append(f"{name}\0folder")
        if identity in above or (self.outside_link and entry.is_symlink()):
            return
        try:
            inner = children(entry.path)
        except FileNotFoundError:
            self.lines.append(f"{name}\0gone")
            return
        for child in inner:
            self.add_entry(child, f"{name}/{child.name}", above | {identity})

    def _record_leftover(self, entry: os.DirEntry[str], name: str) -> None:
        """Record an incomplete file. Of folders only those of rsync count: others may be prepared versions."""
        try:
            found = entry.stat(follow_symlinks=False)
            if is_folder(entry) and not entry.name.startswith("."):
                return
        except OSError:
            return
        if len(self.leftovers) < MAX_FILES:
            self.leftovers.append(_line(name, found))
        if _UPLOAD.fullmatch(entry.name) and found.st_ctime_ns > self.upload_ns:
            self.upload, self.upload_ns = name, found.st_ctime_ns


def _line(name: str, found: os.stat_result) -> str:
    return f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_dev}\0{found.st_ino}"
