"""On a real board: the bundled classifier loads, warms and answers. Skips, with the reason, everywhere else."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

MODEL_FILE = Path("/proc/device-tree/model")
ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    platform.machine() != "aarch64" or not MODEL_FILE.exists(),
    reason="needs an aarch64 board with a device tree (a Jetson)",
)


def test_every_bundled_model_loads_warms_and_answers_on_this_board() -> None:
    command = [sys.executable, "-m", "edge_server", "check", str(ROOT / "model_repository")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    board = MODEL_FILE.read_text(errors="replace").rstrip("\0")
    assert done.returncode == 0, f"{board}:\n{done.stdout}\n{done.stderr}"
    assert "efficientnet_lite0" in done.stdout
    assert "face_detection_yunet" in done.stdout
