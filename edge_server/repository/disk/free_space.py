"""Check of a disk before a download: what does not fit is refused before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from edge_server.errors import EdgeServerError

RESERVE_BYTES = 32 << 20
"""Disk space that a download leaves free, as other programs need the disk too."""


class DiskFull(EdgeServerError):
    """The disk is too small for the download."""


def check_space(folder: Path, size: int, what: str) -> None:
    """Raise DiskFull if `size` bytes do not fit on the disk of `folder`. `what` begins the message."""
    free = shutil.disk_usage(folder).free
    if size + RESERVE_BYTES > free:
        raise DiskFull(
            f"{what} does not fit on the disk: it needs {size} bytes and {RESERVE_BYTES} are kept free; {free} are "
            f"free in '{folder.parent}'"
        )
