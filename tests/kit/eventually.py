"""Waiting for what no event tells of."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Ask again and again until the condition holds; False when it does not within the time, which only a failing
    test waits for.

    >>> assert eventually(path.exists)
    """
    end_s, pause_s = time.monotonic() + timeout_s, 0.001
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(pause_s)
        # Short at first, for what takes no time; each question to a server costs its processor time.
        pause_s = min(1.5 * pause_s, 0.02)
    return True
