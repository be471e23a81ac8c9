"""A short text that changes whenever a file below a folder does: name, size, time, inode. Reads no content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

MAX_FILES = 65_536
"""Files looked at below one folder; more is a mistake, such as a link to the root of the disk."""


class TooManyFiles(OSError):
    """A model's folder holds more files than a model can have."""


def is_ignored(name: str) -> bool:
    """Return whether a name never belongs to a model: hidden files, and what Python writes beside its sources."""
    return name.startswith(".") or name == "__pycache__"


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, links followed; False for a link that leads nowhere or in a circle."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def fingerprint(entries: Iterable[os.DirEntry[str]]) -> str:
    """Return the fingerprint of these entries and of everything below them, links followed.

    Folders count by what they hold, so that ignored files in them change nothing. A file that vanishes meanwhile
    counts as absent. Raises OSError for a folder that cannot be read.
    """
    lines: list[str] = []
    for entry in sorted(entries, key=lambda item: item.name):
        _look(entry, entry.name, frozenset(), lines)
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Return the fingerprint of everything in a folder. Raises OSError when it cannot be read."""
    return fingerprint(_children(folder))


def _children(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not is_ignored(entry.name)), key=lambda entry: entry.name)


def _look(entry: os.DirEntry[str], name: str, above: frozenset[tuple[int, int]], lines: list[str]) -> None:
    """Append one line for a file, or the lines of a folder. `above` are the folders around it, against loops."""
    if len(lines) >= MAX_FILES:
        raise TooManyFiles(f"more than {MAX_FILES} files")
    try:
        found = entry.stat()
    except OSError:
        lines.append(f"{name}\0gone")
        return
    if not is_folder(entry):
        lines.append(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_dev}\0{found.st_ino}")
        return
    lines.append(f"{name}\0folder")
    identity = (found.st_dev, found.st_ino)
    if identity in above:
        return
    try:
        inner = _children(entry.path)
    except FileNotFoundError:
        lines.append(f"{name}\0gone")
        return
    for child in inner:
        _look(child, f"{name}/{child.name}", above | {identity}, lines)
