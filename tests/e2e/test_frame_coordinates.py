"""One scene in every encoding and transport to a real detector of the server: the face has the same coordinates.

The face is that of scikit-image's astronaut, a photograph of NASA's in the public domain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import cv2
import numpy as np
import pytest

from edge_server.client import Detection, Frame, FrameHeader, FrameStream, RegionSlice
from tests.kit.models import BUNDLED
from tests.kit.server import serve

pytestmark = pytest.mark.full

pictures = pytest.importorskip("skimage.data", reason="needs scikit-image, of the extra test-all")

DETECTOR = "face_detection_yunet"
WIDTH, HEIGHT = 640, 480
PADDING = 37
FACE = (44.7, 33.3, 89.8, 87.3)
"""Box of the face within a patch of 130 pixels: x_min, y_min, x_max, y_max."""
PLACES = [(20, 30), (261, 147), (473, 312)]
"""Upper left corners of the patch in a frame of 640x480."""


def scene(width: int, height: int, left: int, top: int, side: int) -> np.ndarray:
    """Return rgb8 pixels: slowly changing colours, and the astronaut's head in a square."""
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.dstack((60 + 80 * x / width, 70 + 70 * y / height, 150 - 60 * x / width)).astype(np.uint8)
    head = np.ascontiguousarray(pictures.astronaut()[0:260, 90:350])
    rgb[top : top + side, left : left + side] = cv2.resize(head, (side, side), interpolation=cv2.INTER_AREA)
    return rgb


def raw(rgb: np.ndarray, encoding: str, rows: np.ndarray, padding: int = 0) -> Frame:
    """Return a frame of `rows` of bytes, each padded with noise."""
    rows = rows.reshape(len(rows), -1)
    noise = np.random.default_rng(1).integers(0, 256, (len(rows), padding), dtype=np.uint8)
    padded = np.concatenate([rows, noise], axis=1)
    return Frame(FrameHeader(), *rgb.shape[:2], encoding, padded.shape[1], data=padded.tobytes())


def yuv_of(rgb: np.ndarray) -> np.ndarray:
    """Return Y, U, V of every pixel: ITU-R BT.601, limited range."""
    to_yuv = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
    return np.rint(rgb / 255 @ to_yuv.T + [16, 128, 128]).clip(0, 255).astype(np.uint8)


def nv12(rgb: np.ndarray) -> Frame:
    yuv = yuv_of(rgb)
    height, width = rgb.shape[:2]
    shared = yuv[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean(axis=(1, 3))
    return raw(rgb, "nv12", np.concatenate([yuv[..., 0], np.rint(shared).astype(np.uint8).reshape(height // 2, width)]))


def file(rgb: np.ndarray, name: str, *options: int) -> Frame:
    is_written, data = cv2.imencode(f".{name}", rgb[..., ::-1], options)
    assert is_written
    return Frame(FrameHeader(), format=name, data=data.tobytes())


WAYS: dict[str, tuple[Callable[[np.ndarray], Frame], float]] = {
    "bgr8, padded": (lambda rgb: raw(rgb, "bgr8", rgb[..., ::-1], PADDING), 0),
    "png": (lambda rgb: file(rgb, "png"), 0),
    "jpeg": (lambda rgb: file(rgb, "jpeg", cv2.IMWRITE_JPEG_QUALITY, 90), 2),
    "nv12": (nv12, 2),
}
"""Each encoding, and by how many pixels a box may differ from that of plain rgb8: 0 if the values are equal."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serve(BUNDLED, "--allow-client-shm=true") as running:
        yield running
        running.stop_cleanly()


def faces(server: Any, *frames: Frame) -> list[Detection]:
    """Return the one face that each frame must show."""
    with FrameStream(server.grpc, DETECTOR, keeps_all=True) as stream:
        results = list(stream.results(frames))
    assert [result.error for result in results if result.error] == []
    assert [len(result.detections) for result in results] == [1] * len(frames)
    return [result.detections[0] for result in results]


def box(found: Detection) -> np.ndarray:
    return np.array([found.x_min, found.y_min, found.x_max, found.y_max])


def points(found: Detection) -> np.ndarray:
    return np.array([(point.x, point.y) for point in found.keypoints])


@pytest.fixture(scope="module")
def plain(server: Any) -> list[Detection]:
    frames = [raw(rgb, "rgb8", rgb) for rgb in (scene(WIDTH, HEIGHT, *place, 130) for place in PLACES)]
    found = faces(server, *frames)
    for place, face in zip(PLACES, found, strict=True):
        assert abs(box(face) - np.add(FACE, place * 2)).max() < 3
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_face_has_the_same_pixel_coordinates_for_every_frame_encoding(server: Any, plain: Any, way: str) -> None:
    make, tolerance_px = WAYS[way]
    found = faces(server, *(make(scene(WIDTH, HEIGHT, *place, 130)) for place in PLACES))
    for face, expected in zip(found, plain, strict=True):
        assert abs(box(face) - box(expected)).max() <= tolerance_px
        assert abs(points(face) - points(expected)).max() <= tolerance_px
        assert face.score == pytest.approx(expected.score, abs=0.02 if tolerance_px else 0)


@pytest.mark.parametrize("padding", [0, PADDING])
def test_a_face_has_the_same_pixel_coordinates_with_shared_memory(server: Any, plain: Any, padding: int) -> None:
    made = [raw(rgb, "rgb8", rgb, padding) for rgb in (scene(WIDTH, HEIGHT, *place, 130) for place in PLACES)]
    size = len(made[0].data)
    offset = 128
    region = SharedMemory(create=True, size=len(made) * size + offset)
    try:
        body = {"key": f"/{region.name.lstrip('/')}", "offset": 0, "byte_size": region.size}
        path = "/v2/systemsharedmemory/region/camera"
        status, answer = server.request("POST", f"{path}/register", json.dumps(body).encode())
        assert status == 200, answer
        frames = []
        for number, frame in enumerate(made):
            begin = offset + number * size
            region.buf[begin : begin + size] = frame.data
            slice_ = RegionSlice("camera", begin, size)
            frames.append(Frame(FrameHeader(), HEIGHT, WIDTH, "rgb8", frame.step, region=slice_))
        assert faces(server, *frames) == plain
        assert server.request("POST", f"{path}/unregister", b"{}")[0] == 200
    finally:
        region.close()
        region.unlink()


@pytest.mark.parametrize(
    ("width", "height", "side"), [(1280, 720, 260), (640, 480, 130), (480, 640, 130), (720, 1280, 260), (333, 641, 130)]
)
def test_boxes_are_in_pixels_of_the_frame_for_any_frame_shape(server: Any, width: int, height: int, side: int) -> None:
    places = [(11, 7), (width - side, height - side), ((width - side) // 2, (height - side) // 3)]
    found = faces(server, *(raw(rgb, "rgb8", rgb) for rgb in (scene(width, height, *place, side) for place in places)))
    scale = side / 130
    for place, face in zip(places, found, strict=True):
        expected = np.array(FACE) * scale + [*place, *place]
        # The detector's grid makes its boxes shake by up to three pixels of the network's input as a face moves.
        assert abs(box(face) - expected).max() <= 3 * scale, (box(face), expected)
        assert 0 <= face.x_min < face.x_max <= width
        assert 0 <= face.y_min < face.y_max <= height
