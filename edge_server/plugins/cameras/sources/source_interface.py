"""Base class of sources of pictures, their picture type and their error type."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from edge_server.errors import InvalidRequest
from edge_server.plugins.vision import decode

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SourceError(InvalidRequest):
    """A source cannot be opened or read. The message holds no part of a URL besides host and port."""


@dataclass(frozen=True, slots=True)
class SourcePicture:
    """One picture: `pixels` as 8-bit BGR `(height, width, 3)`, `convert`, which returns them, or an encoded `file` in
    `format`.

    `convert` may be called by any thread, at any time, more than once.
    `stamp_ns` is when the camera took it, by the camera's clock, in nanoseconds since 1970; 0 if it does not say.
    """

    pixels: npt.NDArray[np.uint8] | None = None
    file: bytes = b""
    format: str = ""
    name: str = ""
    stamp_ns: int = 0
    convert: Callable[[], npt.NDArray[np.uint8]] | None = None


class Source(Protocol):
    """A sequence of pictures. Not thread-safe.

    `title` is a description. `fps` is the source's own rate, or 0. `length` is the expected number of pictures, or 0
    for an endless source. If `is_live`, pictures arrive in real time and must be read without delay.
    """

    title: str
    fps: float
    length: int
    is_live: bool

    def read(self) -> SourcePicture | None:
        """Return the next picture, or None at the end. Raises SourceError if reading fails."""

    def rewind(self) -> None:
        """Restart from the first picture. Raises SourceError if this is not possible."""

    def close(self) -> None:
        """Release all resources. The source must not be used afterwards."""


class Camera:
    """Base class of cameras: sources that are live and have no end. `_address` is what messages call it."""

    is_live = True
    length = 0
    fps = 0.0
    _address: str

    def rewind(self) -> None:
        raise SourceError(f"{self._address}: a camera cannot be restarted from the beginning")


def opencv() -> ModuleType:
    """Return the module cv2 with its log output disabled. Raises Unsupported if OpenCV is not installed."""
    cv2 = decode.opencv()
    # Log lines of OpenCV and FFmpeg would damage the live table and hold URLs. FFmpeg's log level can be set only by an
    # environment variable; -8 means quiet.
    os.putenv("OPENCV_FFMPEG_LOGLEVEL", "-8")
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2
