"""Build lock: a file lock, so that only one process builds an engine.

The lock ends with the process that took it, however it ends, so there is none left over to be doubted. Its builder does
not inherit it: that one ends with it, or, where it has not begun yet, when it finds its parent gone. Whoever lets go of
the lock deletes the file; whoever locks a file that is no longer the one at its path tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType

log = logging.getLogger(__name__)

_NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_LONGEST_WORDS = 300


class BuildLock:
    """The right to build one engine; without a guarantee on file systems that have no locks."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others build. May be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        # Closing alone would leave it to a forked child that inherited the descriptor.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def __enter__(self) -> BuildLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(path: Path) -> BuildLock | None:
    """Return the right that the file at `path` stands for, None while another process, or another part of this one, has
    it. Returns at once. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return BuildLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("'%s' cannot be locked: another server may build the same engine: %s", path, error.strerror)
            return BuildLock(path, None)
        # Its holder let go of it, and deleted it, between our opening and our locking.
        os.close(descriptor)


def holder(path: Path) -> str:
    """Return the holder of the lock as text."""
    try:
        said = path.read_bytes()[:_LONGEST_WORDS].decode(errors="replace")
    except OSError:
        said = ""
    return said if said and said.isprintable() else "another process"


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
