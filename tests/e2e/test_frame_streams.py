"""The frame stream of the installed server, over gRPC, with the client of the package."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from edge_server.client import Delivery, Frame, FrameHeader, FrameResult, FrameStream, StreamError
from edge_server.protocol.frame_codec import STREAM_PATH, decode_server_message, encode_client_message
from edge_server.protocol.frame_messages import StreamRequest
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


def streams_of(server: Any) -> dict[str, Any]:
    status, answer = server.ask("/edge/v1/streams")
    assert status == 200
    return {item["stream_id"]: item for item in answer["streams"]}


class RawCall:
    """A stream spoken by hand: what no client of ours would send, or leave unread."""

    def __init__(self, address: str, opening: bytes | None = None, model: str = "quick", **fields: Any) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._queue: list[bytes] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self.call = self._channel.stream_stream(STREAM_PATH)(self._requests())
        self.send(encode_client_message(StreamRequest(model, **fields)) if opening is None else opening)

    def _requests(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                data = self._queue.pop(0)
            yield data

    def send(self, data: bytes) -> None:
        with self._changed:
            self._queue.append(data)
            self._changed.notify()

    def read(self) -> Any:
        return decode_server_message(next(self.call))[0]

    def status(self) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        return caught.value.code()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._channel.close()


@pytest.fixture
def call(server: Any) -> Iterator[Callable[..., RawCall]]:
    calls: list[RawCall] = []

    def make(*arguments: Any, **fields: Any) -> RawCall:
        calls.append(RawCall(server.grpc, *arguments, **fields))
        return calls[-1]

    yield make
    for each in calls:
        each.close()


def test_stopping_the_server_ends_streams_with_their_last_results(repository: Any) -> None:
    repository.add("stub", picture_sum_config(SIDE, stub_delay_ms=30))
    with serve(repository.path) as server:
        spoken = RawCall(server.grpc, model="stub", delivery=Delivery(depth=8))
        spoken.read()
        for seq in range(8):
            spoken.send(encode_client_message(frame(seq)))
        while not isinstance(spoken.read(), FrameResult):
            pass
        assert server.stop() == 0
        assert spoken.status() is grpc.StatusCode.UNAVAILABLE
        spoken.close()
        assert "Traceback" not in server.log(), server.log()


def test_frame_streams_need_the_key_of_inference(repository: Any) -> None:
    repository.add("quick", picture_sum_config(SIDE))
    with serve(repository.path, "--grpc-restricted-protocol=inference:key=secret") as server:
        spoken = RawCall(server.grpc)
        assert spoken.status() is grpc.StatusCode.UNAVAILABLE
        spoken.close()
        with FrameStream(
            server.grpc, "quick", metadata=[("triton-grpc-protocol-key", "secret")], reconnects=False
        ) as stream:
            (result,) = stream.results(iter([frame(1)]))
        assert belongs(result, 0)
        with FrameStream(server.grpc, "quick", reconnects=False) as stream, pytest.raises(StreamError):
            list(stream.results(iter([frame(1)])))


def test_status_lists_streams_while_they_are_open(server: Any, call: Any) -> None:
    def status() -> str:
        command = [sys.executable, "-m", "edge_server", "status", f"--url=http://{server.http}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert eventually(lambda: not streams_of(server))
    assert "STREAM" not in status()
    spoken = call(stream_id="in the table", client="a test", delivery=Delivery(max_fps=0.01))
    spoken.read()
    for seq in range(2):
        spoken.send(encode_client_message(frame(seq)))
    while not isinstance(spoken.read(), FrameResult):
        pass
    assert eventually(lambda: streams_of(server)["in the table"]["dropped"])
    (line,) = [line for line in status().splitlines() if line.startswith("in the table")]
    cells = re.split(r"  +", line)
    assert cells[:3] == ["in the table", "quick", "a test"]
    assert cells[5] == "1 MAX_FPS"
    assert all(float(cell) >= 0 for cell in (*cells[3:5], *cells[6:]))


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
