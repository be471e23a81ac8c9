"""The cases of the package `onnx`, of single nodes and of models from PyTorch, served without a configuration: each has
the expected values, where the bare ONNX Runtime has them.

By OpenVINO, which such files went to before, 36 were wrong, 5 ended the process and 206 were refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx")

EXCEPTIONS = {
    "test_constant": "a model without an input is not served",
}


def run(folder: Path, step: int) -> dict[str, tuple[str, str]]:
    """Return outcome and detail of each `step`-th case, in a process of its own: a runtime may end it."""
    command = [sys.executable, str(Path(__file__).with_name("onnx_node_cases.py")), str(folder), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr)
    return {line["name"]: (line["outcome"], line["detail"]) for line in lines if "name" in line}


def check(found: dict[str, tuple[str, str]]) -> int:
    """Return how many cases are right. Fails for one that is not, and should be."""
    bad = {name: told for name, told in found.items() if told[0] in ("wrong", "refused") and name not in EXCEPTIONS}
    assert not bad
    return sum(outcome == "right" for outcome, _ in found.values())


@pytest.mark.full
def test_each_tenth_node_and_each_model_is_right(tmp_path: Path) -> None:
    assert check(run(tmp_path, 10)) >= 240


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_each_case_is_right(tmp_path: Path) -> None:
    found = run(tmp_path, 1)
    assert check(found) >= 1590
    assert {name for name, told in found.items() if told[0] == "refused"} == set(EXCEPTIONS)
