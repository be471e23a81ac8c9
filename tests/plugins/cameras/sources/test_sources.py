"""What each source of pictures promises, a folder as an RTSP camera: order, its end, reasons, a loss, no leftovers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest

from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry
from edge_server.plugins.cameras.sources import local_camera
from edge_server.plugins.cameras.sources.frame_encoding import picture_pixels
from edge_server.plugins.cameras.sources.source_choice import open_source
from edge_server.plugins.cameras.sources.source_interface import Source, SourceError

GRAYS = list(range(0, 240, 20))
"""Of the pictures of sources that have an end, in order."""

SIZE = (96, 64)
FINITE = ["folder", "video"]
GENERATED = ["demo", "pattern"]
CAMERAS = ["v4l2", "mjpeg", pytest.param("rtsp", marks=pytest.mark.full)]


class Made(NamedTuple):
    """A source that can be lost, as a cable can. `title`, `fps` and `length` are those that it tells."""

    url: str
    lose: Callable[[], Any] = lambda: None
    find: Callable[[], Any] = lambda: None
    title: str = ""
    fps: float = 0.0
    length: int = 0


def gray(value: int) -> np.ndarray:
    return np.full((SIZE[1], SIZE[0], 3), value, np.uint8)


def make_video(path: Path) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 25, SIZE)
    for value in GRAYS:
        writer.write(gray(value))
    writer.release()
    return path


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The source of the kind of this parameter."""
    kind = request.param
    path, away = tmp_path / "gray.mp4", tmp_path / "away"
    if kind in GENERATED:
        return Made(kind, title={"demo": "moving portrait 384x288", "pattern": "test pattern 640x480"}[kind])
    if kind == "folder":
        path = tmp_path / "pictures"
        path.mkdir()
        for number, value in enumerate(GRAYS):
            cv2.imwrite(str(path / f"frame{number}.png"), gray(value))
        title = f"{path} with 12 pictures"
        return Made(str(path), lambda: path.rename(away), lambda: away.rename(path), title, 0.0, 12)
    if kind == "video":
        make_video(path)
        return Made(str(path), lambda: path.rename(away), lambda: away.rename(path), "gray.mp4 96x64", 25.0, 12)
    if kind == "v4l2":
        # A driver of these pictures behind a device file of this machine.
        make_video(path)
        capture = cv2.VideoCapture
        driver = lambda name, api: capture(str(path))  # noqa: E731
        monkeypatch.setattr(cv2, "VideoCapture", driver)
        return Made("/dev/null", lambda: path.rename(away), lambda: away.rename(path), "/dev/null 96x64", 25.0)
    if kind == "mjpeg":
        camera, is_off = request.getfixturevalue("camera"), threading.Event()
        parts = [bytes(cv2.imencode(".jpg", gray(value))[1]) for value in GRAYS]
        camera.plays(*parts)
        play = camera.script
        camera.script = lambda peer, head: is_off.is_set() or play(peer, head)
        url = camera.url.replace("//", "//me:geheim@")
        return Made(url, is_off.set, is_off.clear, f"http://127.0.0.1:{camera.port}")
    camera = request.getfixturevalue("rtsp_camera")
    camera.start("me", "geheim")
    url = camera.url.replace("//", "//me:geheim@")
    title = f"rtsp://127.0.0.1:{camera.port} h264 320x240 over TCP"
    return Made(url, camera.kill, lambda: camera.start("me", "geheim"), title, 30.0)


@pytest.fixture
def source(made: Made) -> Iterator[Source]:
    opened = open_source(made.url)
    yield opened
    opened.close()


def numbers_of(arrays: list[np.ndarray]) -> list[int]:
    return [round(float(pixels.mean()) / 20) for pixels in arrays]


@pytest.mark.parametrize("made", [*FINITE, *GENERATED, *CAMERAS], indirect=True)
def test_a_source_describes_itself(made: Made, source: Source) -> None:
    is_camera = "://" in made.url or made.url.startswith("/dev")
    assert (source.title, source.fps, source.length, source.is_live) == (
        made.title, made.fps, made.length, is_camera,
    )  # fmt: skip


@pytest.mark.parametrize("made", [*FINITE, *GENERATED, *CAMERAS], indirect=True)
def test_pictures_come_in_order_and_keep_their_pixels_while_others_are_read(made: Made, source: Source) -> None:
    shots = [source.read() for _ in GRAYS]
    pixels = [picture_pixels(shot) for shot in shots if shot is not None]
    before = [array.copy() for array in pixels]
    if made.url in GENERATED or made.url.startswith("rtsp"):
        assert len({array.tobytes() for array in pixels}) == len(GRAYS)
        source.read()
    else:
        assert numbers_of(pixels) == list(range(12))
    assert all(np.array_equal(*pair) for pair in zip(pixels, before, strict=True))
    assert {(array.dtype, array.ndim, array.shape[2]) for array in pixels} == {(np.dtype(np.uint8), 3, 3)}


@pytest.mark.parametrize("made", [*FINITE, *GENERATED], indirect=True)
def test_what_is_no_camera_begins_again_with_its_first_picture_also_after_its_end(made: Made, source: Source) -> None:
    seen = []
    for _ in range(3):
        shots = [source.read() for _ in GRAYS]
        assert made.url in GENERATED or (source.read(), source.read()) == (None, None)
        seen.append([picture_pixels(shot).tobytes() for shot in shots if shot is not None])
        source.rewind()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("made", CAMERAS, indirect=True)
