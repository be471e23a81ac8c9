"""Cameras that send Motion JPEG as a test requires, and a core whose frame streams are fed by the server's sources."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest

from edge_server.config import LogConfig, RepositoryConfig, ServerConfig
from edge_server.core.back_off import BackOff
from edge_server.plugins.cameras.settings import FramesConfig
from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources.source_set import MakePixels, SourceSet
from edge_server.plugins.cameras.streams.stream_registry import StreamRegistry
from edge_server.process.composition_root import build, first_desired_state
from edge_server.protocol.frame_messages import FrameResult
from edge_server.serving.execution.admission_control import ADMIT_ALL
from edge_server.telemetry.log import LogSettings

PATIENCE_S = 60.0
QUICK = BackOff(0.001, 0.01)
SUM_MODEL = """
    backend: "stub"
    max_batch_size: 1
    input { name: "IN" data_type: TYPE_FP32 dims: [3, 8, 8] }
    output { name: "SUM" data_type: TYPE_FP32 dims: [1] }
    parameters { key: "stub_op" value { string_value: "sum" } }
    parameters { key: "image_color" value { string_value: "rgb" } }
    parameters { key: "image_scale" value { string_value: "1" } }
"""
MULTIPART = "multipart/x-mixed-replace; boundary=x"
Script = Callable[[socket.socket, bytes], None]


def jpeg_of(value: int, side: int = 8) -> bytes:
    """Return a small gray JPEG."""
    return bytes(cv2.imencode(".jpg", np.full((side, side, 3), value, np.uint8))[1])


class StubCamera:
    """A TCP server. For each connection `script` gets the socket and the head of the request."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.script: Script = lambda peer, head: None
        self.heads: list[bytes] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/video"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                with peer, suppress(OSError):
                    head = b""
                    while b"\r\n\r\n" not in head and (piece := peer.recv(4096)):
                        head += piece
                    self.heads.append(head)
                    self.script(peer, head)

    def plays(
        self, *parts: bytes, with_length: bool = True, kind: str = "multipart/x-mixed-replace; boundary=x"
    ) -> None:
        """Send these parts to each client, and close."""

        def play(peer: socket.socket, head: bytes) -> None:
            peer.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
            for part in parts:
                length = f"Content-Length: {len(part)}\r\n" if with_length else ""
                peer.sendall(f"--x\r\nContent-Type: image/jpeg\r\n{length}\r\n".encode() + part + b"\r\n")
            peer.sendall(b"--x--\r\n")

        self.script = play

    def answers(self, text: bytes) -> None:
        """Send these bytes to each client, and close."""
        self.script = lambda peer, head: peer.sendall(text)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def camera() -> Iterator[StubCamera]:
    made = StubCamera()
    yield made
    made.close()


class Core:
    """A serving core with one model `sum`, and its frame streams."""

    def __init__(self, path: Path) -> None:
        (path / "sum/1").mkdir(parents=True)
        (path / "sum/config.pbtxt").write_text(SUM_MODEL)
        config = ServerConfig(repository=RepositoryConfig(paths=(str(path),), control_mode="explicit"))
        self.parts = build(config, LogSettings(LogConfig()))
        self.service = self.parts.service
        self.streams = StreamRegistry(self.service, ADMIT_ALL, FramesConfig(max_frame_bytes=200_000))
        desired = first_desired_state(RepositoryConfig(load_models=("*",), control_mode="explicit"), self.parts.source)
        self.service.set_desired_state(desired)
        assert self.parts.service.table.wait_settled(timeout_s=PATIENCE_S)
        self.service.started()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path / "models")
    yield made
    made.parts.close(PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three small pictures."""
    path = tmp_path / "pictures"
    path.mkdir()
    for value in (10, 50, 90):
        (path / f"{value}.jpg").write_bytes(jpeg_of(value))
    return path


class RtspCamera:
    """GStreamer's RTSP server as a process of its own, on a port that stays the same when it is killed and started
    again."""

    def __init__(self, servers: Path, folder: Path, port: int) -> None:
        self.port = port
        libraries = next(servers.glob("usr/lib/*/girepository-1.0")).parent
        self._environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries),
            "GI_TYPELIB_PATH": str(libraries / "girepository-1.0"),
            "GST_PLUGIN_SYSTEM_PATH_1_0": str(libraries / "gstreamer-1.0"),
            "GST_PLUGIN_SCANNER": str(libraries / "gstreamer1.0/gstreamer-1.0/gst-plugin-scanner"),
            "GST_REGISTRY_1_0": str(folder / "registry.bin"),
            "PYTHONPATH": str(servers / "usr/lib/python3/dist-packages"),
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self.port}/cam"

    def start(self, *options: str) -> None:
        """Start, with a user and a password or without."""
        program = str(Path(__file__).with_name("rtsp_camera.py"))
        self._process = subprocess.Popen(
            ["/usr/bin/python3", program, str(self.port), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "listening\n":
            error = self._process.communicate(timeout=PATIENCE_S)[1]
            self._process = None
            pytest.fail(f"the RTSP server does not start: {error}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=PATIENCE_S)
            self._process = None


@pytest.fixture
def rtsp_cameras(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[list[RtspCamera]]:
    """Ten, none of which is started."""
    pytest.importorskip("av", reason="needs PyAV: pip install '.[test-all]'")
    servers = os.environ.get("EDGE_TEST_CAMERA_SERVERS", "")
    if not servers:
        pytest.skip("needs GStreamer's RTSP server: tests/e2e/fetch_camera_servers.sh")
    made = [RtspCamera(Path(servers), tmp_path, port) for port in free_ports(10)]
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def rtsp_camera(rtsp_cameras: list[RtspCamera]) -> RtspCamera:
    return rtsp_cameras[0]


class Cameras:
    """A source set, and what it reported."""

    def __init__(self, core) -> None:
        self.core = core
        self.results: list[tuple[str, FrameResult, str]] = []
        self.pictures: list[tuple[FrameResult, MakePixels | None]] = []
        self.states: list[tuple[str, str]] = []
        self.events: list[tuple[str, dict]] = []
        self.set = SourceSet(
            core.streams,
            lambda kind, /, **fields: self.events.append((kind, fields)),
            self._on_result,
            lambda runner: self.states.append((runner.entry.name, runner.state)),
            QUICK,
        )

    def apply(self, *entries: SourceEntry, pictured: Collection[str] = ()) -> None:
        self.set.apply({entry.name: entry for entry in entries}, pictured)

    def _on_result(self, entry: SourceEntry, result: FrameResult, clock: str, picture: MakePixels | None) -> None:
        self.pictures.append((result, picture))
        self.results.append((entry.name, result, clock))

    def report(self, name: str = "cam"):
        return next(report for report in self.set.reports() if report.name == name)

    def stream(self, name: str = "cam"):
        return next((report for report in self.core.streams.reports() if report.stream_id == name), None)

    def is_exact(self, name: str = "cam") -> bool:
        """Return whether every picture is answered, counted as dropped, or waits."""
        report = self.stream(name)
        counts = report.counts
        return counts.received == counts.answered + sum(counts.dropped.values()) + report.waiting_count

    def of(self, name: str = "cam") -> list[FrameResult]:
        return [result for source, result, _ in self.results if source == name]


@pytest.fixture
def cameras(core) -> Iterator[Cameras]:
    made = Cameras(core)
    yield made
    made.set.close(PATIENCE_S)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("source")]
    assert left == []


@pytest.fixture(scope="session")
def jpeg() -> Callable[[int], bytes]:
    return jpeg_of
