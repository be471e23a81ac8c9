"""The generated reference in docs/reference says what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", ["commands.md", "configuration.md"])
def test_the_reference_is_that_of_the_code(name: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (FOLDER / name).read_text() == module.generate()[name], "run: python docs/reference/generate.py"
