"""The frame stream of the installed server, over gRPC, with the client of the package."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edge_server.client import Delivery, Frame, FrameHeader, FrameResult, FrameStream, StreamError
from tests.kit.eventually import eventually
from tests.kit.models import picture_sum_config
from tests.kit.server import serve

SIDE = 8


def frame(seq: int, camera: int = 0) -> Frame:
    """Return a frame whose bytes all identify its camera and its number."""
    value = (seq * 7 + camera * 50) % 256
    return Frame(
        FrameHeader(0, 0, f"camera {camera}", seq), SIDE, SIDE, "rgb8", data=bytes([value]) * (3 * SIDE * SIDE)
    )


def belongs(result: FrameResult, camera: int) -> bool:
    """Whether a result is the one of that camera's frame."""
    expected = (result.header.seq * 7 + camera * 50) % 256 * 3 * SIDE * SIDE
    return result.header.frame_id == f"camera {camera}" and float(result.tensors[0].array.reshape(-1)[0]) == expected


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    module_repository.add("quick", picture_sum_config(SIDE))
    with serve(module_repository.path) as running:
        yield running
        running.stop_cleanly()


def test_frame_streams_need_the_key_of_inference(repository: Any) -> None:
    repository.add("quick", picture_sum_config(SIDE))
    with serve(repository.path, "--grpc-restricted-protocol=inference:key=secret") as server:
        with FrameStream(
            server.grpc, "quick", metadata=[("triton-grpc-protocol-key", "secret")], reconnects=False
        ) as stream:
            (result,) = stream.results(iter([frame(1)]))
        assert belongs(result, 0)
        with FrameStream(server.grpc, "quick", reconnects=False) as stream, pytest.raises(StreamError):
            list(stream.results(iter([frame(1)])))


def test_status_lists_streams_while_they_are_open(server: Any) -> None:
    def status() -> str:
        command = [sys.executable, "-m", "edge_server", "status", f"--url=http://{server.http}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "STREAM" not in status()
    options: dict[str, Any] = {"stream_id": "in the table", "client": "a test", "delivery": Delivery(max_fps=0.01)}
    with FrameStream(server.grpc, "quick", **options) as stream:
        stream.send(frame(0))
        assert belongs(next(stream.results()), 0)
        stream.send(frame(1))
        assert eventually(lambda: server.ask("/edge/v1/streams")[1]["streams"][0]["dropped"])
        (line,) = [line for line in status().splitlines() if line.startswith("in the table")]
    cells = re.split(r"  +", line)
    assert cells[:3] == ["in the table", "quick", "a test"]
    assert cells[5] == "1 MAX_FPS"
    assert all(float(cell) >= 0 for cell in (*cells[3:5], *cells[6:]))
    assert eventually(lambda: not server.ask("/edge/v1/streams")[1]["streams"])


@pytest.mark.parametrize("frame_count", [500, pytest.param(3000, marks=pytest.mark.full)])
def test_many_frames_leak_no_memory(repository: Any, frame_count: int) -> None:
    repository.add("quick", picture_sum_config(SIDE))
    data = bytes(320 * 240 * 3)

    def pictures(count: int) -> Iterator[Frame]:
        for seq in range(count):
            yield Frame(FrameHeader(seq=seq), 240, 320, "rgb8", data=data)

    def answered(server: Any, count: int) -> int:
        with FrameStream(server.grpc, "quick", keeps_all=True, delivery=Delivery(depth=4)) as stream:
            return sum(not result.error for result in stream.results(pictures(count)))

    with serve(repository.path) as server:
        assert answered(server, 300) == 300
        before = server.resident_bytes()
        assert answered(server, frame_count) == frame_count
        # 500 frames are 115 MB.
        assert server.resident_bytes() - before < 16 << 20
