"""Repositories for servers in the test's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.models import Repository


@pytest.fixture(scope="module")
def module_repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("models"))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "models")
