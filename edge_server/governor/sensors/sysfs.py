"""Files of sysfs and procfs under a root folder: small texts that may be gone, or not readable now, at any moment."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_BYTES = 1 << 20
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
FIND_AGAIN_S = 4.0
"""How long found places, and what does not change in them, are believed. A driver that comes up later is found then."""


@dataclass(frozen=True, slots=True)
class MissingReason:
    """Why a file has no value, in plain words. `is_passing`: the kernel said to try again."""

    reason: str
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A file by whose text a folder is known: its number may be another one's the next moment."""

    path: str
    text: str


class SysfsFiles:
    """Reads files below `root`. Paths are given without the root, and with a leading slash, as people know them."""

    def __init__(self, root: str | Path = "/", *, read: Callable[[Path], bytes] | None = None) -> None:
        self._root = Path(root)
        self._read = read
        # Paths joined by pathlib cost as much as reading the files.
        self._prefix = str(self._root).rstrip("/")

    def text(self, path: str) -> str | MissingReason:
        """Return the file's text without white space and NUL at its ends."""
        try:
            data = read_once(self._prefix + path) if self._read is None else self._read(self._at(path))
            return data.decode("utf-8", "replace").strip(" \t\r\n\0")
        except OSError as error:
            return MissingReason(_why(path, error), error.errno == errno.EAGAIN)

    def number(self, path: str) -> int | MissingReason:
        """Return the integer that the file holds."""
        text = self.text(path)
        if isinstance(text, MissingReason):
            return text
        if _NUMBER.fullmatch(text) is None:
            return MissingReason(f"{path}: expected a whole number of 64 bits, given '{text[:40]}'")
        return int(text)

    def maybe_text(self, path: str) -> str | None:
        text = self.text(path)
        return None if isinstance(text, MissingReason) else text

    def maybe_number(self, path: str) -> int | None:
        number = self.number(path)
        return None if isinstance(number, MissingReason) else number

    def bears(self, mark: Mark) -> bool:
        return self.text(mark.path) == mark.text

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def names(self, folder: str, pattern: str = "") -> list[str]:
        """Return the names in a folder whose whole name matches, numbers in order; none for a folder that is absent."""
        try:
            names = os.listdir(self._at(folder))
        except OSError:
            return []
        return sorted((name for name in names if not pattern or re.fullmatch(pattern, name)), key=_in_order)

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a file that may be large; none when it cannot be read."""
        try:
            with self._at(path).open("r", encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError:
            return

    def hwmons(self) -> Iterator[tuple[str, str]]:
        """Yield (name, folder) of each hardware monitor. Their numbers change from boot to boot; names do not."""
        for entry in self.names("/sys/class/hwmon", r"hwmon\d+"):
            folder = f"/sys/class/hwmon/{entry}"
            name = self.maybe_text(f"{folder}/name")
            if name:
                yield name, folder

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def read_once(path: Path | str) -> bytes:
    """Return what a file holds, up to a mebibyte. Never waits: a pipe without data gives EAGAIN, as sysfs does for a
    sensor that is switched off."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts = []
        left = _MOST_BYTES
        while left and (part := os.read(descriptor, min(left, 65536))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class FoundPaths(Generic[T]):
    """Places that were found, looked for again after FIND_AGAIN_S, or at once while there are none.

    `is_still` is asked of each place before each use: once a driver is loaded anew, what was a temperature may be a
    current. Where it is left out, the path alone says what a place is.
    """

    find: Callable[[], list[T]]
    is_still: Callable[[T], bool] = lambda _: True
    _items: list[T] = field(default_factory=list)
    _found_s: float = 0.0

    def items(self, now_s: float) -> list[T]:
        is_fresh = bool(self._items) and 0 <= now_s - self._found_s < FIND_AGAIN_S
        if not is_fresh or not all(self.is_still(item) for item in self._items):
            self._items = self.find()
            self._found_s = now_s
        return self._items

    def forget(self) -> None:
        """Look again the next time: what was found is not as it was."""
        self._items = []


def source(path: str) -> str:
    return f"sysfs:{path}"


def _why(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path} is not there"
    if isinstance(error, PermissionError):
        return f"{path} may not be read by this user"
    if error.errno == errno.EAGAIN:
        return f"{path}: switched off for now (the kernel says to try again)"
    return f"{path}: {error.strerror or error}"


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort "zone10" behind "zone2"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
