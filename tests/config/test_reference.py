"""The generated reference, man pages and completions match the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_generated_files_match_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/reference"))
    for path, text in importlib.import_module("generate").generate().items():
        assert (ROOT / path).read_text() == text, f"{path}: run: python docs/reference/generate.py"
