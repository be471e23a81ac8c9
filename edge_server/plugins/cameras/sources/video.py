"""Source that reads video files and local cameras with OpenCV."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

from edge_server.plugins.cameras.sources.source_interface import Camera, SourceError, SourcePicture, opencv

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


class VideoCamera(Camera):
    """A camera of this machine, opened by its device file (Video4Linux)."""

    def __init__(self, path: Path, fps: float, size: tuple[int, int] | None) -> None:
        """Open the camera and request a rate and a size `(width, height)`; the driver chooses the nearest ones."""
        self._address = str(path)
        _check_device(path)
        cv2 = opencv()
        self._capture = cv2.VideoCapture(str(path), cv2.CAP_V4L2)
        if not self._capture.isOpened():
            raise SourceError(f"{path}: the camera does not open; is another program using it?")
        if size is not None:
            self._capture.set(cv2.CAP_PROP_FRAME_WIDTH, size[0])
            self._capture.set(cv2.CAP_PROP_FRAME_HEIGHT, size[1])
        if fps:
            self._capture.set(cv2.CAP_PROP_FPS, fps)
        # A longer driver queue would deliver old pictures.
        self._capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
        self.fps = max(float(self._capture.get(cv2.CAP_PROP_FPS)), 0.0)
        width, height = (int(self._capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        self.title = f"{path} {width}x{height}"

    def read(self) -> SourcePicture | None:
        is_read, pixels = self._capture.read()
        if not is_read:
            raise SourceError(f"{self._address}: the camera delivers no more pictures")
        return SourcePicture(pixels)

    def close(self) -> None:
        self._capture.release()


def _check_device(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SourceError(f"{path}: there is no such camera: {error.strerror}") from error
    if not stat.S_ISCHR(mode):
        raise SourceError(f"{path}: expected the device file of a camera")
    if not os.access(path, os.R_OK | os.W_OK):
        raise SourceError(f"{path}: this user may not open the camera; on most systems the group 'video' may")
