"""Headers of image files. An accepted file is decoded by OpenCV to the size in its header."""

from __future__ import annotations

from collections.abc import Iterable

import cv2
import numpy as np
from stubs import result_of

from edge_server.plugins.vision.image_header import MAX_PIXELS, ImageHeader, read_header

_MAX_DECODED_PIXELS = 1 << 16

cv2.setNumThreads(1)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


def seeds() -> Iterable[bytes]:
    picture = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    for suffix, settings in (
        (".jpg", []),
        (".jpg", [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, 5]),
        (".png", []),
        (".bmp", []),
        (".webp", [cv2.IMWRITE_WEBP_QUALITY, 20]),
        (".webp", [cv2.IMWRITE_WEBP_QUALITY, 101]),
    ):
        yield cv2.imencode(suffix, picture, settings)[1].tobytes()


def check(data: bytes) -> None:
    header: ImageHeader | None = result_of(lambda: read_header(memoryview(data), "the image"))
    if header is None:
        return
    assert 0 < header.width * header.height <= MAX_PIXELS
    if header.width * header.height > _MAX_DECODED_PIXELS:
        return
    try:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return
    if picture is not None:
        assert picture.shape[:2] == (header.height, header.width), f"{header} is decoded as {picture.shape}"
