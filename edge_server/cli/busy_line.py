"""Busy line: shows the current activity of a command on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_line(activity: str) -> Iterator[None]:
    """Show `activity` on standard error until the block ends, then erase it. Do nothing without a terminal."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    if is_shown:
        print(f"{activity} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print("\033[K", end="", file=sys.stderr, flush=True)
