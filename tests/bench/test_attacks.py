"""The attacks of `attacks.py`, with a client beside each: all its calls are answered. How long they take is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "attacks.py"


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_a_client_beside_some_attacks_is_answered() -> None:
    run("--seconds=1", "calls_of_200_connections_at_once", "header_lists_of_50_idle_connections")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(700)
def test_a_client_beside_every_attack_is_answered() -> None:
    run("--seconds=10")
