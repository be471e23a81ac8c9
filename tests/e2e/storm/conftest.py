"""A repository for storms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.storm.storm import ModelWriter


@pytest.fixture
def writer(tmp_path: Path) -> ModelWriter:
    folders = tmp_path / "models", tmp_path / "staging"
    for folder in folders:
        folder.mkdir()
    return ModelWriter(*folders)
