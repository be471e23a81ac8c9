"""Installed servers, and `edge-server optimize`, on one engine cache: one builds, the others serve and pick it up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually
from tests.kit.server import serve

pytestmark = pytest.mark.full

MODEL = "add_sub"
ROW = [float(number) for number in range(16)]
BODY = {
    "inputs": [{"name": name, "datatype": "FP32", "shape": [1, 16], "data": ROW} for name in ("INPUT0", "INPUT1")],
    "outputs": [{"name": "OUTPUT0"}],
}


@pytest.fixture
def there(fake_gpu: Any, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with the fake GPU."""
    return dict(fake_gpu.environment(tmp_path / "engines"))


@pytest.fixture
def start(repository: Any, tmp_path: Path, there: dict[str, str]) -> Callable[..., Any]:
    """Return a function that starts a server on the cache that all share."""
    repository.add_sub(config="max_batch_size: 4")
    return lambda: serve(repository.path, f"--engine-cache-dir={tmp_path / 'engines'}", environment=there)


def engine(server: Any) -> dict[str, Any]:
    found = server.ask("/edge/v1/engines")[1]["engines"]
    return dict(found[0]) if found else {"state": "none", "phase": "", "reason": ""}


def backend(server: Any) -> str:
    return str(server.ask("/edge/v1/models")[1]["models"][0]["backend"])


def builders_of(server: Any) -> list[int]:
    return children_of(server.process.pid, "tensorrt.builds.build_process_main")


def stop_builder(server: Any) -> int:
    """Stop the server's builder in the middle of its build; return its process id."""
    stopped: list[int] = []

    def stop() -> bool:
        for pid in builders_of(server):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        return bool(stopped)

    assert eventually(stop, 60.0), server.log()
    return stopped[0]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ready_count(server: Any) -> int:
    """Return how many engines the server has built itself."""
    line = next(
        line
        for line in server.read_metrics().splitlines()
        if line.startswith('edge_engine_builds_total{outcome="ready"')
    )
    return int(float(line.rpartition(" ")[2]))


def assert_answers(server: Any) -> None:
    status, answer = server.infer(MODEL, BODY)
    assert (status, answer["outputs"][0]["data"]) == (200, [2 * number for number in ROW])


def test_if_the_building_server_is_killed_the_other_builds(start: Callable[..., Any], tmp_path: Path) -> None:
    with start() as first:
        builder = stop_builder(first)
        with start() as second:
            assert eventually(lambda: "builds it" in engine(second)["phase"], 60.0), engine(second)
            assert builders_of(second) == []
            first.process.kill()
            first.process.wait(30)
            assert eventually(lambda: backend(second) == "tensorrt_rtx", 60.0), second.log()
            assert ready_count(second) == 1
            assert_answers(second)
            # Where it stood still before it could bind its life to its server's, it finds that one gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(builder, signal.SIGCONT)
            assert eventually(lambda: not is_alive(builder), 60.0)
    assert list((tmp_path / "engines" / "work").iterdir()) == []


def test_optimize_waits_for_the_engine_that_a_server_builds(
    start: Callable[..., Any], repository: Any, there: dict[str, str], tmp_path: Path
) -> None:
    with start() as server:
        builder = stop_builder(server)
        cache, said = tmp_path / "engines", tmp_path / "said"
        command = [
            sys.executable, "-m", "edge_server", "optimize", str(repository.path / MODEL),
            "--runtimes=onnxruntime,tensorrt_rtx", "--precisions=fp32", f"--engine-cache-dir={cache}", "--json",
            "--runs=5", "--seconds=1", "--samples=2",
        ]  # fmt: skip
        with open(said, "w") as stderr:
            other = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **there}
            )
        try:
            words = f"waits: process {server.process.pid} on "
            assert eventually(lambda: words in said.read_text(), 60.0), said.read_text()
            os.kill(builder, signal.SIGCONT)
            out, _ = other.communicate(timeout=90)
        finally:
            other.kill()
            other.wait()
        assert other.returncode == 0, said.read_text()
        rows = {item["title"]: item for item in json.loads(out)["candidates"]}
        assert not rows["tensorrt_rtx fp32"]["reason"], rows
        assert eventually(lambda: backend(server) == "tensorrt_rtx", 60.0), server.log()
        assert ready_count(server) == 1
    assert len(list((cache / "engines").iterdir())) == 1
    assert list((cache / "work").iterdir()) == []