def test_the_loss_of_a_camera_is_an_error_with_its_address_and_it_cannot_begin_again(
    made: Made, source: Source
) -> None:
    address = made.title.partition(" ")[0]
    with pytest.raises(SourceError, match=f"^{address}: a camera cannot be restarted from the beginning$"):
        source.rewind()
    assert source.read() is not None
    made.lose()
    with pytest.raises(SourceError, match=f"^{address}: ") as lost:
        all(source.read() for _ in range(1000))
    with pytest.raises(SourceError, match=f"^{address}: ") as absent:
        open_source(made.url)
    assert "geheim" not in lost.value.message + absent.value.message + source.title


@pytest.mark.parametrize("made", [*FINITE, *GENERATED, *CAMERAS], indirect=True)
def test_a_closed_source_leaves_neither_files_nor_threads(made: Made, eventually: Callable[..., bool]) -> None:
    # Kept, so that it is `close` that releases, not the end of the object.
    opened: list[Source] = []

    def used(count: int) -> tuple[int, int]:
        for _ in range(count):
            opened.append(open_source(made.url))
            opened[-1].read()
            opened[-1].close()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    files, threads = used(3)
    used(5)
    # A camera's side of the connection is here too, and ends a moment later.
    assert eventually(lambda: used(0)[0] <= files and used(0)[1] <= threads)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/nowhere/film.mp4", "a video file, a folder of pictures, /dev/videoN, 'demo' or 'pattern'; no such file"),
        ("{folder}", "{folder}: expected pictures (.jpg, .jpeg, .png), found none"),
        ("/dev/video99", "/dev/video99: there is no such camera: No such file or directory"),
        ("/dev/null/video0", "/dev/null/video0: there is no such camera: Not a directory"),
        ("/dev/null", "/dev/null: the camera does not open"),
        ("http://me:geheim@127.0.0.1:{port}/x", "http://127.0.0.1:{port}: Connection refused"),
        ("http://me:geheim@camera.invalid/x", "http://camera.invalid: the host name 'camera.invalid' is not known: "),
        ("rtsp://me:geheim@127.0.0.1:{port}/x", "rtsp://127.0.0.1:{port}: Connection refused"),
        ("rtsp://me:geheim@camera.invalid/x", "rtsp://camera.invalid: the host name 'camera.invalid' is not known: "),
    ],
)
@pytest.mark.parametrize("decoder", ["auto", "opencv"])
def test_a_source_that_does_not_open_is_named_with_the_reason(
    tmp_path: Path, free_ports: Callable[[int], list[int]], url: str, message: str, decoder: str
) -> None:
    place = {"folder": tmp_path, "port": free_ports(1)[0]}
    with pytest.raises(SourceError) as caught:
        open_source(url.format(**place), decoder=decoder)
    assert message.format(**place) in caught.value.message
    assert "geheim" not in caught.value.message


@pytest.mark.parametrize("made", [*FINITE, *CAMERAS], indirect=True)
def test_a_lost_source_is_opened_again_and_the_gap_is_counted(
    cameras: Any, made: Made, eventually: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    cameras.apply(SourceEntry("cam", made.url, "sum", fps=100))
    for losses in range(1, 3):
        seen = len(cameras.of())
        assert eventually(lambda seen=seen: len(cameras.of()) > seen + 5)
        before = cameras.report()
        made.lose()
        assert eventually(lambda before=before: cameras.report().failures > before.failures + 2)
        assert eventually(lambda: cameras.report().state == "FAILED")
        made.find()
        assert eventually(lambda: cameras.report().state == "RUNNING")
        assert cameras.report().offline_s > before.offline_s
        kinds = [kind for kind, _ in cameras.events]
        assert kinds.count("source.running") > losses
        # A reason is told once, not with each attempt.
        assert kinds.count("source.failed") < cameras.report().failures
    numbers = [result.header.seq for result in cameras.of()]
    assert numbers == sorted(set(numbers))
    assert eventually(cameras.is_exact)
    cameras.apply()
    assert "geheim" not in f"{cameras.events} {caplog.text}"


def test_the_driver_of_a_camera_is_asked_for_rate_size_and_no_old_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, float] = {}

    class Driver:
        def __init__(self, path: str, api: int) -> None:
            asked.update({-1: api})

        def isOpened(self) -> bool:
            return True

        def get(self, key: int) -> float:
            return {cv2.CAP_PROP_FPS: 15.0, cv2.CAP_PROP_FRAME_WIDTH: 640.0, cv2.CAP_PROP_FRAME_HEIGHT: 480.0}[key]

        set = asked.__setitem__

    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    camera = local_camera.VideoCamera(Path("/dev/null"), 20.0, (800, 600))
    assert asked == {
        -1: cv2.CAP_V4L2, cv2.CAP_PROP_FRAME_WIDTH: 800, cv2.CAP_PROP_FRAME_HEIGHT: 600, cv2.CAP_PROP_FPS: 20.0,
        cv2.CAP_PROP_BUFFERSIZE: 1,
    }  # fmt: skip
    assert (camera.title, camera.fps) == ("/dev/null 640x480", 15.0)
