"""The measurement of runtimes while the server is idle."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.config import RepositoryConfig, ServerConfig
from edge_server.core.model_spec import ModelFile
from edge_server.plugins.tuning.idle_runtime_measurement import BackgroundMeasurement
from edge_server.repository.choice.runtime_times import FILE_NAME, RuntimeTimes
from edge_server.telemetry.event_bus import MODEL_READY, EventBus
from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually

BUNDLED = Path(__file__).parents[3] / "model_repository"
ORDER = ("openvino", "onnxruntime")


class Server:
    """What the measurement sees of a server, with one unmeasured model."""

    def __init__(self, state_dir: Path, model: str = "face_detection_yunet") -> None:
        self.in_flight: Callable[[], int] = lambda: 0
        self.refusal = ""
        self.last_inference_ms = 0
        self.times = RuntimeTimes(state_dir)
        self.file = ModelFile(BUNDLED / model / "1" / "model.onnx", BUNDLED / model, 1)
        self.events = EventBus()
        core: Any = SimpleNamespace(
            events=self.events,
            service=SimpleNamespace(
                router=SimpleNamespace(in_flight=lambda: self.in_flight()),
                statistics=lambda name, version: [SimpleNamespace(last_inference_ms=self.last_inference_ms)],
            ),
            runtime_times=self.times,
            heavy_work_refusal=lambda: self.refusal,
        )
        config = ServerConfig(repository=RepositoryConfig(state_dir=str(state_dir)))
        self.measurement = BackgroundMeasurement(config, quiet_s=0.0)
        self.measurement.build(core)

    def start(self) -> None:
        assert self.times.choose(self.file, ORDER) is None
        self.measurement.models_settled()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.measurement.stop(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "runtime_measurement"]


@pytest.mark.full
def test_an_idle_server_measures_a_model_once_and_the_next_load_uses_the_times(server: Server, tmp_path: Path) -> None:
    server.start()
    assert eventually((tmp_path / FILE_NAME).exists)
    (entry,) = json.loads((tmp_path / FILE_NAME).read_text())["measurements"]
    assert {name: ms > 0 for name, (_, ms) in entry["times"].items()} == dict.fromkeys(ORDER, True)
    chosen = server.times.choose(server.file, ORDER)
    assert chosen is not None
    assert "measured 20" in chosen.reason
    assert not server.times.has_unmeasured
    server.events.publish(MODEL_READY, model="face_detection_yunet", version=1)


def test_a_request_ends_the_processes_of_a_measurement_and_nothing_is_stored(server: Server, tmp_path: Path) -> None:
    before = children_of(os.getpid())
    server.start()
    assert eventually(lambda: children_of(os.getpid()) != before)
    server.in_flight = lambda: 1
    assert eventually(lambda: children_of(os.getpid()) == before)
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("reason", ["heat", "requests in flight", "a request a moment ago"])
def test_nothing_is_measured_on_a_hot_machine_or_beside_requests(server: Server, reason: str) -> None:
    before = children_of(os.getpid())
    if reason == "heat":
        server.refusal = "the box is HOT"
    elif reason == "requests in flight":
        server.in_flight = lambda: 1
    else:
        server.last_inference_ms = int(time.time() * 1000) + 3_600_000
    asked = threading.Event()
    refusal, server.in_flight = server.in_flight, lambda: (asked.set(), refusal())[1]
    server.start()
    assert asked.wait(30)
    server.measurement.begin_stop()
    assert children_of(os.getpid()) == before
