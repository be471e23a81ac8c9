"""Is a file open for writing, by anybody? The kernel knows, and says so to whoever asks it for a read lease.

fcntl(2), "Leases": F_SETLEASE with F_RDLCK fails with EAGAIN while the file is open for writing. Only the file's owner
may ask, or a process with CAP_LEASE.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import stat
from dataclasses import dataclass

_CAP_LEASE = 28
"""Its number in linux/capability.h."""


def is_open_for_writing(path: str) -> bool | None:
    """Return whether somebody has a file open for writing, links followed. None: it cannot be told.

    It cannot for another user's file, and on file systems without leases (most network ones). The lease is given back
    at once; whoever opens the file for writing just then waits that long, some microseconds. Of events this causes an
    opening and a closing without a change, and none where it cannot be told beforehand.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or not (found.st_uid == os.geteuid() or _may_lease_all()):
            return None
        # Not to wait for whoever holds a lease himself.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # The lease of whoever is waited for is announced by SIGIO, which ends a process; SIGURG does nothing to it.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    finally:
        os.close(handle)
    return False


@functools.cache
def _may_lease_all() -> bool:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_LEASE & 1)
    return False


PATIENCE_S = 60.0
"""How long a file counts as being written without an event of it: the event of its closing may have been lost."""

_UNSURE_PATIENCE_S = 3.0
"""The same for a file that was never seen to be opened: that was made, and of which nobody can tell whether it is open;
or that changed, where a change may be one of its attributes."""


@dataclass(slots=True)
class _File:
    """`is_opened`: since it was last closed. `is_dirty`: changed, or made and opened, since then."""

    last_s: float
    is_new: bool = False
    is_opened: bool = False
    is_dirty: bool = False


class OpenWriters:
    """Told of each event with its time. Not thread-safe.

    A file is being written from when it was made and opened, or changed, until it is closed by a writer. An opened
    file alone says nothing, for most are opened to be read. Changes come without an opening when the watch on a new
    directory was set a moment too late to see it; then the file is told of as made, too, and whether it is still being
    written is not known (`unsure`). `tells_attributes`: changes are told apart from those of
    attributes, which follow the closing when a copying program sets the times of its copy.
    """

    def __init__(self, *, tells_attributes: bool) -> None:
        self._tells_attributes = tells_attributes
        self._files: dict[str, _File] = {}

    def made(self, path: str, now_s: float) -> None:
        self._files[path] = _File(now_s, is_new=True)

    def opened(self, path: str, now_s: float) -> None:
        file = self._touch(path, now_s)
        file.is_opened = True
        file.is_dirty |= file.is_new

    def changed(self, path: str, now_s: float) -> None:
        file = self._touch(path, now_s)
        file.is_dirty = True
        file.is_new = False

    def closed(self, path: str) -> None:
        """A writer closed it."""
        self._files.pop(path, None)

    def closed_by_reader(self, path: str) -> None:
        file = self._files.get(path)
        if file is not None and (file.is_new or not file.is_dirty):
            del self._files[path]

    def removed(self, path: str) -> None:
        """It, or the directory, is gone."""
        for known in [known for known in self._files if known == path or known.startswith(path + "/")]:
            del self._files[known]

    def moved(self, path: str, target: str) -> None:
        self.removed(target)
        for known in [known for known in self._files if known == path or known.startswith(path + "/")]:
            self._files[target + known.removeprefix(path)] = self._files.pop(known)

    def writing(self, now_s: float) -> frozenset[str]:
        """Return the paths of files that are being written, and forget those of which nothing was heard for long."""
        self._files = {path: file for path, file in self._files.items() if now_s - file.last_s < self._patience_s(file)}
        return frozenset(path for path, file in self._files.items() if file.is_dirty)

    def unsure(self, now_s: float) -> frozenset[str]:
        """Return the paths of files of which nothing was heard but that they were made, a short while ago: links, or
        files that somebody began to write before the watch on their directory was set."""
        return frozenset(
            path
            for path, file in self._files.items()
            if file.is_new and not file.is_opened and now_s - file.last_s < _UNSURE_PATIENCE_S
        )

    def _patience_s(self, file: _File) -> float:
        return PATIENCE_S if file.is_opened or self._tells_attributes else _UNSURE_PATIENCE_S

    def _touch(self, path: str, now_s: float) -> _File:
        file = self._files.setdefault(path, _File(now_s))
        file.last_s = now_s
        return file
