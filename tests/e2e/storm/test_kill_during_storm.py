"""kill -9 while a model is loaded by a request or drains, then a start on the same ports: the desired state is served,
and no file is left over. `test_kill_under_load` kills during a storm of files."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.storm.storm import generation_of
from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

pytestmark = pytest.mark.soak

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2")


@pytest.fixture
def temp_folder(tmp_path: Path) -> Path:
    """The servers' TMPDIR."""
    path = tmp_path / "tmp"
    path.mkdir()
    return path


@pytest.fixture
def serve_here(free_ports: Callable[[int], list[int]], temp_folder: Path) -> Callable[..., Any]:
    """Starts a server on fixed ports: a restart fails if one is in use."""
    flags = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    return lambda path, *more: serve(path, *flags, *more, environment={"TMPDIR": str(temp_folder)})


def kill(server: Any, after_s: float = 0.0) -> None:
    time.sleep(after_s)
    server.process.kill()
    assert server.process.wait(30) == -signal.SIGKILL


def states(server: Any) -> dict[str, str]:
    """Return the state of each version of the only model."""
    return {row["version"]: row["state"] for row in server.ask("/v2/repository/index", {})[1]}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("seconds", [0.0, 0.02, 1.0])
def test_after_a_kill_during_an_override_load_the_files_on_disk_are_served(
    serve_here: Any, writer: Any, temp_folder: Path, seconds: float
) -> None:
    writer.add_model("model", 'backend: "onnxruntime"', (1,))
    on_disk = writer.contents["model"][1]
    generation, content = writer.next_content("model", 1)
    sent = {"config": '{"backend":"onnxruntime"}', "file:1/model.onnx": base64.b64encode(content).decode()}
    load = ("/v2/repository/models/model/load", {"parameters": sent})
    explicit = ("--model-control-mode=explicit", "--load-model=model")
    with serve_here(writer.path, *explicit) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, *load)
        kill(server, seconds)
        assert asked.exception(30) is not None or asked.result()[0] == 200
    with serve_here(writer.path, *explicit) as server:
        assert generation_of(server, "model") == on_disk
        assert left_in(temp_folder) == []
        assert server.ask(*load)[0] == 200
        assert generation_of(server, "model") == generation
        written = left_in(temp_folder)
        assert len(written) == 1
        with serve(writer.path, *explicit, environment={"TMPDIR": str(temp_folder)}):
            assert left_in(temp_folder) == written, "a server that starts took the files of one that lives"
        assert server.stop() == 0
    assert left_in(temp_folder) == []


@pytest.mark.parametrize("drains", ["the server", "a version"])
def test_after_a_kill_during_a_drain_a_restart_serves_on_the_same_ports(
    serve_here: Any, repository: Any, drains: str
) -> None:
    repository.add("model", identity_config(more=parameters(execute_delay_ms="60000")))
    with serve_here(repository.path, *POLL) as server, ThreadPoolExecutor(2) as pool:
        # One request runs and another waits; both lose their server.
        asked = [pool.submit(server.infer, "model", identity_body()) for _ in range(2)]
        assert eventually(lambda: server.read_counters("model")["nv_inference_pending_request_count"] == 1)
        if drains == "the server":
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: "draining 2 request(s)" in server.log())
        repository.add("model", identity_config(), version=2)
        if drains == "a version":
            assert eventually(lambda: states(server) == {"1": "UNLOADING", "2": "READY"})
        kill(server)
        assert all(isinstance(one.exception(30), OSError) for one in asked)
    with serve_here(repository.path, *POLL) as server:
        status, answer = server.infer("model", identity_body())
        assert (status, answer["model_version"]) == (200, "2")
        assert states(server) == {"2": "READY"}
        assert server.stop() == 0
