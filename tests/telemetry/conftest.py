"""Fixture that waits for the effect of another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], bool]:
    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.005)
        return condition()

    return wait
