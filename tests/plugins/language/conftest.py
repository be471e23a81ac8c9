"""Fixtures for language models: waiting, and the front end of tests/frontends."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("front_end", Path(__file__).parents[2] / "frontends" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_front_end = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _front_end
_spec.loader.exec_module(_front_end)
open_site, site = _front_end.open_site, _front_end.site


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
