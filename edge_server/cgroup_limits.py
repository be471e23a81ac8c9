"""Reader of the CPU and memory limits that a container or systemd sets for this process (control groups, cgroups(7),
versions 1 and 2).

Limits of ancestors count too. In a container the files of its own group are at the top. `root` is the root of the file
system that has proc and sys.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")

_UNLIMITED = 1 << 62
"""Version 1 has a number of about 2**63 where there is no limit."""


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, at least 1: those of its affinity or, if less, the limit of
    processor time in cores, rounded up."""
    return limited_cores(root) or _affinity_cores()


def limited_cores(root: Path = ROOT) -> int | None:
    """Return `usable_cores` where the limit of processor time decides them, or None. For libraries that choose their
    threads by the affinity."""
    limit = cpu_limit(root)
    return None if limit is None or limit >= _affinity_cores() else max(1, math.ceil(limit))


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return the limit of processor time in cores, or None."""
    limits = []
    for group in _groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if not period:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def available_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that the process can still use within its memory limit, or None without a limit.

    As in the kernel's MemAvailable, the page cache and reclaimable kernel memory count as available.
    """
    rooms = []
    for group in _groups(root, "memory"):
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if not limit:
            limit, used = _read(group / "memory.limit_in_bytes"), _read(group / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if line.count(" ") == 1)
            prefix = "total_" if "total_inactive_file" in stat else ""
            names = (f"{prefix}active_file", f"{prefix}inactive_file", "slab_reclaimable")
            cached = sum(int(stat.get(name, "0")) for name in names)
            rooms.append(max(0, int(limit) - max(0, int(used) - cached)))
    return min(rooms, default=None)


def _affinity_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of the process's group and those of its ancestors, for each version that is mounted."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _read(path: Path) -> str:
    """Return the file's text, "" if there is none."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
