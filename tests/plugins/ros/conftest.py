"""Fixtures: a frame service over real gRPC whose results a test controls, and processes of ROS 2 over DDS and Zenoh."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.protocol.frame_codec import STREAM_PATH, decode_client_message, encode_server_message
from edge_server.protocol.frame_messages import (
    ClassScore,
    DenseMap,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameResult,
    Mask,
    ServerMessage,
    StreamOpened,
    StreamRequest,
)
from edge_server.protocol.messages import GRPC_SERVICE
from tests.kit.eventually import eventually


class ScriptedServer:
    """Returns for each image one box whose left edge is the first byte of its data, and a class, a mask, a map and an
    image.

    `drops_each`: of the frames whose `seq` it divides, the first of each is dropped with a notice. `is_mute`:
    frames are accepted and never answered. `is_empty`: there is no such model, `missing_models` those that are missing.
    `error`: every response is this error, as for all pictures of `failing_models`; `mute_models` never answer, also not
    at the end of a stream. `labels` are those of each model.
    `refusal`: each stream, or those with `refused_ids` if there are any, ends with this gRPC status at its start.
    `forgets_regions`: shared memory may be registered, and frames in it are answered with an error.
    `frames` and `requests` are all that were received, over all connections.
    """

    def __init__(self, *, drops_each: int = 0, error: tuple[str, str] = ("", ""), credit: int = 4) -> None:
        self.drops_each = drops_each
        self.error = error
        self.is_mute = self.is_empty = False
        self.missing_models: set[str] = set()
        self.failing_models: set[str] = set()
        self.mute_models: set[str] = set()
        self.labels: tuple[str, ...] = ()
        self.refusal: grpc.StatusCode | None = None
        self.refused_ids: set[str] = set()
        self.forgets_regions = False
        self.frames: list[Frame] = []
        self.requests: list[StreamRequest] = []
        self._credit = credit
        self._dropped: set[int] = set()
        self._port = 0
        self._server: Any = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; on the port of before, once it had one."""
        method = grpc.stream_stream_rpc_method_handler(self._serve)
        _, service, name = STREAM_PATH.split("/")
        # gRPC's own limit is 4 MB, the real server's is above the largest pictures.
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 20)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        regions = {
            f"SystemSharedMemory{change}": grpc.unary_unary_rpc_method_handler(self._change_region)
            for change in ("Register", "Unregister")
        }
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(service, {name: method}),
                grpc.method_handlers_generic_handler(GRPC_SERVICE, regions),
            ]
        )
        self._port = self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """Cut every connection."""
        self._server.stop(0).wait(10)

    def _change_region(self, _: bytes, context: Any) -> bytes:
        if not self.forgets_regions:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no shared memory")
        return b""

    def _serve(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        request = decode_client_message(next(messages))
        assert isinstance(request, StreamRequest)
        self.requests.append(request)
        if self.is_empty or request.model in self.missing_models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model '{request.model}'")
        if self.refusal is not None and (not self.refused_ids or request.stream_id in self.refused_ids):
            context.abort(self.refusal, "refused")
        allowed = self._credit
        yield encode_server_message(StreamOpened(request.stream_id, request.model, 1, "script", self.labels), allowed)
        for data in messages:
            frame = decode_client_message(data)
            assert isinstance(frame, Frame)
            self.frames.append(frame)
            allowed += 1
            if not self.is_mute and request.model not in self.mute_models:
                yield encode_server_message(self._answer(request, frame), allowed)
        if request.model in self.mute_models:
            ended = threading.Event()
            if context.add_callback(ended.set):
                ended.wait(60)

    def _answer(self, request: StreamRequest, frame: Frame) -> ServerMessage:
        seq = frame.header.seq
        if self.drops_each and seq % self.drops_each == 0 and seq not in self._dropped:
            self._dropped.add(seq)
            return FrameDropped(frame.header, DropReason.GOVERNOR, "too hot")
        if frame.region is not None:
            return FrameResult(frame.header, error_code="NOT_FOUND", error="unknown region")
        code, text = ("INTERNAL", "it fails") if request.model in self.failing_models else self.error
        if code:
            return FrameResult(frame.header, error_code=code, error=text)
        left, returns = float(frame.data[0]), request.returns
        found = Detection(left, 10, left + 20, 40, 0.75, 3, "cup")
        asks_nothing = returns.top_k == 0 and not (returns.has_mask or returns.has_annotated_jpeg)
        return FrameResult(
            frame.header,
            model=request.model,
            detections=(found,) if returns.has_detections or asks_nothing else (),
            classes=(ClassScore(1, 0.5, "indoors"), ClassScore(2, 0.25)) if returns.top_k else (),
            mask=Mask(2, 2, "mono8", b"\0\1\2\3") if returns.has_mask else None,
            dense_map=DenseMap("metric_depth", 1, 2, "32FC1", bytes(8), 0.0, 0.0) if returns.has_map else None,
            annotated_jpeg=b"\xff\xd8\xff\xd9" if returns.has_annotated_jpeg else b"",
        )


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """`scripted(**options)` is a frame service on a free port."""
    servers: list[ScriptedServer] = []

    def start(**options: Any) -> ScriptedServer:
        servers.append(ScriptedServer(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


COMMAND = Path(sys.executable).parent / "edge-server"
LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Ask again and again until it holds, for LIMIT_S at most."""
    assert eventually(condition, LIMIT_S), f"waited {LIMIT_S:.0f} s for {what}"


@dataclass
class Ros2Processes:
    """Bridges and cameras over `transport`, all with `environment`, each in a process of its own."""

    transport: str
    environment: dict[str, str]

    @contextlib.contextmanager
    def bridging(
        self,
        address: str,
        log: Path,
        *flags: str,
        images: Sequence[str] = ("/camera/image_raw",),
        detections: str = "/detections",
        environment: dict[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run `edge-server ros bridge` meanwhile; end it by SIGTERM and expect exit code 0."""
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [
                    str(COMMAND), "ros", "bridge", f"--transport={self.transport}", "--model=finder",
                    f"--address={address}", *(f"--image-topic={image}" for image in images),
                    f"--detections-topic={detections}", *flags,
                ],
                env={**os.environ, **self.environment, **(environment or {})}, stderr=file,
            )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()

    def start_camera(
        self, count: int, image_topic: str = "/camera/image_raw", detections_topic: str = "/detections"
    ) -> subprocess.Popen[str]:
        """Start a camera whose codec is not this package's. It ends after `count` different messages came back."""
        camera = Path(__file__).parent / f"{self.transport}_camera.py"
        domain = self.environment["ROS_DOMAIN_ID"]
        return subprocess.Popen(
            [sys.executable, str(camera), domain, image_topic, detections_topic, str(count)],
            env={**os.environ, **self.environment}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @staticmethod
    def heard(camera: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """Return the messages that a camera got until its end."""
        output, _ = camera.communicate(timeout=LIMIT_S + 10)
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def dds(ros_domain: dict[str, str]) -> Ros2Processes:
    """Processes in a ROS domain of this test's own, over DDS."""
    if any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags")):
        pytest.skip("needs cyclonedds and rosbags: pip install '.[ros]'")
    return Ros2Processes("dds", ros_domain)


@pytest.fixture
def zenoh(zenoh_router: Any) -> Ros2Processes:
    """Processes around a router of this test's own, over Zenoh."""
    # The camera has the codec of Cyclone DDS.
    if any(importlib.util.find_spec(name) is None for name in ("cyclonedds", "rosbags", "xxhash")):
        pytest.skip("needs cyclonedds, rosbags and xxhash: pip install '.[ros,zenoh]'")
    return Ros2Processes("zenoh", {"ROS_DOMAIN_ID": "7", **zenoh_router.environment})


@pytest.fixture(params=["dds", "zenoh"])
def ros2(request: pytest.FixtureRequest) -> Ros2Processes:
    """Processes over each transport that needs no ROS."""
    processes: Ros2Processes = request.getfixturevalue(request.param)
    return processes
