"""The length of the request path: how many functions of the package a warm request calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "files_visited.py"
MAX_CALLS = {"grpc": 53, "http": 38}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), "--json", "grpc", "http"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("wire", MAX_CALLS)
def test_a_warm_request_calls_few_functions(found: dict[str, dict[str, Any]], wire: str) -> None:
    files = found[wire]["files"]
    calls = sum(files.values())
    lines = [f"{count:5} {file}" for file, count in files.items()]
    assert calls <= MAX_CALLS[wire], "\n".join([f"{calls} calls in {len(files)} files:", *lines])
