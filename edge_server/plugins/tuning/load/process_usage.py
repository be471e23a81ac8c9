"""Reader of CPU time and memory of a process and its children from /proc, and search for a process by its listening
port."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOCAL = ("localhost", "127.", "::1", "[::1]")


@dataclass(frozen=True, slots=True)
class Usage:
    """`cpu_s` is the CPU time since the process started, including its running and ended children."""

    cpu_s: float
    resident_bytes: float


def is_local(host: str) -> bool:
    return host.startswith(_LOCAL)


def listener_of(port: int) -> int | None:
    """Return the id of this user's process that listens on a TCP port, or None."""
    inodes = set(_listening(port))
    if not inodes:
        return None
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                for link in (folder / "fd").iterdir():
                    # A descriptor may be closed meanwhile; continue with the others.
                    with contextlib.suppress(OSError):
                        if os.readlink(link) in inodes:
                            return int(folder.name)
    return None


def _listening(port: int) -> Iterator[str]:
    """Yield the sockets that listen on the port, in the notation of /proc/*/fd."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def usage_of(pid: int) -> Usage | None:
    """Return the usage of a process and its children; None if the process has ended."""
    usages = [found for found in map(_usage_of_one, _process_tree(pid)) if found is not None]
    if not usages:
        return None
    return Usage(sum(item.cpu_s for item in usages), sum(item.resident_bytes for item in usages))


def _process_tree(pid: int) -> Iterator[int]:
    pending, seen = [pid], set()
    while pending:
        process = pending.pop()
        if process in seen:
            continue
        seen.add(process)
        yield process
        with contextlib.suppress(OSError, ValueError):
            for task in (_PROC / str(process) / "task").iterdir():
                pending.extend(int(child) for child in (task / "children").read_text().split())


def _usage_of_one(pid: int) -> Usage | None:
    try:
        # The process name is in brackets and may itself contain spaces and brackets.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        pages = (_PROC / str(pid) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    # utime and stime, plus cutime and cstime: the times of ended children that the process has waited for.
    return Usage(sum(map(int, fields[11:15])) / _TICKS, int(pages) * _PAGE)
