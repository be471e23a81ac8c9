"""Source that reads the pictures of a video file with OpenCV."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edge_server.plugins.cameras.sources.source_interface import SourceError, SourcePicture, opencv

_MAX_FRAME_COUNT = 1 << 40
"""For files without an index, OpenCV reports huge frame counts. Counts from this on mean that the length is unknown."""


class VideoFile:
    """The pictures of a video, in order."""

    is_live = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._capture = self._open()
        cv2 = opencv()
        count, fps = self._capture.get(cv2.CAP_PROP_FRAME_COUNT), self._capture.get(cv2.CAP_PROP_FPS)
        self.length = int(count) if math.isfinite(count) and 0 < count < _MAX_FRAME_COUNT else 0
        self.fps = fps if math.isfinite(fps) and 0 < fps <= 1000 else 0.0
        self._read = 0
        width, height = (int(self._capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        self.title = f"{path.name} {width}x{height}"

    def _open(self) -> Any:
        capture = opencv().VideoCapture(str(self._path))
        if not capture.isOpened():
            raise SourceError(f"{self._path}: expected a video, given a file that OpenCV cannot open as one")
        return capture

    def read(self) -> SourcePicture | None:
        is_read, pixels = self._capture.read()
        if not is_read:
            if self._read == 0:
                raise SourceError(f"{self._path}: no picture in it can be decoded")
            return None
        self._read += 1
        return SourcePicture(pixels)

    def rewind(self) -> None:
        # Reopened, because seeking is inexact in files whose first picture is no key frame.
        self._capture.release()
        self._capture = self._open()
        self._read = 0

    def close(self) -> None:
        self._capture.release()
