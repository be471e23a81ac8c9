"""The installed server, for tests of commands that write what it serves; and commands run in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli.main import main

COMMAND = Path(sys.executable).parent / "edge-server"


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """Return a function that starts the installed server in an environment and returns its HTTP address."""
    running: list[subprocess.Popen[str]] = []

    def start(repository: Path, *flags: str, environment: Mapping[str, str]) -> str:
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        command = [str(COMMAND), "serve", f"--model-repository={repository}", *ports, *flags]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert running[-1].stdout is not None
        for line in running[-1].stdout:
            ready = re.search(r"is ready: HTTP http://([^;\s]+)", line)
            if ready is not None:
                return ready[1]
        raise AssertionError("the server ended before it was ready")

    yield start
    for process in running:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture
def edge_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command in this process, where only words and exit codes matter."""
    for name in [name for name in os.environ if name.startswith("EDGE_SERVER_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            code: Any = main(arguments)
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run
