"""`edge-server ros replay` of recordings that tests write, whose frame N was recorded N steps after the start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "edge-server"
START_NS, STEP_NS = 1_700_000_000_000_000_000, 33_000_000

NEEDS_LIBRARIES = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("rosbags", "mcap")),
        reason="needs rosbags and mcap: pip install '.[ros]' mcap",
    ),
]


def replayed(address: str, recording: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), "ros", "replay", str(recording), "--model=finder", f"--address={address}",
         f"--output={output}", *flags],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
