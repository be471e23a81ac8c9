"""Detection of files that some process still writes, so that a half-copied model is not loaded: by a query to the
kernel, and by inotify events.

The query is a read lease. fcntl(2), "Leases": F_SETLEASE with F_RDLCK fails with EAGAIN while the file is
open for writing. Only the file's owner, or a process with CAP_LEASE, may take one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import stat

from edge_server.record import record

_CAP_LEASE = 28
"""Its number in linux/capability.h."""


def is_open_for_writing(path: str) -> bool | None:
    """Return whether any process has a file open for writing, links followed. None: unknown.

    It is unknown for files of other users and on file systems without leases (most network ones). The lease is released
    at once. A process that opens the file for writing at that moment waits a few microseconds. The check itself causes
    inotify events: opened, and closed without a change.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or not (found.st_uid == os.geteuid() or _may_lease_all()):
            return None
        # O_NONBLOCK: do not wait for another lease holder.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # The kernel signals a waiting opener by SIGIO, which ends a process by default. SIGURG is ignored by default.
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


EVENT_TIMEOUT_S = 60.0
"""Time without a new event after which a file no longer counts as being written: its closing event may be lost."""

_UNCERTAIN_TIMEOUT_S = 3.0
"""The same for a file without an opening event: it may be a link, or only its attributes have changed."""


@record(slots=True)
class _File:
    """State of one file since it was last closed. `is_dirty`: changed, or created and opened."""

    last_s: float
    is_new: bool = False
    is_opened: bool = False
    is_dirty: bool = False


class OpenWriters:
    """Files that are open for writing, from the stream of inotify events. No I/O and no clock. Not thread-safe.

    A file is being written from its creation and opening, or its first change, until a writer closes it. An opening
    alone has no meaning, because most files are opened to be read. If the watch on a new directory was set too late,
    events are missing; then it is unknown whether the file is still being written (`uncertain_files`).
    `reports_attributes`: the observer separates changes of content from changes of attributes. A copying program sets
    the times of its copy after closing it.
    """

    def __init__(self, *, reports_attributes: bool) -> None:
        self._reports_attributes = reports_attributes
        self._files: dict[str, _File] = {}

    def on_created(self, path: str, now_s: float) -> None:
        self._files[path] = _File(now_s, is_new=True)

    def on_opened(self, path: str, now_s: float) -> None:
        file = self._note_event(path, now_s)
        file.is_opened = True
        file.is_dirty |= file.is_new

    def on_modified(self, path: str, now_s: float) -> None:
        file = self._note_event(path, now_s)
        file.is_dirty = True
        file.is_new = False

    def on_closed(self, path: str) -> None:
        """Handle the closing by a writer."""
        self._files.pop(path, None)

    def on_closed_by_reader(self, path: str) -> None:
        file = self._files.get(path)
        if file is not None and (file.is_new or not file.is_dirty):
            del self._files[path]

    def on_removed(self, path: str) -> None:
        """Handle the removal of a file or directory."""
        for known in [known for known in self._files if known == path or known.startswith(path + "/")]:
            del self._files[known]

    def on_moved(self, path: str, target: str) -> None:
        self.on_removed(target)
        for known in [known for known in self._files if known == path or known.startswith(path + "/")]:
            self._files[target + known.removeprefix(path)] = self._files.pop(known)

    def written_files(self, now_s: float) -> frozenset[str]:
        """Return the paths of files that are being written. Forget files without a recent event."""
        self._files = {path: file for path, file in self._files.items() if now_s - file.last_s < self._timeout_s(file)}
        return frozenset(path for path, file in self._files.items() if file.is_dirty)

    def uncertain_files(self, now_s: float) -> frozenset[str]:
        """Return the paths of recently created files without any other event.

        They are links, or files that were opened before the watch on their directory was set.
        """
        return frozenset(
            path
            for path, file in self._files.items()
            if file.is_new and not file.is_opened and now_s - file.last_s < _UNCERTAIN_TIMEOUT_S
        )

    def _timeout_s(self, file: _File) -> float:
        return EVENT_TIMEOUT_S if file.is_opened or self._reports_attributes else _UNCERTAIN_TIMEOUT_S

    def _note_event(self, path: str, now_s: float) -> _File:
        file = self._files.setdefault(path, _File(now_s))
        file.last_s = now_s
        return file
