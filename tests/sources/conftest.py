"""Cameras that send Motion JPEG as a test says, and a core whose frame streams the server's own sources feed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest

from edge_server.config import FramesConfig, LogConfig, RepositoryConfig, ServerConfig
from edge_server.process.composition_root import build, first_desired_state
from edge_server.streams.frame_admission import NoFrameAdmission
from edge_server.streams.stream_registry import StreamRegistry
from edge_server.telemetry.log import LogSettings

PATIENCE_S = 20.0
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
        self.streams = StreamRegistry(self.service, NoFrameAdmission(), FramesConfig(max_frame_bytes=200_000))
        desired = first_desired_state(RepositoryConfig(load_models=("*",), control_mode="explicit"), self.parts.source)
        self.service.set_desired_state(desired)
        assert self.parts.manager.wait_settled(timeout_s=PATIENCE_S)
        self.service.started()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path / "models")
    yield made
    made.parts.close(PATIENCE_S)


@pytest.fixture(scope="session")
def jpeg() -> Callable[[int], bytes]:
    return jpeg_of


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Wait until a condition holds; only a failing test waits to the end."""

    def wait(condition: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + PATIENCE_S
        while not condition() and time.monotonic() < end_s:
            time.sleep(0.002)
        return condition()

    return wait
