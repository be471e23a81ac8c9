"""Fixture for backends: waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], bool]:
    def wait(condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 20
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    return wait
