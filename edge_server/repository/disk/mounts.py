"""Reader of the kernel's list of mounts: the file system of a path, and whether inotify reports all changes on it."""

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
"""Other machines may write there without an inotify event, and sizes and times may be seconds old."""

_LAYERED = frozenset({"aufs", "overlay", "overlayfs", "unionfs"})
"""Files may change in a lower layer, without an inotify event on the upper one."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


def read_mounts() -> str:
    """Return the kernel's list of mounts, "" if it cannot be read."""
    try:
        return MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system(path: str, mounts: str) -> str:
    """Return the file system type of an absolute path without links, "" if it is unknown.

    `mounts` is in the form of /proc/self/mountinfo, proc(5). Of several mounts on one point, the last one is in effect.
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
    """Return whether other machines may write to a file system of this type. A local disk behind fuseblk is not
    remote."""
    return kind in _REMOTE or kind == "fuse" or kind.startswith("fuse.")


def is_layered(kind: str) -> bool:
    return kind in _LAYERED


def root_file_system(root: Path, mounts: str) -> str:
    """Return the file system type of a folder, links followed."""
    return file_system(os.path.realpath(root), mounts)
