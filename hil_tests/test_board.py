"""The machine can serve, and every bundled model loads, warms up and answers on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_the_doctor_reports_that_this_machine_can_serve(hardware: Any, box: dict[str, Any]) -> None:
    assert "problem" not in box
    assert [item for items in box["sections"].values() for item in items if item["level"] == "problem"] == []
    if hardware.kind == "jetson":
        assert box["sections"]["jetpack"][0]["text"].startswith("JetPack")


def test_every_bundled_model_loads_warms_up_and_answers_on_this_board(bundled: Path) -> None:
    pytest.importorskip("cv2", reason="the bundled models take pictures: needs opencv-python-headless")
    command = [sys.executable, "-m", "edge_server", "check", str(bundled)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for model in bundled.iterdir():
        if (model / "config.pbtxt").exists():
            assert model.name in done.stdout
