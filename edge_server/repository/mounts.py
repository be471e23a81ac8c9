"""Which file system a path is on, and whether the kernel can tell of all that changes there."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")

_REMOTE = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
    }
)  # fmt: skip
"""Somebody else may write there, unseen by this kernel, and what it says of sizes and times may be seconds old."""

_LAYERED = frozenset({"aufs", "overlay", "overlayfs", "unionfs"})
"""Files may change in a layer below, which says nothing to watches on the layer above."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


def read_mounts() -> str:
    """Return the kernel's list of mounts, "" where there is none."""
    try:
        return MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system(path: str, mounts: str) -> str:
    """Return the type of the file system that an absolute path without links is on, "" when it cannot be told.

    `mounts` is in the form of /proc/self/mountinfo, proc(5). Of several mounts on one point the last one counts.
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind


def is_remote(kind: str) -> bool:
    """Return whether a file system of this type may be written to from elsewhere. A disk behind fuseblk may not."""
    return kind in _REMOTE or kind == "fuse" or kind.startswith("fuse.")


def is_layered(kind: str) -> bool:
    return kind in _LAYERED


def root_file_system(root: Path, mounts: str) -> str:
    """Return the type of the file system that a folder is on, links followed."""
    return file_system(os.path.realpath(root), mounts)
