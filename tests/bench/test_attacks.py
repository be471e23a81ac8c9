"""The attacks of `attacks.py` and `beside_schemas.py`, with clients beside each: all their calls are answered. How long
they take is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent


def run(program: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / program), *words], capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_a_client_is_answered_during_some_attacks() -> None:
    run("attacks.py", "--seconds=1", "calls_of_200_connections_at_once", "header_lists_of_50_idle_connections")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(700)
def test_a_client_is_answered_during_every_attack() -> None:
    run("attacks.py", "--seconds=10")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(700)
def test_clients_are_answered_while_slow_schemas_compile() -> None:
    pytest.importorskip("openvino_genai", reason="needs openvino-genai, of the extra test-all")
    run("beside_schemas.py", str(BENCH.parent / "data/tiny_llm/tiny.gguf"), "5")
