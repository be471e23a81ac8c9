"""Busy line: shows what a command is working on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` on standard error until the block ends, and then wipe it out; nothing where that is no terminal."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    if is_shown:
        print(f"{what} ...", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print("\033[K", end="", file=sys.stderr, flush=True)
