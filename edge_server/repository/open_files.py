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
