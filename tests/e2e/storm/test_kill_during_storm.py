"""kill -9 at any time, then a start on the same ports: the desired state is served, and no file is left over."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("EDGE_STORM_KILLS", "4"))
SEED = int(os.environ.get("EDGE_STORM_SEED", "1"))
POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.2")


@pytest.fixture
def flags(free_ports: Callable[[int], list[int]]) -> list[str]:
    """Fixed ports: a restart fails if one is in use."""
    return [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]


@pytest.fixture
def temp_folder(tmp_path: Path) -> Path:
    """The servers' TMPDIR."""
    path = tmp_path / "tmp"
    path.mkdir()
    return path


@pytest.fixture
def serve_here(flags: list[str], temp_folder: Path) -> Callable[..., Any]:
    return lambda path, *more: serve(path, *flags, *more, environment={"TMPDIR": str(temp_folder)})


def kill(server: Any) -> None:
    server.process.kill()
    assert server.process.wait(30) == -signal.SIGKILL


@contextlib.contextmanager
def killed_within(server: Any, seconds: float) -> Iterator[None]:
    """Kill the server that long after now, whatever the body does meanwhile."""
    timer = threading.Timer(seconds, server.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        kill(server)


def state_of(server: Any, model: str) -> str:
    """Return the state of version 1; "" when the index does not name it."""
    rows = server.ask("/v2/repository/index", {})[1]
    return next((row["state"] for row in rows if row["name"] == model and row.get("version") == "1"), "")


def body() -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}]}


@pytest.mark.timeout(120 + 60 * KILLS)
def test_after_a_kill_during_a_storm_a_restart_serves_the_desired_state(
    serve_here: Any, writer: Any, new_storm: Any, new_load: Any, agree: Any
) -> None:
    print(f"EDGE_STORM_SEED={SEED} EDGE_STORM_KILLS={KILLS}")
    storm = new_storm(SEED)
    for round_number in range(KILLS):
        with serve_here(writer.path, *POLL) as server:
            agree(server, writer)
            with new_load(server, SEED + round_number) as load, killed_within(server, storm.chance.uniform(0.1, 3)):
                while server.process.poll() is None:
                    storm.step()
                    time.sleep(storm.chance.uniform(0, 0.1))
            assert load.answers
        # The world does not wait for the server to come back.
        for _ in range(3):
            storm.step()
        storm.settle_configurations()
    with serve_here(writer.path, *POLL) as server:
        agree(server, writer)
        server.stop_cleanly()


def test_after_a_kill_while_a_model_loads_a_restart_loads_it(serve_here: Any, repository: Any) -> None:
    slow = parameters(creation_delay_sec="2")
    with serve_here(repository.path, *POLL) as server:
        repository.add("slow", identity_config(more=slow))
        assert eventually(lambda: state_of(server, "slow") == "LOADING")
        kill(server)
    with serve_here(repository.path, *POLL) as server:
        assert server.infer("slow", body())[0] == 200
        assert server.stop() == 0


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.0, 3.0])
def test_after_a_kill_during_the_load_of_a_changed_model_a_restart_serves_the_change(
    serve_here: Any, repository: Any, seconds: float
) -> None:
    repository.add("changing", identity_config(batch=2))
    slow = parameters(creation_delay_sec="1")
    with serve_here(repository.path, *POLL) as server, killed_within(server, seconds):
        repository.add("changing", identity_config(batch=3, more=slow))
    with serve_here(repository.path, *POLL) as server:
        assert server.ask("/v2/models/changing/config")[1]["max_batch_size"] == 3
        assert server.infer("changing", body())[0] == 200
        assert server.stop() == 0


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 1.0])
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
        with killed_within(server, seconds):
            asked = pool.submit(server.ask, *load)
        assert asked.exception(30) is not None or asked.result()[0] == 200
    with serve_here(writer.path, *explicit) as server:
        assert answer_of(server) == on_disk
        assert left_in(temp_folder) == []
        assert server.ask(*load)[0] == 200
        assert answer_of(server) == generation
        written = left_in(temp_folder)
        assert len(written) == 1
        with serve(writer.path, *explicit, environment={"TMPDIR": str(temp_folder)}):
            assert left_in(temp_folder) == written, "a server that starts took the files of one that lives"
        assert server.stop() == 0
    assert left_in(temp_folder) == []


def answer_of(server: Any) -> int:
    """Return which generation of `model` answers."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}
    status, answer = server.infer("model", {"inputs": [tensor]})
    assert status == 200, answer
    return int(answer["outputs"][0]["data"][0]) % 100_000


@contextlib.contextmanager
def busy(server: Any, model: str) -> Iterator[list[Future[Any]]]:
    """Have one request run and another wait; after the body both must have lost their server."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.infer, model, body()) for _ in range(2)]
        assert eventually(lambda: server.read_counters(model)["nv_inference_pending_request_count"] == 1)
        try:
            yield asked
        finally:
            server.process.kill()
        assert all(isinstance(one.exception(30), OSError) for one in asked)


def test_after_a_kill_during_the_drain_a_restart_serves_on_the_same_ports(serve_here: Any, repository: Any) -> None:
    repository.add("slow", identity_config(more=parameters(execute_delay_ms="60000")))
    repository.add("quick", identity_config())
    with serve_here(repository.path) as server, busy(server, "slow"):
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: "draining 2 request(s)" in server.log())
        kill(server)
    with serve_here(repository.path) as server:
        assert server.infer("quick", body())[0] == 200
        assert server.get("/v2/models/slow/ready")[0] == 200
        assert server.stop() == 0


def test_after_a_kill_while_a_version_drains_a_restart_serves_only_its_successor(
    serve_here: Any, repository: Any
) -> None:
    slow = parameters(execute_delay_ms="60000")
    repository.add("model", identity_config(more=slow))
    with serve_here(repository.path, *POLL) as server, busy(server, "model"):
        repository.add("model", identity_config(), version=2)
        assert eventually(lambda: state_of(server, "model") == "UNLOADING")
        assert server.infer("model", body())[1]["model_version"] == "2"
        kill(server)
    with serve_here(repository.path, *POLL) as server:
        status, answer = server.infer("model", body())
        assert (status, answer["model_version"]) == (200, "2")
        rows = {row["version"]: row["state"] for row in server.ask("/v2/repository/index", {})[1]}
        assert rows == {"2": "READY"}
        assert server.stop() == 0
