"""Replacement of a file in one step: readers, and a server after a loss of power, find the old content or the new."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path


def replace_file(path: Path, data: bytes | memoryview, *, is_durable: bool = True) -> None:
    """Write `data` to `path`, which may exist, with the permissions of a new file. Thread-safe.

    `is_durable` False is for a cache: the content may be lost, or be empty, after a loss of power. Raises OSError; then
    `path` has its old content, or the new one if only its folder could not be flushed. What a killed process leaves is
    `.NAME.*.part`, which a watching server ignores.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder survive a loss of power, on file systems that support it. Raises OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Not supported, or a folder in which the user may write but not read.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise
