from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def suites() -> Path:
    """The folder that fetch_suites.sh filled."""
    folder = os.environ.get("EDGE_TEST_SUITES")
    if not folder:
        pytest.skip("needs EDGE_TEST_SUITES, see tests/world/fetch_suites.sh")
    return Path(folder)
