"""Stamp of a file: tells without reading it whether it is the file that was read before."""

from __future__ import annotations

import os

FileStamp = tuple[int, int, int, int, int]


def file_stamp(found: os.stat_result) -> FileStamp:
    """Return device, inode, size, modification time and change time (ctime).

    Size and modification time are not enough: tools that make equal builds give all files one time, and any program can
    set it. The change time cannot be set. It also changes with the mode, the owner and the number of links.
    """
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
