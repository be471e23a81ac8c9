"""One scene as frames of several kinds to a real detector of the server: the face has the same coordinates. Every
encoding and every way into a tensor are in tests/plugins/vision/test_frame_paths.py.

The face is that of scikit-image's astronaut, a photograph of NASA's in the public domain.
"""

from __future__ import annotations

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

WIDTH, HEIGHT, SIDE = 640, 480, 130
FACE = (44.7, 33.3, 89.8, 87.3)
"""Box of the face within a patch of 130 pixels: x_min, y_min, x_max, y_max."""
PLACES = [(20, 30), (261, 147), (473, 312)]
"""Upper left corners of the patch in a frame."""


def scene(left: int, top: int) -> np.ndarray:
    """Return rgb8 pixels: slowly changing colours, and the astronaut's head in a square."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    rgb = np.dstack((60 + 80 * x / WIDTH, 70 + 70 * y / HEIGHT, 150 - 60 * x / WIDTH)).astype(np.uint8)
    head = np.ascontiguousarray(pictures.astronaut()[0:260, 90:350])
    rgb[top : top + SIDE, left : left + SIDE] = cv2.resize(head, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return rgb


def raw(encoding: str, rows: np.ndarray, padding: int = 0) -> Frame:
    """Return a frame of `rows` of bytes, each padded with noise."""
    rows = rows.reshape(len(rows), -1)
    noise = np.random.default_rng(1).integers(0, 256, (len(rows), padding), dtype=np.uint8)
    padded = np.concatenate([rows, noise], axis=1)
    return Frame(FrameHeader(), HEIGHT, WIDTH, encoding, padded.shape[1], data=padded.tobytes())


def nv12(rgb: np.ndarray) -> Frame:
    """ITU-R BT.601, limited range."""
    to_yuv = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
    yuv = np.rint(rgb / 255 @ to_yuv.T + [16, 128, 128])
    shared = yuv[..., 1:].reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 2).mean(axis=(1, 3))
    rows = np.concatenate([yuv[..., 0], np.rint(shared).reshape(HEIGHT // 2, WIDTH)])
    return raw("nv12", rows.clip(0, 255).astype(np.uint8))


def jpeg(rgb: np.ndarray) -> Frame:
    data = cv2.imencode(".jpg", rgb[..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, 90))[1]
    return Frame(FrameHeader(), format="jpeg", data=data.tobytes())


def faces(server: Any, frames: list[Frame]) -> list[Detection]:
    """Return the one face that each frame must show."""
    with FrameStream(server.grpc, "face_detection_yunet", keeps_all=True) as stream:
        results = list(stream.results(frames))
    assert [result.error for result in results if result.error] == []
    assert [len(result.detections) for result in results] == [1] * len(frames)
    return [result.detections[0] for result in results]


def points(found: Detection) -> np.ndarray:
    corners = [found.x_min, found.y_min, found.x_max, found.y_max]
    return np.array([*corners, *(value for point in found.keypoints for value in (point.x, point.y))])


def test_a_face_has_the_same_coordinates_in_every_kind_of_frame() -> None:
    scenes = [scene(*place) for place in PLACES]
    with serve(BUNDLED, "--allow-client-shm=true") as server:
        plain = faces(server, [raw("rgb8", rgb) for rgb in scenes])
        for place, face in zip(PLACES, plain, strict=True):
            assert abs(points(face)[:4] - np.add(FACE, place * 2)).max() < 3

        for make, tolerance_px in ((lambda rgb: raw("bgr8", rgb[..., ::-1], 37), 0), (nv12, 2), (jpeg, 2)):
            found = faces(server, [make(rgb) for rgb in scenes])
            for face, expected in zip(found, plain, strict=True):
                assert abs(points(face) - points(expected)).max() <= tolerance_px
                assert face.score == pytest.approx(expected.score, abs=0.02 if tolerance_px else 0)

        made = [raw("rgb8", rgb, 37) for rgb in scenes]
        size, path = len(made[0].data), "/v2/systemsharedmemory/region/camera"
        region = SharedMemory(create=True, size=len(made) * size)
        try:
            region.buf[:] = b"".join(frame.data for frame in made)
            body = {"key": f"/{region.name.lstrip('/')}", "offset": 0, "byte_size": region.size}
            assert server.ask(f"{path}/register", body)[0] == 200
            slices = [RegionSlice("camera", number * size, size) for number in range(len(made))]
            assert faces(server, [
                Frame(FrameHeader(), HEIGHT, WIDTH, "rgb8", made[0].step, region=part) for part in slices
            ]) == plain  # fmt: skip
            assert server.ask(f"{path}/unregister", {})[0] == 200
        finally:
            region.close()
            region.unlink()
        server.stop_cleanly()
