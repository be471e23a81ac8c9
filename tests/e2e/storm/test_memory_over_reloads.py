"""Memory stays flat over reloads. `memory_over_reloads.py` beside this file measures, and draws the curve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[3]
RELOADS = int(os.environ.get("EDGE_MEMORY_RELOADS", "150"))
GROWTH_LIMIT_MB = 8.0
"""Permitted growth in the second half. The model holds 0.26 MB of weights: one copy kept per reload adds 20 MB to half
of 150, and 130 MB to half of 1,000."""


@pytest.mark.timeout(60 + RELOADS)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_second_half_of_many_reloads_adds_no_memory(backend: str) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.e2e.storm.memory_over_reloads",
        f"--reloads={RELOADS}",
        f"--backends={backend}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert len(measured["curves"][backend]) == RELOADS // 10
    assert measured["growth_mb"][backend] < GROWTH_LIMIT_MB, measured["curves"]
