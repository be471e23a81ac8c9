"""A registry in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.remote.pull.registry import Registry, run_registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    with run_registry() as made:
        yield made
