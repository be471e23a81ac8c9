"""Engines built in the open by the installed server: TensorRT for RTX is real, the GPU behind its last call is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually
from tests.kit.models import BUNDLED, COFFEE
from tests.kit.server import serve

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

MODEL = "efficientnet_lite0"

BUILD_S = 240.0
"""A build has the lowest priority: on a busy machine it waits for all others."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with the bundled classifier."""
    shutil.copytree(BUNDLED / MODEL, tmp_path / "models" / MODEL)
    return tmp_path / "models"


@pytest.fixture
def start(fake_gpu: Any, models: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts the server with the fake GPU; its engines are kept across starts."""

    def begin(*flags: str, **environment: str) -> Any:
        cache = tmp_path / "engines"
        there = fake_gpu.environment(cache, **environment)
        return serve(models, f"--engine-cache-dir={cache}", *flags, environment=there)

    return begin


def engine(server: Any) -> dict[str, Any]:
    status, answer = server.ask("/edge/v1/engines")
    assert status == 200
    return dict(answer["engines"][0]) if answer["engines"] else {"state": "none", "reason": ""}


def backend(server: Any) -> str:
    return str(server.ask("/edge/v1/models")[1]["models"][0]["backend"])


def events(server: Any) -> list[dict[str, Any]]:
    connection = server.connection()
    connection.request("GET", "/edge/v1/events", headers={"Last-Event-ID": "0"})
    reply = connection.getresponse()
    found: list[dict[str, Any]] = []
    kind = ""
    # The history comes at once; the last event asked for here has happened already.
    for raw in reply:
        line = raw.decode().strip()
        if line.startswith("event:"):
            kind = line[6:].strip()
        elif line.startswith("data:"):
            found.append({"kind": kind, **json.loads(line[5:])})
            if kind == "model.unloaded":
                break
    connection.close()
    return found


class Asking:
    """A client that shows the photograph over and over, and keeps what it is answered."""

    def __init__(self, server: Any, photo: bytes) -> None:
        self._server, self._photo = server, photo
        self.answers: list[tuple[int, str]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        path = f"/v2/models/{MODEL}/infer"
        while not self._end.is_set():
            status, body = self._server.request("POST", path, self._photo, {"Content-Type": "image/jpeg"})
            self.answers.append((status, body.decode()))

    def stop(self) -> None:
        self._end.set()
        self._thread.join(60)


@pytest.fixture
def asking() -> Iterator[Callable[[Any], Asking]]:
    begun: list[Asking] = []

    def begin(server: Any) -> Asking:
        begun.append(Asking(server, COFFEE.read_bytes()))
        return begun[-1]

    yield begin
    for one in begun:
        one.stop()


def test_a_model_serves_at_once_and_switches_to_its_engine_without_losing_requests(
    start: Callable[..., Any], asking: Callable[[Any], Asking]
) -> None:
    with start() as server:
        assert backend(server) == "onnxruntime"
        client = asking(server)
        assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), (engine(server), server.log())
        seen = len(client.answers)
        assert eventually(lambda: len(client.answers) > seen + 2)
        client.stop()
        assert {status for status, _ in client.answers} == {200}
        assert all("espresso" in body for _, body in client.answers)
        told = engine(server)
        assert (told["state"], told["percent"], told["attempt_count"]) == ("ready", 100.0, 0)
        # Here both compute by the same library.
        assert 0 <= told["difference"] < told["tolerance"]
        assert "its answers differ by 0 from those of onnxruntime" in server.log()
        assert eventually(lambda: "model.unloaded" in [event["kind"] for event in events(server)])
        happened = events(server)
        kinds = [event["kind"] for event in happened]
        assert kinds.index("engine.build_started") < kinds.index("engine.build_progress") < kinds.index("engine.ready")
        assert kinds[kinds.index("engine.ready") :].count("model.ready") == 1
        page = server.read_metrics()
        assert f'edge_engine_build_state{{model="{MODEL}",version="1",state="ready"}} 1' in page
        assert 'edge_engine_builds_total{outcome="ready"} 1' in page
        assert server.stop() == 0
    with start() as server:
        assert backend(server) == "tensorrt_rtx"
        assert 'edge_engine_cache_lookups_total{result="hit"} 1' in server.read_metrics()
        assert engine(server)["state"] == "ready"


def test_an_engine_of_another_machine_is_rebuilt_and_the_reason_is_reported(start: Callable[..., Any]) -> None:
    with start() as server:
        assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), server.log()
    with start(FAKE_CUDA_NAME="Another GPU") as server:
        assert backend(server) == "onnxruntime"
        assert eventually(lambda: "it was built for another GPU" in server.log())
        assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), server.log()


def test_a_build_is_cancelled_and_requested_again(start: Callable[..., Any]) -> None:
    with start() as server:
        assert eventually(lambda: engine(server)["state"] == "building")
        assert server.request("DELETE", f"/edge/v1/engines/{MODEL}")[0] == 200
        assert eventually(lambda: engine(server)["state"] == "cancelled")
        assert engine(server)["reason"] == "an operator took it back"
        assert children_of(server.process.pid) == []
        assert backend(server) == "onnxruntime"
        assert server.request("DELETE", "/edge/v1/engines/nobody")[0] == 404
        status, body = server.request("POST", f"/edge/v1/engines/{MODEL}")
        assert (status, json.loads(body)) == (200, {"model": MODEL, "ordered": 1})
        assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), server.log()


def test_a_builder_that_crashes_costs_one_attempt_only(
    start: Callable[..., Any], asking: Callable[[Any], Asking]
) -> None:
    with start() as server:
        client = asking(server)
        assert eventually(lambda: engine(server)["state"] == "building" and children_of(server.process.pid))
        for pid in children_of(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: engine(server)["state"] == "failed")
        told = engine(server)
        assert "was ended by SIGKILL" in told["reason"]
        assert 0 < told["retry_s"] - time.time() < 60
        client.stop()
        assert {status for status, _ in client.answers} == {200}


@pytest.mark.parametrize(
    ("fault", "message"), [("wrong", "the engine is not used: output"), ("crash", "ended by SIGKILL")]
)
def test_an_engine_with_wrong_outputs_or_crashes_never_serves(
    fault: str, message: str, start: Callable[..., Any]
) -> None:
    with start(FAKE_ENGINE_FAULT=fault) as server:
        assert eventually(lambda: engine(server)["state"] == "failed", BUILD_S)
        assert message in engine(server)["reason"]
        assert backend(server) == "onnxruntime"
        assert server.get("/v2/health/ready")[0] == 200


def test_no_engine_is_built_while_the_machine_is_hot(
    start: Callable[..., Any], make_board: Callable[[str], Any]
) -> None:
    board = make_board("orin_nano_jp6")
    board.set_temperature("tj-thermal", 98.5)
    with start(f"--sysfs-root={board.root}", "--governor-interval-ms=200", "--governor-load-wait-secs=0") as server:
        assert eventually(lambda: "HOT" in server.ask("/edge/v1/engines")[1]["detail"]), server.ask("/edge/v1/engines")
        assert engine(server)["state"] == "waiting"
        board.set_temperature("tj-thermal", 50.0)
        assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), (engine(server), server.log())


def test_a_driver_too_old_for_tensorrt_costs_the_engine_alone_and_is_not_tried_again(
    fake_gpu: Any, models: Path, tmp_path: Path
) -> None:
    """Nothing of TensorRT for RTX is replaced here: it meets the driver of a box with CUDA 12.2."""
    old = {"LD_LIBRARY_PATH": str(Path(fake_gpu.library).parent), "FAKE_CUDA_VERSION": "12020"}
    with serve(models, f"--engine-cache-dir={tmp_path / 'engines'}", environment=old) as server:
        assert eventually(lambda: engine(server)["state"] == "failed", BUILD_S)
        found = engine(server)
        assert "the driver is older than the CUDA of the library" in found["reason"]
        assert "cudaError 35" in found["reason"]
        assert (found["attempt_count"], found["retry_s"]) == (1, None)
        assert backend(server) == "onnxruntime"


def test_without_a_gpu_nothing_changes(models: Path) -> None:
    with serve(models) as server:
        status, answer = server.ask("/edge/v1/engines")
        assert (status, answer["enabled"], answer["engines"]) == (200, False, [])
        assert backend(server) == "onnxruntime"
        assert "was skipped" not in server.log()
        assert server.request("DELETE", f"/edge/v1/engines/{MODEL}")[0] == 501
