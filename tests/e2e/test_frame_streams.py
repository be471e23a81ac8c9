"""The frame stream of the installed server, over gRPC, with the client of the package."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.client import Delivery, DropReason, Frame, FrameHeader, FrameResult, FrameStream, StreamError
from edge_server.protocol import messages
from edge_server.protocol.frame_codec import STREAM_PATH, decode_server_message, encode_client_message
from edge_server.protocol.frame_messages import StreamRequest
from tests.kit.eventually import eventually
from tests.kit.server import serve

SIDE = 8
FPS = 30
PATIENCE_S = 60.0


def stub_config(delay_ms: int, more: str = "") -> str:
    return f"""
    backend: "stub"
    max_batch_size: 1
    input {{ name: "IN" data_type: TYPE_FP32 dims: [3, {SIDE}, {SIDE}] }}
    output {{ name: "SUM" data_type: TYPE_FP32 dims: [1] }}
    parameters {{ key: "stub_op" value {{ string_value: "sum" }} }}
    parameters {{ key: "stub_delay_ms" value {{ string_value: "{delay_ms}" }} }}
    parameters {{ key: "image_color" value {{ string_value: "rgb" }} }}
    parameters {{ key: "image_scale" value {{ string_value: "1" }} }}
    {more}
    """


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


class Camera:
    """Offers frames at a rate, on one thread, and takes results on another."""

    def __init__(self, address: str, model: str, number: int, frame_count: int, fps: float = FPS, **more: Any) -> None:
        self.number = number
        self.results: list[FrameResult] = []
        self.stream = FrameStream(address, model, **more)
        self._frame_count = frame_count
        self._fps = fps
        self.offered_s: list[float] = []
        self._threads = [threading.Thread(target=self._offer), threading.Thread(target=self._take)]
        for thread in self._threads:
            thread.start()

    def _offer(self) -> None:
        begin = time.monotonic()
        for seq in range(self._frame_count):
            time.sleep(max(0.0, begin + seq / self._fps - time.monotonic()))
            self.offered_s.append(time.monotonic())
            self.stream.send(frame(seq, self.number))
        self.stream.finish()

    def _take(self) -> None:
        for result in self.stream.results():
            self.results.append(result)

    def join(self) -> list[FrameResult]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self.stream.close()
        return self.results


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    # Four cameras of 30 fps offer 120 frames a second, this model can do 40.
    module_repository.add("third", stub_config(25))
    module_repository.add("sixth", stub_config(50))
    module_repository.add("quick", stub_config(0))
    with serve(module_repository.path, "--frames-max-frame-bytes=4096") as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log(), running.log()


def streams_of(server: Any) -> dict[str, Any]:
    status, answer = server.ask("/edge/v1/streams")
    assert status == 200
    return {item["stream_id"]: item for item in answer["streams"]}


def is_exact(counts: Any) -> bool:
    return counts.received == counts.answered + sum(counts.dropped.values())


@pytest.mark.serial
def test_results_stay_within_the_maximum_age_at_three_times_the_models_throughput(server: Any) -> None:
    cameras = [Camera(server.grpc, "third", number, frame_count=150) for number in range(4)]
    answered = [camera.join() for camera in cameras]
    times = [result.times for results in answered for result in results]
    # An inference is what the server does for a frame: make it ready, run it, read the outputs.
    run_us = max(each.queued_us - each.taken_us + each.finished_us - each.started_us for each in times)
    # How far apart frames really came: the machine does not keep the pace of a camera.
    interval_us = 1e6 * max(float(np.diff(camera.offered_s).max()) for camera in cameras)
    promised_us = interval_us + 2 * run_us
    for camera, results in zip(cameras, answered, strict=True):
        assert all(belongs(result, camera.number) for result in results)
        assert [result.header.seq for result in results] == sorted({result.header.seq for result in results})
        # The last frame waits for its turn with no newer one to take its place.
        late = [result.times for result in results[:-1] if result.times.finished_us > promised_us]
        assert late == [], f"older than {promised_us}"
        counts = results[-1].counts
        assert is_exact(counts), counts
        assert counts.answered == len(results)
        assert set(counts.dropped) <= {DropReason.NEWER}
        ours = camera.stream.counters()
        assert ours.offered == counts.received + ours.dropped_here
    shares = [len(results) for results in answered]
    assert min(shares) > 0.8 * max(shares), shares
    print(f"ages p50/p99/max us: {np.percentile([each.finished_us for each in times], [50, 99, 100])}, "
          f"promised {promised_us:.0f}, interval {interval_us:.0f}, run {run_us}, shares {shares}")  # fmt: skip


@pytest.mark.serial
def test_a_busy_model_is_shared_by_weight(server: Any) -> None:
    weights = [3.0, 1.0]
    cameras = [
        Camera(server.grpc, "sixth", number, 180, fps=60, delivery=Delivery(weight=weight))
        for number, weight in enumerate(weights)
    ]
    heavy, light = (len(camera.join()) for camera in cameras)
    # A camera that the machine keeps from offering a frame in time leaves its turn to the other.
    assert 2 < heavy / light < 4


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


def test_slow_dead_and_invalid_clients_do_not_disturb_others(server: Any, call: Any) -> None:
    good = Camera(server.grpc, "quick", 1, frame_count=120)
    slow = call(stream_id="slow")
    garbage = call(stream_id="garbage")
    dying = call(stream_id="dying")
    for each in (slow, garbage, dying):
        assert each.read().model == "quick"
    for seq in range(3000):
        slow.send(encode_client_message(frame(seq)))
    for seq in range(50):
        dying.send(encode_client_message(frame(seq)))
    garbage.send(encode_client_message(frame(1)))
    garbage.send(b"\x0a\xff\xff\xff\xff\xff\x00 this is no message")
    dying.close()
    assert garbage.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert eventually(lambda: "dying" not in streams_of(server))
    assert eventually(lambda: streams_of(server)["slow"]["received"] == 3000)
    results = good.join()
    counts = results[-1].counts
    assert is_exact(counts)
    assert len(results) == counts.answered
    assert sum(counts.dropped.values()) + good.stream.counters().dropped_here == 120 - len(results)
    assert not any(result.error for result in results)
    entry = streams_of(server)["slow"]
    assert entry["received"] == entry["answered"] + sum(entry["dropped"].values()) + entry["waiting"]


@pytest.mark.parametrize(
    ("opening", "code"),
    [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (encode_client_message(frame(1)), grpc.StatusCode.INVALID_ARGUMENT),
        (encode_client_message(StreamRequest("nobody")), grpc.StatusCode.NOT_FOUND),
        (encode_client_message(StreamRequest("quick", delivery=Delivery(depth=65))), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_an_invalid_opening_message_is_refused_with_its_status(
    call: Any, opening: bytes, code: grpc.StatusCode
) -> None:
    assert call(opening).status() is code


def test_a_second_opening_message_ends_the_stream(call: Any) -> None:
    spoken = call()
    spoken.read()
    spoken.send(encode_client_message(StreamRequest("quick")))
    assert spoken.status() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_frame_above_the_size_limit_is_refused_and_the_next_one_answered(call: Any) -> None:
    spoken = call(delivery=Delivery(depth=4))
    spoken.read()
    spoken.send(encode_client_message(Frame(FrameHeader(seq=1), 40, 40, "rgb8", data=bytes(4800))))
    spoken.send(encode_client_message(frame(2)))
    answers: list[FrameResult] = []
    while len(answers) < 2:
        message = spoken.read()
        if isinstance(message, FrameResult):
            answers.append(message)
    assert "at most 4096 bytes" in answers[0].error
    assert belongs(answers[1], 0)


def test_a_second_connection_takes_over_the_stream_and_its_counts(call: Any) -> None:
    first = call(stream_id="taken over")
    first.read()
    first.send(encode_client_message(frame(1)))
    while not isinstance(first.read(), FrameResult):
        pass
    second = call(stream_id="taken over")
    opened = second.read()
    assert (opened.counts.received, opened.counts.answered) == (1, 1)
    assert first.status() is grpc.StatusCode.ABORTED
    second.send(encode_client_message(frame(2)))
    while not isinstance(result := second.read(), FrameResult):
        pass
    assert result.counts.answered == 2


def test_every_frame_is_counted_during_a_reload(repository: Any) -> None:
    repository.add("stub", stub_config(10))
    with serve(repository.path) as server:
        camera = Camera(server.grpc, "stub", 0, frame_count=240, fps=60)
        for delay_ms in (8, 12, 9):
            seen = len(camera.results)
            assert eventually(lambda seen=seen: len(camera.results) > seen + 10)
            loads = server.log().count("is loaded")
            repository.add("stub", stub_config(delay_ms))
            assert eventually(lambda loads=loads: server.log().count("is loaded") > loads)
        results = camera.join()
        counts = results[-1].counts
        assert is_exact(counts)
        assert counts.answered == len(results)
        assert {result.error for result in results} == {""}
        assert all(belongs(result, 0) for result in results)
        assert server.stop() == 0


def test_stopping_the_server_ends_streams_with_their_last_results(repository: Any) -> None:
    repository.add("stub", stub_config(30))
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


def test_reflection_lists_and_describes_the_service(server: Any) -> None:
    request_class = messages.message_class("grpc.reflection.v1.ServerReflectionRequest")
    response_class = messages.message_class("grpc.reflection.v1.ServerReflectionResponse")
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        questions = [
            request_class(list_services=""),
            request_class(file_containing_symbol="edge.frames.v1.FrameService"),
        ]
        listed, described = ask(iter(questions))
    assert "edge.frames.v1.FrameService" in [item.name for item in listed.list_services_response.service]
    assert b"edge.frames.v1" in described.file_descriptor_response.file_descriptor_proto[0]


def test_frame_streams_need_the_key_of_inference(repository: Any) -> None:
    repository.add("quick", stub_config(0))
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


def test_an_open_stream_is_in_the_metrics_and_the_list_of_streams(server: Any, call: Any) -> None:
    spoken = call(stream_id="watched", client="a test")
    spoken.read()
    spoken.send(encode_client_message(frame(1)))
    while not isinstance(spoken.read(), FrameResult):
        pass
    entry = streams_of(server)["watched"]
    assert (entry["model"], entry["client"], entry["received"], entry["answered"]) == ("quick", "a test", 1, 1)
    page = server.read_metrics()
    assert 'edge_frame_received_total{model="quick"}' in page
    assert 'edge_frame_dropped_total{model="quick",reason="NEWER"}' in page
    assert 'edge_frame_age_seconds_bucket{model="quick",le="0.005"}' in page


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
    repository.add("quick", stub_config(0))
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
