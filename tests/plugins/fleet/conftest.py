"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE_S = 20.0


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Wait until a condition holds; only a failing test waits to the end."""

    def wait(condition: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + PATIENCE_S
        while not condition() and time.monotonic() < end_s:
            time.sleep(0.002)
        return condition()

    return wait
