"""The machine can serve, and every bundled model loads, warms up and answers on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def edge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_the_doctor_reports_that_this_machine_can_serve(hardware: Any) -> None:
    done = edge("doctor", "--json")
    found = json.loads(done.stdout)
    problems = [item for items in found["sections"].values() for item in items if item["level"] == "problem"]
    assert (done.returncode, problems) == (0, [])
    if hardware.kind == "jetson":
        assert found["sections"]["jetpack"][0]["text"].startswith("JetPack")


def test_every_bundled_model_loads_warms_up_and_answers_on_this_board(bundled: Path) -> None:
    done = edge("check", str(bundled))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for model in bundled.iterdir():
        if (model / "config.pbtxt").exists():
            assert model.name in done.stdout
