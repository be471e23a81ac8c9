"""Engines built in the open by the installed server: TensorRT for RTX is real, the GPU behind its last call is not."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
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


def test_a_model_serves_at_once_and_switches_to_its_engine_without_losing_requests(start: Callable[..., Any]) -> None:
    with start() as server:
        assert backend(server) == "onnxruntime"
        answers: list[tuple[int, bool]] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                path, kind = f"/v2/models/{MODEL}/infer", {"Content-Type": "image/jpeg"}
                status, body = server.request("POST", path, COFFEE.read_bytes(), kind)
                answers.append((status, b"espresso" in body))

        client = threading.Thread(target=ask)
        client.start()
        try:
            assert eventually(lambda: backend(server) == "tensorrt_rtx", BUILD_S), (engine(server), server.log())
            seen = len(answers)
            assert eventually(lambda: len(answers) > seen + 2)
        finally:
            is_over.set()
            client.join(60)
        assert set(answers) == {(200, True)}
        found = engine(server)
        assert (found["state"], found["percent"], found["attempt_count"]) == ("ready", 100.0, 0)
        # Here both compute by the same library.
        assert 0 <= found["difference"] < found["tolerance"]
        assert "its answers differ by 0 from those of onnxruntime" in server.log()

        def kinds() -> list[str]:
            return [event["kind"] for event in server.ask("/edge/v1/events?follow=false")[1]]

        assert eventually(lambda: "model.unloaded" in kinds())
        steps = kinds()
        assert steps.index("engine.build_started") < steps.index("engine.build_progress") < steps.index("engine.ready")
        assert steps[steps.index("engine.ready") :].count("model.ready") == 1
        page = server.read_metrics()
        assert f'edge_engine_build_state{{model="{MODEL}",version="1",state="ready"}} 1' in page
        assert 'edge_engine_builds_total{outcome="ready"} 1' in page
        assert server.stop() == 0
    with start() as server:
        assert backend(server) == "tensorrt_rtx"
        assert 'edge_engine_cache_lookups_total{result="hit"} 1' in server.read_metrics()
        assert engine(server)["state"] == "ready"


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
