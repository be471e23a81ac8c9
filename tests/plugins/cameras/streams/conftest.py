"""A real serving core over a folder of stub models, and frame streams on it without a network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from edge_server.config import LogConfig, MemoryConfig, RepositoryConfig, ServerConfig
from edge_server.core.status_reports import GovernorState
from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.settings import FramesConfig
from edge_server.plugins.cameras.streams.camera_stream import CameraStream
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.process.composition_root import ServerParts, build, first_desired_state
from edge_server.protocol.frame_messages import (
    Credit,
    Delivery,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    ServerMessage,
    StreamOpened,
    StreamRequest,
)
from edge_server.telemetry.log import LogSettings
from tests.kit.eventually import eventually

PATIENCE_S = 60.0
"""Timeout of waits for expected events; only a failing test waits that long."""

SIDE = 8


def stub_config(*, delay_ms: int = 0, rows: int = 0, instances: int = 1, more: str = "") -> str:
    """Return the configuration of a model that answers a frame with the mean of its bytes, times their number.

    `rows` above 0 batches dynamically.
    """
    batching = "dynamic_batching { }" if rows else ""
    return f"""
    backend: "stub"
    max_batch_size: {max(rows, 1)}
    {batching}
    input {{ name: "IN" data_type: TYPE_FP32 dims: [3, {SIDE}, {SIDE}] }}
    output {{ name: "SUM" data_type: TYPE_FP32 dims: [1] }}
    instance_group {{ count: {instances} kind: KIND_CPU }}
    parameters {{ key: "stub_op" value {{ string_value: "sum" }} }}
    parameters {{ key: "stub_delay_ms" value {{ string_value: "{delay_ms}" }} }}
    parameters {{ key: "image_color" value {{ string_value: "rgb" }} }}
    parameters {{ key: "image_scale" value {{ string_value: "1" }} }}
    {more}
    """


def sum_of(value: int) -> float:
    """Return what the model answers to `frame(value)`."""
    return float(value * 3 * SIDE * SIDE)


def frame(value: int = 1, **fields: Any) -> Frame:
    """Return a frame whose bytes are all `value`, which is its sequence number as well."""
    given = {
        "header": FrameHeader(7, 8, "camera", value),
        "height": SIDE,
        "width": SIDE,
        "encoding": "rgb8",
        "data": bytes([value % 256]) * (3 * SIDE * SIDE),
    }
    return Frame(**{**given, **fields})


class StubAdmissionControl:
    """A governor that refuses the requests that a test selects."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.asked: list[int] = []
        self.counted: list[int] = []

    def state(self) -> GovernorState:
        return GovernorState("HOT", "the test is warm")

    def refuse_frame(self, model: str, priority: int) -> str | None:
        self.asked.append(priority)
        return self.refusal

    def count_refused(self, model: str, priority: int) -> None:
        self.counted.append(priority)


class Camera:
    """A client of one stream: a thread takes its messages as they come; while `reads` is not set, it stops at the
    first result."""

    def __init__(self, stream: CameraStream) -> None:
        self.stream = stream
        self.messages: list[ServerMessage] = []
        self.frames_allowed = 0
        self.error: EdgeServerError | None = None
        self.reads = threading.Event()
        self.reads.set()
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        news: SimpleQueue[None] = SimpleQueue()
        self.stream.watch(lambda: news.put(None))
        try:
            while True:
                message = self.stream.next_message()
                if message is None:
                    if self.stream.is_finished:
                        return
                    news.get()
                    continue
                with self._arrived:
                    self.messages.append(message[0])
                    self.frames_allowed = message[1]
                    self._arrived.notify_all()
                assert not isinstance(message[0], FrameResult) or self.reads.wait(PATIENCE_S)
        except EdgeServerError as error:
            self.error = error
        finally:
            self.stream.end()

    def send(self, *frames: Frame) -> None:
        for each in frames:
            self.stream.receive(each)

    def all(self, kind: type) -> list[Any]:
        with self._arrived:
            return [message for message in self.messages if isinstance(message, kind)]

    @property
    def results(self) -> list[FrameResult]:
        return self.all(FrameResult)

    @property
    def drops(self) -> list[FrameDropped]:
        return self.all(FrameDropped)

    @property
    def opened(self) -> StreamOpened:
        return self.wait(1, StreamOpened)[0]

    @property
    def credits(self) -> list[Credit]:
        return self.all(Credit)

    def wait(self, count: int, kind: type = FrameResult) -> list[Any]:
        with self._arrived:
            found = self._arrived.wait_for(
                lambda: sum(isinstance(item, kind) for item in self.messages) >= count, PATIENCE_S
            )
        assert found, f"{count} {kind.__name__} did not come, there are {self.messages}"
        return self.all(kind)

    def finish(self) -> list[FrameResult]:
        """End the input, wait for the end, and return all results."""
        self.stream.close_input()
        self.join()
        return self.results

    def join(self) -> None:
        self.reads.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the call did not end"


class StreamServer:
    """The core, its folder of models, and its frame streams."""

    def __init__(self, path: Path, **frames: Any) -> None:
        self.path = path
        config = ServerConfig(
            repository=RepositoryConfig(paths=(str(path),), control_mode="explicit", load_models=("*",)),
            memory=MemoryConfig(allows_client_shm=True),
        )
        self.core: ServerParts = build(config, LogSettings(LogConfig()))
        self.service = self.core.service
        self._config = config
        self.gate = StubAdmissionControl()
        self.streams = StreamRegistry(
            self.service, self.gate, FramesConfig(max_streams=8, max_frame_bytes=4096, **frames)
        )
        self.cameras: list[Camera] = []

    def add(self, name: str, config: str, version: int = 1) -> None:
        (self.path / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.path / name / "config.pbtxt").write_text(config)

    def start(self) -> None:
        self.service.set_desired_state(first_desired_state(self._config.repository, self.core.source))
        assert self.core.service.table.wait_settled(timeout_s=PATIENCE_S)
        self.service.started()

    def serve(self, name: str, config: str) -> None:
        """Add a model, and start."""
        self.add(name, config)
        self.start()

    def camera(self, model: str = "sum", **fields: Any) -> Camera:
        """Open a stream; fields of Delivery and of StreamRequest alike."""
        delivery = {key: fields.pop(key) for key in list(fields) if key in Delivery.__dataclass_fields__}
        camera = Camera(self.streams.open(StreamRequest(model, delivery=Delivery(**delivery), **fields)))
        self.cameras.append(camera)
        assert camera.opened.model == model
        return camera

    def close(self) -> None:
        for camera in self.cameras:
            camera.stream.end()
            camera.join()
        self.core.close(PATIENCE_S)
        assert eventually(lambda: not frame_threads()), frame_threads()


def frame_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("frames-")]


@pytest.fixture(scope="session")
def make_stream_server() -> type[StreamServer]:
    return StreamServer


@pytest.fixture
def stream_server(tmp_path: Path) -> Iterator[StreamServer]:
    made = StreamServer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def served(stream_server: StreamServer) -> StreamServer:
    """A stream server with a fast model `sum`."""
    stream_server.serve("sum", stub_config())
    return stream_server


def values(results: list[FrameResult]) -> list[float]:
    """Return what the model answered, result by result."""
    return [float(np.asarray(result.tensors[0].array).reshape(-1)[0]) for result in results]


class Tools:
    """Helpers for the tests in this folder."""

    config = staticmethod(stub_config)
    frame = staticmethod(frame)
    sum_of = staticmethod(sum_of)
    values = staticmethod(values)
    wait_until = staticmethod(eventually)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools
