"""The shape of the request path: how many files of the package a warm request visits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "files_visited.py"
MOST = 12


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), "--json", "grpc", "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_a_warm_request_visits_few_files(found: dict[str, dict[str, Any]], wire: str) -> None:
    files = found[wire]["files"]
    lines = [f"{count:5} {file}" for file, count in files.items()]
    assert len(files) <= MOST, "\n".join([f"{len(files)} files, with the Python calls in each:", *lines])
