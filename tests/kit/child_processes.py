"""Child processes of a process."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(pid: int, having: str = "") -> list[int]:
    """Return the ids of the processes that the threads of a process have started, and that have not ended: those whose
    command line has a text in it.

    >>> assert children_of(os.getpid()) == []
    """
    started: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            started += map(int, file.read_text().split())
    found = []
    for child in sorted(started):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if having in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found
