"""The attacks of `attacks.py`, with clients beside each: all their calls are answered. How long they take is
printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "attacks.py"


def run(*words: str) -> None:
    command = [sys.executable, str(PROGRAM), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_a_client_is_answered_during_some_attacks() -> None:
    run("--seconds=1", "calls_of_200_connections_at_once", "header_lists_of_50_idle_connections")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(700)
def test_a_client_is_answered_during_every_attack() -> None:
    run("--seconds=10")
