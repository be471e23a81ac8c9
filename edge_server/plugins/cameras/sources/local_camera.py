"""Local camera (V4L2), such as a USB camera, read by OpenCV."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge_server.plugins.cameras.sources.source_interface import Camera, SourceError, SourcePicture, opencv


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
