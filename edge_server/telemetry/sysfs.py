"""Reader of sysfs and procfs files below a root folder. Any file may disappear or become unreadable at any time."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from edge_server.record import record

T = TypeVar("T")

_MAX_BYTES = 1 << 20
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
FIND_AGAIN_S = 4.0
"""Time until paths are searched again. Files of a driver that is loaded later are then found."""


class MissingReason(NamedTuple):
    """The reason why a file has no value. `is_temporary`: the kernel returned EAGAIN."""

    reason: str
    is_temporary: bool = False


class Mark(NamedTuple):
    """A file and its text that identify a folder, because the numbers of folders can change at any time."""

    path: str
    text: str


class SysfsFiles:
    """Reads files below `root`. Paths begin with a slash and do not contain the root."""

    def __init__(self, root: str | Path = "/", *, read: Callable[[Path], bytes] | None = None) -> None:
        self.root = Path(root)
        self._read = read
        # Joining paths by pathlib would take as long as reading the files.
        self._prefix = str(self.root).rstrip("/")

    def text(self, path: str) -> str | MissingReason:
        """Return the file's text without white space and NUL at the ends, or the reason why it cannot be read."""
        try:
            data = read_once(self._prefix + path) if self._read is None else self._read(self._at(path))
            return data.decode("utf-8", "replace").strip(" \t\r\n\0")
        except OSError as error:
            return MissingReason(_reason(path, error), error.errno == errno.EAGAIN)

    def number(self, path: str) -> int | MissingReason:
        """Return the file's integer, or the reason why there is none."""
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

    def matches(self, mark: Mark) -> bool:
        """Return whether the file of a mark still has its text."""
        return self.text(mark.path) == mark.text

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def names(self, folder: str, pattern: str = "") -> list[str]:
        """Return the names in a folder that match a pattern, in natural order; empty if the folder does not exist."""
        try:
            names = os.listdir(self._at(folder))
        except OSError:
            return []
        # "zone2" stands before "zone10".
        return sorted(
            (name for name in names if not pattern or re.fullmatch(pattern, name)),
            key=lambda name: [
                (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part
            ],
        )

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a file that may be large; nothing if it cannot be read."""
        try:
            with self._at(path).open("r", encoding="utf-8", errors="replace") as file:
                yield from file
        except OSError:
            return

    def soc(self) -> str | None:
        """Return the chip of a Jetson as its device tree names it, as tegra234 for Orin; None on another machine."""
        compatible = (self.maybe_text("/proc/device-tree/compatible") or "").split("\0")
        return next((name.removeprefix("nvidia,") for name in compatible if name.startswith("nvidia,tegra")), None)

    def hwmons(self) -> Iterator[tuple[str, str]]:
        """Yield (name, folder) of each hwmon device. Their numbers change with each boot; their names do not."""
        for entry in self.names("/sys/class/hwmon", r"hwmon\d+"):
            folder = f"/sys/class/hwmon/{entry}"
            name = self.maybe_text(f"{folder}/name")
            if name:
                yield name, folder

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def read_once(path: Path | str) -> bytes:
    """Return the content of a file, at most 1 MiB. Never blocks: a pipe without data gives EAGAIN, as sysfs does for a
    sensor that is switched off."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        parts = []
        remaining = _MAX_BYTES
        while remaining and (part := os.read(descriptor, min(remaining, 65536))):
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


@record(slots=True)
class FoundPaths(Generic[T]):
    """Cache of found paths. They are searched again after FIND_AGAIN_S, or at each use while there are none.

    `is_valid` is called for each item before each use: after a driver was loaded again, the file of a temperature may
    be that of a current. The default is for items whose path alone identifies them.
    """

    find: Callable[[], list[T]]
    is_valid: Callable[[T], bool] = lambda _: True
    _items: list[T] = field(default_factory=list)
    _found_s: float = 0.0

    def items(self, now_s: float) -> list[T]:
        """Return the found items."""
        is_fresh = bool(self._items) and 0 <= now_s - self._found_s < FIND_AGAIN_S
        if not is_fresh or not all(self.is_valid(item) for item in self._items):
            self._items = self.find()
            self._found_s = now_s
        return self._items

    def forget(self) -> None:
        """Search again at the next use, because a found file has changed."""
        self._items = []


def source_of(path: str) -> str:
    """Return the name of a file as source of a value."""
    return f"sysfs:{path}"


def _reason(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path} is not there"
    if isinstance(error, PermissionError):
        return f"{path} may not be read by this user"
    if error.errno == errno.EAGAIN:
        return f"{path}: switched off for now (the kernel says to try again)"
    return f"{path}: {error.strerror or error}"
