"""Temporary folder of a process, which the next server deletes if this one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked_folder(purpose: str) -> Iterator[Path]:
    """Make a temporary folder that only this user may open; `purpose` is a part of its name.

    A process that is killed leaves it without its lock, and the next server that starts deletes it: it does so with all
    whose names begin so, see `repository/disk/load_call_files.py`.
    """
    while True:
        with tempfile.TemporaryDirectory(prefix=f"edge_server-model-{purpose}-", ignore_cleanup_errors=True) as name:
            try:
                lock = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # a starting server has deleted it before the lock
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.isdir(name):
                    yield Path(name)
                    return
            finally:
                os.close(lock)
